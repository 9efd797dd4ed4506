"""Rows that begin with the same blocks read them once, in kernels that know nothing of it: two calls, and a merge.

In the first a group of rows is one row, whose queries are those of all of them and see all of it. In the second every
row is what it holds besides: its table begins that many blocks later. For kernels measure no positions but distances.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.api.backends import IMPLEMENTATIONS, find_backend, unsupported
from pallas_kernels.common import shared_prefix
from pallas_kernels.common.batch import Call, MaskSpec, PagedBatch, SoftmaxOptions
from pallas_kernels.common.merge import merge_attention
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.shared_prefix import TOGETHER, Shared


def cascade_refusal(implementation: str, call: Call) -> str | None:
    """Returns why each row reads by itself what `find_shared` found that it shares; None: they read it once.

    Args:
      implementation: what runs it.
      call: of `paged_attention`; of arrays only shapes and dtypes are read.

    >>> cascade_refusal("tpu", Call(stored=None, batch=None, mask=MaskSpec(window=5)))
    'With a window the tpu kernels read every row by itself.'
    """
    mask, options = call.mask, call.options
    alone = {"deterministic": options.deterministic or None, "blocks": mask.blocks, "sink_tokens": mask.sink_tokens}
    alone["tokens"] = mask.tokens
    for name, x in alone.items():
        if x is not None:
            return f"With {name} every row is read by itself."
    if find_backend(implementation).READS_SHARED_ONCE:
        return None
    if IMPLEMENTATIONS[implementation] is None:
        return f"The implementation {implementation!r} reads every row by itself."
    for name, size in {"window": mask.window, "chunk": mask.chunk}.items():
        if size is not None:
            return f"With a {name} the {implementation} kernels read every row by itself."
    q, tables = call.q, call.batch.block_tables
    queries = jax.ShapeDtypeStruct((_most_queries(q, tables), *q.shape[-2:]), q.dtype)
    asked = Call(call.stored, PagedBatch(tables, None, None), MaskSpec(causal=False), q=queries)
    return unsupported(implementation, "paged_attention", asked)


def read_once(run: Callable, attend: Callable, call: Call, *, branches: bool = True, **others: Any) -> Any:
    """Returns what `run` does of a call, the rows of which read what they share only once.

    Args:
      run, attend: a backend's `paged_attention`, or `write_and_attend` where the call has keys; and the former.
      call: with `shared`, of `find_shared`, and nothing that `cascade_refusal` has a reason against.
      branches: where no row shares anything, the first call is not made; else it has nothing to do then.
      others: what kernels alone take, as `interpret`.
    """
    q, new = call.q, () if call.k is None else (call.k, call.v)
    options = dataclasses.replace(call.options, shared=None)
    if not q.size:
        return run(q, *new, call.stored, call.batch, call.mask, options, **others)
    of, axes, block_size = Shared.unpack(call.options.shared), q.shape[:-2], call.stored.kv.shape[3]
    tables, kv_lens, query_lens, query_starts, _ = call.batch
    rest = call.batch._replace(
        block_tables=_drop_first_columns(tables, of.tokens // block_size), kv_lens=kv_lens - of.tokens
    )
    result = run(q, *new, call.stored, rest, call.mask, dataclasses.replace(options, return_lse=True), **others)
    (out, lse), *written = result if new else (result,)
    stored = written[0] if written else call.stored

    # What follows from tables and counts is not in the branch: layers have it in common.
    groups = _find_groups(of, tables)
    token = jax.tree.map(jnp.ravel, locate(axes, kv_lens, query_lens, query_starts))
    shares = token.valid & (of.tokens[token.row] > 0)
    most, number = _most_queries(q, tables), jnp.arange(token.row.size, dtype=jnp.int32)
    slot = of.place[token.row] + token.position - (kv_lens - query_lens)[token.row]
    there = jnp.where(shares, slot, most + number)  # each has one of its own, those that are dropped too
    order = jnp.zeros(most, jnp.int32).at[there].set(number, mode="drop", unique_indices=True)
    slot = jnp.where(shares, slot, 0)

    def attend_groups() -> tuple[jax.Array, jax.Array]:
        queries = q.reshape(-1, *q.shape[-2:])[order]
        asked = SoftmaxOptions(scale=options.scale, soft_cap=options.soft_cap, return_lse=True)
        first, first_lse = attend(queries, stored, groups, MaskSpec(causal=False), asked, **others)
        first_lse = jnp.where(shares[:, None], first_lse[slot], -jnp.inf)
        outs = jnp.stack([first[slot].reshape(out.shape), out])
        return merge_attention(outs, jnp.stack([first_lse.reshape(lse.shape), lse]))

    out, lse = jax.lax.cond(jnp.any(of.tokens > 0), attend_groups, lambda: (out, lse)) if branches else attend_groups()
    found = (out, lse) if options.return_lse else out
    return (found, *written) if written else found


def _most_queries(q, tables) -> int:
    """Returns for how many queries there must be room in groups."""
    return min(max(1, q.size // (q.shape[-2] * q.shape[-1])), tables.shape[0] * TOGETHER)


def _find_groups(of: Shared, tables: jax.Array) -> PagedBatch:
    """Returns as many groups as there can be as rows; those that there are not hold nothing."""
    leads, rows = of.queries > 0, tables.shape[0]
    most = max(1, rows // (shared_prefix.WORTH_ROWS + 1))
    group = jnp.arange(1, most + 1, dtype=jnp.int32)[:, None]
    is_leader = leads[None] & (jnp.cumsum(leads, dtype=jnp.int32)[None] == group)

    def select_leader(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_leader, x[None], 0), axis=1, dtype=jnp.int32)

    leader = select_leader(jnp.arange(rows, dtype=jnp.int32))
    return PagedBatch(tables[leader], select_leader(of.tokens), select_leader(of.queries))


def _drop_first_columns(tables: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns each row's table from a column of its own on, and the null block behind it.

    Bit by bit of the column: what gathers is a loop over rows on a TPU, if not over entries.
    """
    for bit in range(tables.shape[1].bit_length()):
        later = jnp.pad(tables, ((0, 0), (0, 1 << bit)))[:, 1 << bit :]
        tables = jnp.where(((columns >> bit) & 1 == 1)[:, None], later, tables)
    return tables
