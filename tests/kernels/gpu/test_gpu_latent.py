"""The GPU kernel over latent rows: NaN in all that must not be read, races detected, and known mistakes caught."""

import jax
import pytest
from mutants import mutant
from nightly import NIGHTLY
from test_gpu_controls import outcome, put_in_place
from trials import LATENT

from pallas_kernels.gpu import latent, step, tiles

BY_DAY = ("two tiles of heads, cut",)

UNSYNCHRONISED = {"race", "wrong", "barrier"}
VALUES = "values = rows_s.at[slot, :, pl.ds(half * half_rank, half_rank)]"
KEYS = "for columns, part_s in q_parts(q_s):\n                        plgpu.wgmma"
# What is wrong, on which trial, the outcomes that show it, and the module with what to find and what to put there.
MISTAKES = {
    "weights read before they are there": (
        "ring", UNSYNCHRONISED, latent, "plgpu.barrier_wait(p_ready)\n\n                @pl", "\n                @pl",
    ),
    "weights overwritten while read": (
        "ring", {"race", "barrier"}, latent, "pl.when(i > 0)(lambda: plgpu.barrier_wait(p_free))", "pass",
    ),
    "a slot released before the product": (
        "ring", {"race"}, latent, f"{VALUES}\n", f"{VALUES}\n                plgpu.barrier_arrive(free.at[slot])\n",
        "plgpu.barrier_arrive(free.at[slot])\n                return parts", "return parts",
    ),
    "rows read before they arrive": (
        "ring", UNSYNCHRONISED, latent, "plgpu.barrier_wait(ready.at[slot])\n                keys",
        "\n                keys",
    ),
    "queries read before they arrive": ("ring", UNSYNCHRONISED, latent, "plgpu.barrier_wait(q_ready)", "pass"),
    "garbage times zero": (
        "tails", {"wrong"}, latent,
        "select_seen_values(values, first_seen - first, length - first, first_tokens)", "pass",
    ),
    "the tail off by one": (
        "tails", {"wrong"}, latent, "(first + tokens > length))", "(first + tokens > length + 1))",
    ),
    "one token too many": (
        "a loud token behind the last", {"wrong"}, latent, "(position <= last)", "(position <= last + 1)",
    ),
    "a tile taken for wholly seen": (
        "prefill, ring", {"wrong"}, latent, "first + (tokens - 1) > length - new", "first > length - new",
    ),
    "a tile of the window's edge taken for wholly seen": (
        "prefill, the window's first token", {"wrong"}, latent, "first < reach.first(length - 1)",
        "first < reach.first(length - 1) - 1",
    ),
    "padding sees the row": (
        "few tokens", {"wrong"}, latent, "partly |= new < new_tokens", "pass", " & (token < new)", "",
    ),
    "the scale left out": ("ring", {"wrong"}, latent, "logits_base2(s, scale,", "logits_base2(s, 1.0,"),
    "values of the rope's columns": (
        "ring", UNSYNCHRONISED, latent, VALUES, VALUES.replace("half * half_rank,", "(half + 1) * half_rank,"),
    ),
    "one half's values for both": ("ring", UNSYNCHRONISED, latent, VALUES, VALUES.replace("half * half_rank,", "0,")),
    "keys without the rope's columns": ("ring", {"wrong"}, latent, KEYS, KEYS.replace("(q_s)", "(q_s)[:2]")),
    "the first tile of heads for all": (
        "two tiles of heads, cut", {"wrong"}, latent, "place * num_heads + head * at_once", "place * num_heads",
    ),
    "heads and tokens mixed up": (
        "few tokens", {"wrong"}, latent, "token = lax.div(plgpu", "token = lax.rem(plgpu",
    ),
    "sums not rescaled": ("ring", {"wrong"}, latent, "total = total * alpha + p", "total = total + p"),
    "the output not rescaled": (
        "ring", {"wrong"}, latent, "for x, span in zip(scaled(parts), spans, strict=True)\n                ]",
        "for x, span in zip(parts, spans, strict=True)\n                ]",
    ),
    "a sink for who sees nothing": (
        "few tokens", {"wrong"}, tiles, "jnp.where(m == -jnp.inf, -jnp.inf, sink)", "sink",
    ),
    "sinks for parts": (
        "two tiles of heads, cut", UNSYNCHRONISED, latent, "@pl.when(role == WHOLE)\n            def _():",
        "@pl.when(role != UNUSED)\n            def _():",
    ),
    "the next row's tokens overwritten": (
        "packed", {"wrong", "race"}, latent, "pl.when(items_ref[anew(item), 7] > t)(copy) if by_item else copy()",
        "copy()",
    ),
    "the first item's sight for all": (
        "prefill, tree", {"wrong"}, latent, "jnp.int32(num_items // sight.shape[0])", "jnp.int32(10**6)",
    ),
    "one chunk's sight for the next": (
        "prefill, chunks, tree", {"wrong"}, latent, "lax.div(anew(item), jnp.int32(num_items // sight.shape[0]))",
        "lax.rem(anew(item), jnp.int32(sight.shape[0]))",
    ),
    "step: chunks in base 2": ("prefill, chunks", {"wrong"}, step, "part_lse * math.log(2)", "part_lse"),
    "step: missing heads' sinks": (
        "few tokens", {"wrong"}, step, "jnp.pad(sinks, (0, missing))", "jnp.pad(sinks, (missing, 0))",
    ),
    "step: heads of another token": (
        "prefill, ring", {"wrong", "race"}, step, "at, role, count)", "start[row], role, count)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LATENT if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    LATENT[name].use_plans(monkeypatch)
    LATENT[name].check(interpret)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a known-bad kernel may hang a GPU")
@pytest.mark.skipif(not NIGHTLY, reason="by day those of the other kernels")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, monkeypatch):
    trial, expected, module, *changes = MISTAKES[name]
    LATENT[trial].use_plans(monkeypatch)
    put_in_place(module, zip(changes[::2], changes[1::2], strict=True), monkeypatch)
    assert outcome(LATENT[trial]) in expected


def test_every_mistake_can_be_made():
    """By day too: the text that each changes is still there."""
    for _, _, module, *changes in MISTAKES.values():
        mutant(module, *zip(changes[::2], changes[1::2], strict=True))
