"""Attention over chosen tokens by the GPU kernels: against the reference with a mask of them."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from chosen import B16, LATENT_ROWS, Chosen
from nightly import NIGHTLY
from planting import Plant, Sources, plant_in_copy

import pallas_kernels
from pallas_kernels import gpu, xla
from pallas_kernels.testing import Case
from pallas_kernels.xla.chosen import chosen_rows


def check(name, interpret):
    """Checks a trial by the kernels, or, for "xla", by XLA in their place, over the rows that were brought together."""
    if interpret == "xla":
        backend = functools.partial(chosen_rows.attend_tokens, xla.paged_attention)
    else:
        backend = functools.partial(gpu.paged_attention, interpret=interpret)
    TRIALS[name].check(jax.jit(lambda attend, *arrays: attend(*arrays, backend), static_argnums=0))


ROWS = dict(num_heads=16, **LATENT_ROWS, **B16)
TRIALS = {
    "latent": Chosen(Case((150, 9, 0, 1), (1, 1, 0, 1), **ROWS)),
    "latent, several tokens": Chosen(Case((90, 5), (3, 2), num_heads=5, **LATENT_ROWS, **B16), top_k=12),
    "plain, packed": Chosen(
        Case((130, 0, 40), (2, 0, 3), packed=True, padding=2, sinks=True, soft_cap=5.0, window=60, **B16), top_k=30,
    ),
    "head_dim 80": Chosen(Case((70,), (1,), head_dim=80, stored_head_dim=128, block_size=8, **B16), top_k=130),
    "head_dim 40": Chosen(Case((70,), (1,), head_dim=40, block_size=8, **B16), top_k=20),
    "int8": Chosen(Case((70, 20), (1, 1), block_size=32, **B16), kind="int8", top_k=20),
    "int4": Chosen(Case((70, 20), (1, 1), head_dim=96, block_size=32, **B16), kind="int4", top_k=20),
    "k5v3": Chosen(Case((70, 20), (1, 1), head_dim=96, block_size=32, **B16), kind="k5v3", top_k=20),
}  # fmt: skip
SOURCES = Sources(pathlib.Path(xla.__file__).parent, "pallas_kernels.xla")
MISTAKES = {
    "holes between those that are seen": Plant(
        "gather_chosen",
        "find_slots(queries, batch, mask, block_size, seen_first=True)",
        "find_slots(queries, batch, mask, block_size)",
    ),
    "one too many": Plant(
        "gather_chosen", "slots.seen.sum(axis=1, dtype=jnp.int32)", "slots.seen.sum(axis=1, dtype=jnp.int32) + 1"
    ),
    "the first row's for all": Plant(
        "gather_chosen",
        "jnp.arange(slot.shape[0], dtype=jnp.int32)",
        "jnp.zeros(slot.shape[0], dtype=jnp.int32)",
    ),
}


@pytest.mark.parametrize("name", TRIALS)
def test_rows_are_brought_together(name):
    check(name, "xla")


def test_many_queries_take_turns(monkeypatch):
    monkeypatch.setattr(chosen_rows, "MOST_BYTES", 2 * 64 * 576 * 2)  # of two queries
    check("latent, several tokens", "xla")


@pytest.mark.skipif(not NIGHTLY, reason="by day XLA stands in for the kernels, which test_gpu_latent.py has")
@pytest.mark.parametrize("name", TRIALS)
def test_against_the_reference(name, interpret):
    check(name, interpret)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, monkeypatch):
    _, broken = plant_in_copy(SOURCES, MISTAKES[name])
    monkeypatch.setattr(chosen_rows, "gather_chosen", broken.gather_chosen)
    with pytest.raises(AssertionError):
        check("latent", "xla")


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
    assert pallas_kernels.explain(**shapes(4096)).implementation == "gpu"  # in turns
    choice = pallas_kernels.explain(**shapes(2, heads=72))
    assert choice.implementation == "xla" and "not 72" in choice.reason
