"""Steps of rows that share first blocks, whatever `find_shared` would think of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import testing, xla
from pallas_kernels.api import cascade
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.common.shared_prefix import Shared


def share(case, inputs, groups):
    """The inputs with the blocks of each group's rows, `{rows: blocks}`, those of its first one; with NaN in what they
    gave up for that, and the plan of it."""
    tables, kv = np.array(inputs.tables), np.array(inputs.kv)
    shared, place = np.zeros((4, len(case.lengths)), np.int32), 0
    shared[1] = np.arange(len(case.lengths))
    for rows, blocks in sorted(groups.items()):
        shared[3, rows[0]] = sum(case.new[row] for row in rows)
        for row in rows:
            assert case.lengths[row] - case.new[row] >= blocks * case.block_size
            if row != rows[0]:
                kv[tables[row, :blocks]] = np.nan
                tables[row, :blocks] = tables[rows[0], :blocks]
            shared[:3, row] = blocks * case.block_size, rows[0], place
            place += case.new[row]
    return inputs._replace(tables=jnp.asarray(tables), kv=jnp.asarray(kv)), shared


def spoilt(case, inputs, shared):
    """With what a group shares found by its first row's table alone: the others' entries are those of the null block,
    which is NaN."""
    tables, of = np.array(inputs.tables), Shared.unpack(shared)
    for row in np.flatnonzero(of.leader != np.arange(len(case.lengths))):
        tables[row, : of.tokens[row] // case.block_size] = 0
    return inputs._replace(tables=jnp.asarray(tables), kv=inputs.kv.at[0].set(jnp.nan))


def check(backend, run, case, groups, kind=None, writes=False, **options):
    """A backend's attention of such a step against the reference. `run(function, arrays, **static)` runs it. `writes`:
    the step's keys and values are not there yet, but NaN."""
    whole, shared = share(case, testing.make_inputs(case), groups)
    stored, exact = {}, whole
    inputs = spoilt(case, whole, shared)
    if kind is not None:
        _, _, exact = testing.quantise(case, whole, kind)
        inputs, scale, _ = testing.quantise(case, inputs, kind)
        stored = {"kv_scale": scale, "kind": kind}
    arguments = inputs._asdict() | testing.make_options(case) | stored | {"shared": jnp.asarray(shared)}
    op = backend.write_and_attend if writes else backend.paged_attention
    if writes:
        k, v = jax.random.normal(jax.random.key(0), (2, *inputs.q.shape[:-2], case.num_kv_heads, case.head_dim))
        k, v = k.astype(case.dtype), v.astype(case.dtype) if case.rank is None else None
        write = functools.partial(testing.run, xla.write_kv, rank=case.rank)
        hidden = write(inputs.kv, *(x if x is None else jnp.full_like(x, np.nan) for x in (k, v)), *inputs[2:])
        written = write(hidden, k, v, *inputs[2:])
        exact = exact._replace(kv=write(exact.kv, k, v, *inputs[2:]))
        arguments |= {"kv": hidden, "k": k, "v": v}
    static = {name: x for name, x in arguments.items() if not isinstance(x, jax.Array)}
    arrays = {name: x for name, x in arguments.items() if name not in static}

    def attend(arrays, **static):
        others = {name: static.pop(name) for name in ("interpret", "step_tokens", "branches") if name in static}
        call = bundle_call(**arrays, **static, return_lse=True)
        return cascade.read_once(op, backend.paged_attention, call, **others)

    result = run(attend, arrays, **static, **options)
    if writes:
        result, pool = result[0], result[1].pools
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (pool, written)))  # a NaN equals a NaN
    out, lse = result
    expected, expected_lse = testing.expected(case, exact, return_lse=True)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)
