"""Attention to entries of several tokens each, as layers that compress store them: every backend against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_rows
from cases import in_tiles
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.testing import Case, Inputs
from pallas_kernels.xla import tile_sizes

RATIO = 4
TILE = tile_sizes.find_sizes().queries
# Tokens of rows, and those of the step: at an entry's end and beside it, without an entry, without a token.
STEP = ((0, 3, 4, 5, 30, 31, 32, 9, 12, TILE + 6, 41), (0, 3, 4, 1, 7, 30, 2, 0, 9, TILE + 6, 1))
DECODE = ((1, 3, 4, 5, 31, 32, 0, 65), (1, 1, 1, 1, 1, 1, 0, 1))
LATENT = dict(num_kv_heads=1, head_dim=24, rank=16, scale=0.2)
CASES = {
    "packed": (*STEP, dict(packed=True, padding=3)),
    "padded": (*STEP, dict(padding=1, soft_cap=3.0)),
    "latent": (*STEP, dict(packed=True, sinks=True, **LATENT)),
    "decode": (*DECODE, dict(sinks=True)),
    "decode latent": (*DECODE, dict(soft_cap=3.0, **LATENT)),
}


def make_step(lengths, new, fields, *, block_size=4) -> tuple[Inputs, dict, Case]:
    """Returns a step whose pool holds the entries of rows, its options, and its case. All that is no entry is NaN."""
    entries = tuple(n // RATIO for n in lengths)
    case = Case(entries, new, block_size=block_size, max_blocks=max(entries) // block_size + 2, **fields)
    inputs = testing.make_inputs(case)._replace(lengths=jnp.asarray(lengths, jnp.int32))
    return inputs, testing.make_options(case) | {"compress_ratio": RATIO}, case


def attend_by_numpy(inputs: Inputs, case: Case, chosen=None, **options):
    """Computes attention of each token to the entries whose tokens it sees all, in float64: outputs and LSEs."""
    q, kv, tables, lengths, new = (np.asarray(x, np.float64 if i < 2 else np.int64) for i, x in enumerate(inputs))
    heads, width = q.shape[-2], case.rank or case.head_dim
    out, lse = np.zeros((*q.shape[:-1], width)), np.full(q.shape[:-1], -np.inf)
    scale, soft_cap = case.scale or case.head_dim**-0.5, case.soft_cap
    starts = np.cumsum(new) - new
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        for nth in range(count):
            at = (starts[row] + nth,) if case.packed else (row, nth)
            seen = list(range((length - count + nth + 1) // RATIO))
            if chosen is not None:
                seen = sorted(set(seen) & set(np.asarray(chosen)[at].tolist()))
            if not seen:
                continue
            slots = [(tables[row, j // case.block_size], j % case.block_size) for j in seen]
            both = np.stack([kv[block, :, :, offset, : case.head_dim] for block, offset in slots])  # [n, 1 or 2, K, D]
            keys, values = both[:, 0], both[:, -1, :, :width]
            group = heads // case.num_kv_heads
            logits = np.einsum("hd,nhd->hn", q[at], keys.repeat(group, axis=1)) * scale
            logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
            sink = np.asarray(options["sinks"], np.float64) if case.sinks else np.full(heads, -np.inf)
            lse[at] = np.log(np.exp(logits).sum(axis=1) + np.exp(sink))
            out[at] = np.einsum("hn,nhd->hd", np.exp(logits - lse[at][:, None]), values.repeat(group, axis=1))
    return out, lse


def check(name, implementation="xla", widen=lambda x: x, **given):
    inputs, options, case = make_step(*CASES[name])
    run = functools.partial(pallas_kernels.paged_attention, implementation=implementation)
    out, lse = short_rows.run_jitted(run, *widen(inputs), **options, **given, return_lse=True)
    wanted, wanted_lse = attend_by_numpy(inputs, case, chosen=given.get("tokens"), **options)
    testing.assert_close(out, wanted)
    testing.assert_close(lse, wanted_lse)
    assert not np.asarray(out)[np.isneginf(wanted_lse)].any()


@pytest.mark.parametrize("name", CASES if NIGHTLY else ["packed", "decode latent"])
def test_the_reference(name):
    check(name, "reference")


@pytest.mark.parametrize("name", CASES)
def test_xla(name):
    check(name)


@pytest.mark.parametrize("name", CASES if NIGHTLY else ["packed", "latent", "decode"])
def test_xla_in_tiles(name):
    check(name, widen=in_tiles)


def test_xla_deterministic():
    check("packed", widen=in_tiles, deterministic=True)


@pytest.mark.parametrize("name", ["packed", "decode latent"])
def test_chosen_entries(name):
    """Of the entries that a query names, it sees those whose tokens lie behind it: ahead are some, twice others."""
    inputs, _, _ = make_step(*CASES[name])
    draw = np.random.default_rng(1)
    tokens = draw.integers(-2, max(CASES[name][0]) // RATIO + 2, (*inputs.q.shape[:-2], 5))
    check(name, tokens=jnp.asarray(tokens, jnp.int32))


def test_queries_that_are_not_causal_see_all_entries():
    """So do those of another sequence, whose number is no row's own."""
    inputs, options, _ = make_step((9, 3, 16), (4, 4, 4), {})
    found = pallas_kernels.paged_attention(*inputs, **options, causal=False, implementation="xla")
    entries = inputs._replace(lengths=inputs.lengths // RATIO)
    wanted = pallas_kernels.paged_attention(
        *entries, **options | {"compress_ratio": None}, causal=False, implementation="reference"
    )
    testing.assert_close(found, wanted)
    reference = pallas_kernels.paged_attention(*inputs, **options, causal=False, implementation="reference")
    testing.assert_close(reference, wanted)


@pytest.mark.parametrize("name", ["packed", "latent", "decode"] if NIGHTLY else ["latent"])
def test_gradients_are_those_of_the_reference(name):
    inputs, options, case = make_step(*CASES[name])
    weights = np.random.default_rng(1).standard_normal(inputs.q.shape).astype(np.float32)[..., : case.rank]
    kv = jnp.nan_to_num(inputs.kv)

    def loss(q, kv, implementation):
        out = pallas_kernels.paged_attention(q, kv, *inputs[2:], **options, implementation=implementation)
        return (weights * out).sum()

    found, wanted = (jax.grad(loss, (0, 1))(inputs.q, kv, name) for name in ("xla", "reference"))
    for one, other in zip(found, wanted, strict=True):
        testing.assert_close(one, other)


@pytest.mark.parametrize("platform, name", [("cuda", "gpu"), ("tpu", "tpu")])
def test_kernels_take_steps_of_one_token_a_row(platform, name):
    def explain(*axes):
        q, kv = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((*axes, 8, 128), (9, 2, 2, 16, 128)))
        rows = dict(lengths=jax.ShapeDtypeStruct((2,), jnp.int32), new=jax.ShapeDtypeStruct((2,), jnp.int32))
        tables = jax.ShapeDtypeStruct((2, 4), jnp.int32)
        return pallas_kernels.explain(q=q, kv=kv, tables=tables, **rows, compress_ratio=4, platform=platform)

    assert explain(2, 1).implementation == name
    assert explain(2, 2).implementation == "xla" and "compress_ratio" in explain(2, 2).reason


BAD = {
    "0": dict(compress_ratio=0), "a string": dict(compress_ratio="4"), "True": dict(compress_ratio=True),
    "window": dict(compress_ratio=4, window=3), "chunk": dict(compress_ratio=4, chunk=3),
    "mask": dict(compress_ratio=4, mask=np.ones((2, 1, 3), bool)),
    "alibi": dict(compress_ratio=4, alibi=np.ones(4, np.float32)),
    "spans": dict(compress_ratio=4, spans=np.zeros((2, 1), np.int32)),
    "tree": dict(compress_ratio=4, tree=np.full((2, 1), -1, np.int32)),
    "blocks": dict(compress_ratio=4, blocks=np.zeros((2, 1), np.int32)),
    "residual_length": dict(compress_ratio=4, residual_length=3),
    "stripe": dict(compress_ratio=4, stripe=np.array([0, 2], np.int32)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_go_with_entries_is_refused(name):
    inputs = testing.make_inputs(Case((5, 17), (1, 1)))
    with pytest.raises(ValueError, match=f"compress_ratio.*{'must be' if len(BAD[name]) == 1 else name}"):
        pallas_kernels.paged_attention(*inputs, **BAD[name])


def test_entries_are_not_written_with_the_tokens_that_attend():
    q, kv, *rows = testing.make_inputs(Case((5, 17), (1, 1)))
    k = jnp.ones((2, 1, 2, 64))
    with pytest.raises(ValueError, match="store them by write_kv"):
        pallas_kernels.write_and_attend(q, k, k, kv, *rows, compress_ratio=4)
