"""Attention over chosen tokens by the GPU kernels: against the reference with a mask of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_mistakes import SOURCES, plant
from nightly import NIGHTLY
from planting import Plant
from trials import B16, LATENT_ROWS, Trial

import pallas_kernels
from pallas_kernels import gpu, testing, xla
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.testing import Case


@dataclasses.dataclass(frozen=True)
class Chosen(Trial):
    """A trial whose queries choose tokens: some twice, some that are ahead of them, some that are none."""

    top_k: int = 70

    def check(self, interpret, seed: int = 0) -> None:
        case = self.case
        inputs, options = testing.make_inputs(case, seed), testing.make_options(case)
        draw, axes = np.random.default_rng(seed), inputs.q.shape[:-2]
        token = locate(axes, inputs.lengths, inputs.new, None)
        row, position, valid = (np.asarray(x) for x in token)
        longest = max(case.lengths)
        tokens = draw.integers(-3, longest + 3, (*axes, self.top_k))
        tokens = np.where(draw.random((*axes, 1)) < 0.2, -1, tokens)  # some choose nothing
        tokens[..., : self.top_k // 3] = draw.integers(
            0, np.maximum(position, 0)[..., None] + 1, (*axes, self.top_k // 3)
        )
        mask = (tokens[..., None] == np.arange(longest)).any(axis=-2)
        # What no query of a row sees is NaN, keys and values, for the kernels.
        reach = np.arange(longest) <= position[..., None]
        if case.window is not None:
            reach &= np.arange(longest) > position[..., None] - case.window
        kv, tables = np.array(inputs.kv), np.asarray(inputs.tables)
        for at, length in enumerate(case.lengths):
            seen = (mask & reach)[valid & (row == at)].any(axis=0)
            for place in np.flatnonzero(~seen[:length]):
                kv[tables[at, place // case.block_size], :, :, place % case.block_size] = np.nan
        held, whole, quantised = inputs._replace(kv=jnp.asarray(kv)), inputs, {}
        if self.kind is not None:
            held, quantised["kv_scale"], whole = testing.quantise(case, inputs, self.kind)
            quantised["kind"] = self.kind
        expected, logs = pallas_kernels.paged_attention(
            *whole, **options, mask=jnp.asarray(mask), return_lse=True, implementation="reference"
        )
        if interpret == "xla":  # in place of the kernels, over the rows that were brought together
            backend = functools.partial(gpu.attend_tokens, xla.paged_attention)
        else:
            backend = functools.partial(gpu.paged_attention, interpret=interpret)

        @jax.jit
        def attend(held, tokens):
            call = bundle_call(**held._asdict(), tokens=tokens, return_lse=True, **options, **quantised)
            return backend(call.q, *call[:4])

        out, lse = attend(held, jnp.asarray(tokens, jnp.int32))
        testing.assert_close(out, expected)
        testing.assert_close(lse, logs, dtype=case.dtype)


ROWS = dict(num_heads=16, **LATENT_ROWS, **B16)
TRIALS = {
    "latent": Chosen(Case((150, 9, 0, 1), (1, 1, 0, 1), **ROWS)),
    "latent, several tokens": Chosen(Case((90, 5), (3, 2), num_heads=5, **LATENT_ROWS, **B16), top_k=12),
    "plain, packed": Chosen(
        Case((130, 0, 40), (2, 0, 3), packed=True, padding=2, sinks=True, soft_cap=5.0, window=60, **B16), top_k=30,
    ),
    "head_dim 80": Chosen(Case((70,), (1,), head_dim=80, stored_head_dim=128, block_size=8, **B16), top_k=130),
    "int8": Chosen(Case((70, 20), (1, 1), block_size=32, **B16), kind="int8", top_k=20),
}  # fmt: skip
MISTAKES = {
    "holes between those that are seen": Plant(
        "gather_chosen", "jnp.cumsum(seen, axis=1, dtype=jnp.int32) - 1", "0 * seen + jnp.arange(seen.shape[1])[None]"
    ),
    "one too many": Plant(
        "gather_chosen", "seen.sum(axis=1, dtype=jnp.int32)", "seen.sum(axis=1, dtype=jnp.int32) + 1"
    ),
    "the first row's for all": Plant(
        "gather_chosen",
        "jnp.arange(num_tokens * columns // TOKENS, dtype=jnp.int32)",
        "jnp.zeros(num_tokens * columns // TOKENS, dtype=jnp.int32)",
    ),
}


@pytest.mark.parametrize("name", TRIALS)
def test_rows_are_brought_together(name):
    TRIALS[name].check("xla")


@pytest.mark.skipif(not NIGHTLY, reason="by day XLA stands in for the kernels, which test_gpu_latent.py has")
@pytest.mark.parametrize("name", TRIALS)
def test_against_the_reference(name, interpret):
    TRIALS[name].check(interpret)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, monkeypatch):
    plant(monkeypatch, MISTAKES[name])
    with pytest.raises(AssertionError):
        TRIALS["latent"].check("xla")


def test_every_mistake_can_be_made():
    for name, mistake in MISTAKES.items():
        assert SOURCES.broken(mistake), name


def shapes(queries, *, top_k=2048, heads=128):
    """A step over latent rows as DeepSeek V3.2's."""
    shape = jax.ShapeDtypeStruct
    return dict(
        q=shape((queries, 1, heads, 576), jnp.bfloat16), kv=shape((9, 1, 1, 64, 576), jnp.bfloat16), rank=512,
        scale=0.1,
        tables=shape((queries, 512), jnp.int32), lengths=shape((queries,), jnp.int32),
        new=shape((queries,), jnp.int32), tokens=shape((queries, 1, top_k), jnp.int32), platform="cuda",
    )  # fmt: skip


def test_who_runs():
    assert pallas_kernels.explain(**shapes(128)).implementation == "gpu"
    for refused, why in ((shapes(4096), "together, 536870912 bytes at most"), (shapes(2, heads=72), "not 72")):
        choice = pallas_kernels.explain(**refused)
        assert choice.implementation == "xla" and why in choice.reason
