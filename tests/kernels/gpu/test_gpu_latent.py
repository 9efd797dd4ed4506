"""The GPU kernel over latent rows: NaN in all that must not be read, races detected, and known mistakes caught."""

import pytest
from gpu_mistakes import SOURCES, UNSYNCHRONISED, outcome_with, unless_on_a_gpu
from nightly import NIGHTLY
from planting import Plant
from trials import LATENT

BY_DAY = ("two tiles of heads, cut",)

# What is wrong, on which trial, the outcomes that show it, and what is planted.
MISTAKES = {
    "weights read before they are there": (
        "ring",
        UNSYNCHRONISED,
        Plant(
            "split.kernel.sum_values",
            "plgpu.barrier_wait(p_ready)\n@pl.when((first < first_seen) | (first + tokens > length))\ndef _(): ...",
            "@pl.when((first < first_seen) | (first + tokens > length))\ndef _(): ...",
        ),
    ),
    "weights overwritten while read": (
        "ring",
        {"race", "barrier"},
        Plant("split", "pl.when(i > 0)(lambda: plgpu.barrier_wait(p_free))", ""),
    ),
    "a slot released before the product": (
        "ring",
        {"race"},
        Plant("split.kernel.sum_values", "plgpu.barrier_arrive(free.at[slot])", ""),
        Plant(
            "split.kernel.sum_values",
            "plgpu.barrier_wait(p_ready)\n@pl.when((first < first_seen) | (first + tokens > length))\ndef _(): ...",
            "plgpu.barrier_arrive(free.at[slot])\n"
            "plgpu.barrier_wait(p_ready)\n"
            "@pl.when((first < first_seen) | (first + tokens > length))\n"
            "def _(): ...",
        ),
    ),
    "rows read before they arrive": (
        "ring",
        UNSYNCHRONISED,
        Plant("split", "plgpu.barrier_wait(ready.at[slot])\nkeys = rows_s.at[slot]", "keys = rows_s.at[slot]"),
    ),
    "queries read before they arrive": (
        "ring",
        UNSYNCHRONISED,
        Plant("latent:split", "plgpu.barrier_wait(q_ready)", ""),
    ),
    "garbage times zero": (
        "tails",
        {"wrong"},
        Plant("split", "select_seen_values(values, first_seen - first, length - first, first_tokens)", ""),
    ),
    "the tail off by one": (
        "tails",
        {"wrong"},
        Plant("latent:split", "first + tokens > length", "first + tokens > length + 1"),
    ),
    "one token too many": (
        "a loud token behind the last",
        {"wrong"},
        Plant("latent:split", "position <= last", "position <= last + 1"),
    ),
    "a tile taken for wholly seen": (
        "prefill, ring",
        {"wrong"},
        Plant("split", "first + (tokens - 1)", "first"),
    ),
    "a tile of the window's edge taken for wholly seen": (
        "prefill, the window's first token",
        {"wrong"},
        Plant("split", "window_mask.first(length - 1)", "window_mask.first(length - 1) - 1"),
    ),
    "padding sees the row": (
        "few tokens",
        {"wrong"},
        Plant("latent:split", "(position <= last) & (token < new)", "position <= last"),
        Plant("split", "partly |= new < new_tokens", ""),
    ),
    "the scale left out": (
        "ring",
        {"wrong"},
        Plant(
            "latent:split",
            "logits_base2(s, scale, cap if soft_cap else None)",
            "logits_base2(s, 1.0, cap if soft_cap else None)",
        ),
    ),
    "values of the rope's columns": (
        "ring",
        UNSYNCHRONISED,
        Plant(
            "split",
            "rows_s.at[slot, :, pl.ds(half * half_rank, half_rank)]",
            "rows_s.at[slot, :, pl.ds((half + 1) * half_rank, half_rank)]",
        ),
    ),
    "one half's values for both": (
        "ring",
        UNSYNCHRONISED,
        Plant(
            "split", "rows_s.at[slot, :, pl.ds(half * half_rank, half_rank)]", "rows_s.at[slot, :, pl.ds(0, half_rank)]"
        ),
    ),
    "keys without the rope's columns": (
        "ring",
        {"wrong"},
        Plant(
            "split",
            "[(part_s, Transposed(keys.at[:, columns])) for columns, part_s in q_parts(q_s)]",
            "[(part_s, Transposed(keys.at[:, columns])) for columns, part_s in q_parts(q_s)[:2]]",
        ),
    ),
    "the first tile of heads for all": (
        "two tiles of heads, cut",
        {"wrong"},
        Plant("split", "place * num_heads + head * at_once", "place * num_heads"),
    ),
    "heads and tokens mixed up": (
        "few tokens",
        {"wrong"},
        Plant(
            "split",
            "lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT), jnp.int32(at_once))",
            "lax.rem(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LAYOUT), jnp.int32(at_once))",
        ),
    ),
    "sums not rescaled": (
        "ring",
        {"wrong"},
        Plant("split", "total * alpha", "total"),
    ),
    "the output not rescaled": (
        "ring",
        {"wrong"},
        Plant(
            "split",
            "[accumulate(interpret, x, (p_s, values.at[:, span]))\n"
            "for x, span in zip(scaled(parts), spans, strict=True)]",
            "[accumulate(interpret, x, (p_s, values.at[:, span])) for x, span in zip(parts, spans, strict=True)]",
        ),
    ),
    "a sink for who sees nothing": (
        "few tokens",
        {"wrong"},
        Plant("add_sink", "jnp.where(m == -jnp.inf, -jnp.inf, sink)", "sink"),
    ),
    "sinks for parts": (
        "two tiles of heads, cut",
        UNSYNCHRONISED,
        Plant("split.kernel.weigh", "role == WHOLE", "role != UNUSED"),
    ),
    "the next row's tokens overwritten": (
        "packed",
        {"wrong", "race"},
        Plant("split", "pl.when(items_ref[anew(item), 7] > t)(copy) if by_item else copy()", "copy()"),
    ),
    "the first item's token_mask for all": (
        "prefill, tree",
        {"wrong"},
        Plant("split", "num_items // token_mask.shape[0]", "10 ** 6"),
    ),
    "one chunk's token_mask for the next": (
        "prefill, chunks, tree",
        {"wrong"},
        Plant(
            "split",
            "lax.div(anew(item), jnp.int32(num_items // token_mask.shape[0]))",
            "lax.rem(anew(item), jnp.int32(token_mask.shape[0]))",
        ),
    ),
    "step: chunks in base 2": (
        "prefill, chunks",
        {"wrong"},
        Plant("_prefill_latent", "part_lse * math.log(2)", "part_lse"),
    ),
    "step: missing heads": (
        "few tokens",
        {"wrong"},
        Plant(
            "_pad_heads",
            "(0, count - group if i == axis + 1 else 0)",
            "(count - group if i == axis + 1 else 0, 0)",
        ),
    ),
    "step: heads of another token": (
        "prefill, ring",
        {"wrong", "race"},
        Plant(
            "_prefill_latent",
            "(row, first, last, stop, stop - first_token, at, role, count)",
            "(row, first, last, stop, stop - first_token, rows.start[row], role, count)",
        ),
    ),
}


@pytest.mark.parametrize("name", LATENT if NIGHTLY else BY_DAY)
def test_against_numpy(name, interpret, monkeypatch):
    LATENT[name].use_plans(monkeypatch)
    LATENT[name].check(interpret)


@unless_on_a_gpu
@pytest.mark.skipif(not NIGHTLY, reason="by day those of the other kernels")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, monkeypatch):
    trial, expected, *plants = MISTAKES[name]
    assert outcome_with(monkeypatch, LATENT[trial], *plants) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)
