"""Blocks cut into runs that several devices hold: what is written into the runs, and read of them and merged, is what
is written into and read of whole blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.common import context_parallel as stripes

SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
# Runs of 2, four to a block: rows end before, at and behind each run's end. One row is not in the step.
LENGTHS = (*range(18), 9)
DECODE = testing.Case(lengths=LENGTHS, new=(0, *[1] * 17, 0), block_size=8, **SIZES)
PROMPTS = testing.Case(lengths=LENGTHS, new=(*[-(-n * 2 // 3) for n in LENGTHS[:-1]], 0), block_size=8, **SIZES)
ONE_TOKEN_RUNS = testing.Case(lengths=(5, 1, 0, 6), new=(2, 1, 0, 6), block_size=3, packed=True, padding=2, **SIZES)
# Runs of several tiles, of which a window leaves the first ones out.
LONG = testing.Case(lengths=(1200, 1000, 513), new=(1, 1, 1), block_size=16, **SIZES)


def packed(case):
    return testing.dataclasses.replace(case, packed=True, padding=3)


def cut(pool, count):
    """A pool, or its scales, as what each of `count` devices holds, `[count, ...]`."""
    return jnp.moveaxis(pool.reshape(*pool.shape[:3], count, -1, *pool.shape[4:]), 3, 0)


@functools.partial(jax.jit, static_argnames=("count", "window", "chunk", "sink_tokens", "causal"))
def merged(q, kv, tables, lengths, new, count, **options):
    """Attention over all runs, one after another."""

    def attend(run):
        number, kv = run
        stripe = jnp.stack([number, jnp.int32(count)])
        return pallas_kernels.paged_attention(q, kv, tables, lengths, new, stripe=stripe, return_lse=True, **options)

    outs, lses = jax.lax.map(attend, (jnp.arange(count, dtype=jnp.int32), cut(kv, count)))
    return pallas_kernels.merge_attention(outs, lses)


def variants(case):
    """Options that go by position, and what they need of a case."""
    rng, tokens = np.random.default_rng(3), testing.make_inputs(case).q.shape[:-2]
    width = -(-max(case.lengths) // case.block_size)
    return {
        "alibi": jnp.linspace(0.1, 0.5, 6),
        "mask": jnp.asarray(rng.random((*tokens, width * case.block_size)) < 0.6),
        "spans": jnp.asarray(rng.integers(0, 3, tokens), jnp.int32),
        "tree": jnp.asarray(rng.integers(-1, np.arange(tokens[-1]), tokens), jnp.int32),
        "blocks": jnp.asarray([[0, width - 1]] * len(case.lengths), jnp.int32),
    }


CASES = [
    (DECODE, 4, {}),
    (LONG, 4, {"window": 300}),
    *[
        (packed(PROMPTS), 4, {"window": 5}),
        (DECODE, 4, {"causal": False}), (DECODE, 2, {"window": 3}), (PROMPTS, 8, {}), (ONE_TOKEN_RUNS, 3, {}),
        (PROMPTS, 4, {"chunk": 6}), (PROMPTS, 4, {"window": 3, "sink_tokens": 3}), (PROMPTS, 4, {"causal": False}),
        *[(PROMPTS, 4, name) for name in ("alibi", "mask", "spans", "tree", "blocks")],
    ] * NIGHTLY,
]  # fmt: skip


@pytest.mark.parametrize(("case", "count", "options"), CASES)
def test_what_is_read_of_runs_merges(case, count, options):
    options = {options: variants(case)[options]} if isinstance(options, str) else options
    inputs = testing.make_inputs(case)
    expected = testing.expected(case, inputs, return_lse=True, **options)
    for got, wanted in zip(merged(*inputs, count=count, **options), expected, strict=True):
        testing.assert_close(got, wanted)


@functools.partial(jax.jit, static_argnames="count")
def written(kv, k, tables, lengths, new, count):
    """A pool written whole, and one written run by run."""

    def write(run):
        number, kv = run
        stripe = jnp.stack([number, jnp.int32(count)])
        return pallas_kernels.write_kv(kv, k, k + 1, tables, lengths, new, stripe=stripe)

    runs = jax.lax.map(write, (jnp.arange(count, dtype=jnp.int32), cut(kv, count)))
    return cut(pallas_kernels.write_kv(kv, k, k + 1, tables, lengths, new), count), runs


WRITES = {"packed": packed(PROMPTS)} | ({"padded": PROMPTS, "decode": DECODE} if NIGHTLY else {})


@pytest.mark.parametrize("case", WRITES.values(), ids=WRITES.keys())
def test_what_is_written_into_runs(case):
    q, *inputs = testing.make_inputs(case)
    whole, runs = written(inputs[0], q[..., :2, :], *inputs[1:], count=4)
    np.testing.assert_array_equal(whole, runs)


def test_a_kernel_for_whole_rows_takes_decode_steps_alone():
    """Its stripe is gone before a backend is asked."""
    stripe = jax.ShapeDtypeStruct((2,), jnp.int32)
    kv = jax.ShapeDtypeStruct((65, 2, 2, 16, 128), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    for tokens, options, chosen in (((4, 1), {}, "tpu"), ((4, 1), {"window": 8}, "xla"), ((4, 9), {}, "xla")):
        q = jax.ShapeDtypeStruct((*tokens, 8, 128), jnp.bfloat16)
        choice = pallas_kernels.explain(q=q, kv=kv, tables=tables, stripe=stripe, platform="tpu", **options)
        assert choice.implementation == chosen, choice
    assert "take no stripe yet" in choice.reason
    with pytest.raises(ValueError, match=r"stripe must be i32\[2\], which of how many runs"):
        pallas_kernels.paged_attention(*testing.make_inputs(ONE_TOKEN_RUNS), stripe=jnp.zeros(3, jnp.int32))


def test_where_tokens_lie():
    """Each token lies on one device, in order, and where it says that it does."""

    @jax.jit
    def lies(stripe):
        before = stripes.count_local_tokens(jnp.arange(41, dtype=jnp.int32), stripe, 2)
        place = jnp.arange(14, dtype=jnp.int32)
        return before, stripes.position_of(place // 2, place % 2, stripe, 2)

    owners = np.zeros(40, int)
    for number in range(3):
        before, position = map(np.asarray, lies(jnp.array([number, 3], jnp.int32)))
        own = np.diff(before) == 1
        np.testing.assert_array_equal(position[: own.sum()], np.flatnonzero(own))
        owners += own
    np.testing.assert_array_equal(owners, 1)
