"""The kernel that updates states against the reference: interpreted with races detected, or natively on a GPU.

Then negative controls: with a known mistake it must fail. What only the compiler shows is in tests/compile.
"""

import jax
import jax.numpy as jnp
import pytest
from gpu_mistakes import SOURCES, outcome, plant, unless_on_a_gpu
from nightly import NIGHTLY
from planting import Plant
from state_trials import TRIALS, draw_trial

import pallas_kernels
from pallas_kernels import gpu

BY_DAY = (
    "space", "tokens", "shared slots", "chunks of one row", "delta, chunks of one row", "channels, chunks of one row",
    "few beside many",
)  # fmt: skip


@pytest.mark.parametrize("name", TRIALS if NIGHTLY else BY_DAY)
def test_against_the_reference(name, interpret):
    TRIALS[name].check(interpret)


@pytest.mark.parametrize("seed", range(60 if NIGHTLY else 3))
def test_random_steps(seed, interpret):
    draw_trial(seed).check(interpret, seed)


@pytest.mark.skipif(not NIGHTLY, reason="chunks take the interpreter long; by day one row's")
@pytest.mark.parametrize("seed", range(20))
def test_random_steps_in_chunks(seed, interpret):
    draw_trial(seed, chunks=True).check(interpret, seed)


def test_each_row_has_its_turn_once():
    """... and in order, whoever reads what another writes."""
    for seed in range(20):
        draw_trial(seed).check_turns()
        draw_trial(seed, chunks=True).check_turns(16)


UNSYNCHRONISED = {"race", "wrong", "barrier"}
LEVELS = "lax.fori_loop(0, 3, relate_beyond, relate(jnp.int32(INNER), (0.0, 0.0), is_inner=True))"
NOTHING = "(full(SQUARE, 0.0, LAYOUT),) * 2"
COLUMNS = "(source, target, begin, count, batch.begins, batch.starts, turns, following)"
DELTA_CHUNKS, CHANNELS = "delta, chunks of one row", "channels, chunks of one row"
FORGET = "state = state * (keys(gate) if has_channel_gates else gate)"
# What comes to a walk over chunks: the barrier that says so, and what brings it for the next chunk.
GIVEN = {"the state": ("signals.state_ready", None), "gains": ("signals.gains_ready", None)}
WRITTEN = {
    "queries": ("queries_ready", "fetch_queries"),
    "squares of outputs": ("output_ready", "fetch_output_squares"),
}
SQUARES = {"squares of gains": ("gain_ready", "fetch_gain_squares")} | WRITTEN | GIVEN
ARRIVALS = {
    "delta chunks": (DELTA_CHUNKS, "run_delta_chunks", {"tokens": ("ready", "fetch_tokens")} | SQUARES),
    "channel chunks": (
        CHANNELS, "run_channel_chunks",
        {
            "keys": ("since_ready", "fetch_since"), "values": ("values_ready", None),
            "last keys": ("until_ready", "fetch_until"),
        } | SQUARES,
    ),
}  # fmt: skip


def plant_arrivals():
    """Yields mistakes with what arrives: it is read at once, or the next comes when this has arrived."""
    for kind, (trial, function, arrivals) in ARRIVALS.items():
        for what, (barrier, fetch) in arrivals.items():
            wait = f"plgpu.barrier_wait({barrier})"
            yield f"{kind}: {what} read before there are any", (trial, UNSYNCHRONISED, Plant(function, wait, ""))
            if fetch is not None:
                early = Plant(function, wait, f"{wait}\nfollowing({fetch})")
                plants = Plant(function, f"following({fetch})", ""), early
                yield f"{kind}: the next {what} where these are", (trial, UNSYNCHRONISED, *plants)


# By name: the trial, how it may end, and what is planted.
MISTAKES = dict(plant_arrivals()) | {
    "a state read before it arrives": (
        "delta", UNSYNCHRONISED, Plant("update_states", "plgpu.barrier_wait(ready)", "")
    ),
    "a state that lands where the last is being read": (
        "shared slots", {"race"}, Plant("update_states", "pl.when(i > 0)(plgpu.commit_smem)", "")
    ),
    "rows that begin read their slot": (
        "delta", {"wrong"}, Plant("plan_rows", COLUMNS, COLUMNS.replace("batch.begins", "0 * count"))
    ),
    "rows that share a slot at once": (
        "shared slots", {"wrong"},
        Plant("plan_rows", "batch.may_meet", "False"),
    ),
    "the last of a queue first": (
        "shared slots", {"wrong", "race"},
        Plant("plan_turns", "same & earlier.T", "same & earlier"),
        Plant("plan_turns", "jnp.any(same & earlier, axis=1)", "jnp.any(same & earlier.T, axis=1)"),
    ),
    "a chain's links by themselves": (
        "chain", {"wrong"}, Plant("plan_turns", "jnp.where(together, 0, most)", "most")
    ),
    "snapshots in nobody's way": (
        "a snapshot in a slot that was read", {"wrong"},
        Plant("plan_rows", "batch.writes(num_slots)", "batch.writes(num_slots)[:, :1]"),
    ),
    "a snapshot a token late": (
        "tokens", {"wrong", "race"}, Plant("update_states", "after = position + i + 1", "after = position + i")
    ),
    "a snapshot counted from the row's beginning": (
        "tokens", {"wrong", "buffer has shape"},
        Plant("write_snapshot", "lax.div(position, jnp.int32(every))", "jnp.int32(0)"),
    ),
    "one token again and again": (
        "tokens", {"wrong"}, Plant("update_states", "begin + jnp.minimum(i + 1, count - 1)", "begin")
    ),
    "the first values for all": (
        "odd sizes", {"wrong", "race"}, Plant("update_states", "recurrence.span(part)", "recurrence.span(0 * part)")
    ),
    "another head's keys": (
        "delta", {"wrong", "buffer has shape"},
        Plant("_delta_rule", "arrays['q'].at[token, lax.div(head, jnp.int32(shared))]", "arrays['q'].at[token, head]"),
    ),
    "another group's keys": (
        "space", {"wrong", "buffer has shape"},
        Plant("_state_space", "lax.div(head, jnp.int32(heads // groups))", "head"),
    ),
    "learned before forgotten": (
        "delta", {"wrong"},
        Plant("_delta_rule", "lacks = (v - (state * keys(k)).sum(axis=0)) * beta", ""),
        Plant("_delta_rule", FORGET, f"lacks = (v - (state * keys(k)).sum(axis=0)) * beta\n{FORGET}"),
    ),
    "an input without its time step": ("space", {"wrong"}, Plant("_state_space", "x * dt", "x")),
    "chunks: inputs read before they arrive": (
        "chunks of one row", UNSYNCHRONISED, Plant("run_space_chunks", "plgpu.barrier_wait(ready)", "")
    ),
    "chunks: inputs overwritten while they are read": (
        "chunks of one row", {"race"},
        Plant("run_space_chunks", "plgpu.commit_smem()\nfollowing(fetch)", "following(fetch)\nplgpu.commit_smem()"),
    ),
    "chunks: the next row's inputs where this row's are being read": (
        "chunks, shared slots", {"race"}, Plant("run_space_chunks", "chunk.nth & 1", "chunk.number & 1", times=2),
    ),
    "chunks: what is beyond the last token": (
        "chunks", {"wrong"},
        Plant("load_tokens", "jnp.where(index(x.shape, 0) < count, x, jnp.zeros_like(x))", "x"),
    ),
    "chunks: a token sees its successor": (
        "chunks of one row", {"wrong"},
        Plant("see_tokens", "column <= row", "column <= row + 1"),
    ),
    "chunks: leading bits alone": (
        "chunks of one row", {"wrong"}, Plant("halves:halve", "x - leading.astype(jnp.float32)", "0.0 * x")
    ),
    "chunks: inputs not forgotten": (
        "chunks of one row", {"wrong"}, Plant("run_space_chunks", "jnp.exp(whole - since)", "jnp.exp(0.0 * since)")
    ),
    "chunks: tokens that forget nothing of the state": (
        "chunks of one row", {"wrong"}, Plant("run_space_chunks", "jnp.exp(since)", "jnp.exp(0.0 * since)")
    ),
    "chunks: chunks from the step's first token": (
        "chunks", {"wrong"}, Plant("count_chunks", "lax.rem(position, jnp.int32(CHUNK))", "0 * position")
    ),
    "chunks: the rest of the tokens from their beginning": (
        "chunks of one row", {"wrong", "race"}, Plant("chunk_steps:write_tokens", "count & -2 * size", "0 * count")
    ),
    "delta chunks: numbers given over others that are being read": (
        DELTA_CHUNKS, UNSYNCHRONISED, Plant("handoff:give", "await_reader(free, chunk)", ""),
    ),
    "delta chunks: numbers given before they are all there": (
        DELTA_CHUNKS, {"race", "wrong"},
        Plant("handoff:give", "plgpu.barrier_arrive(ready)", ""),
        Plant("handoff:give", "await_reader(free, chunk)", "await_reader(free, chunk)\nplgpu.barrier_arrive(ready)"),
    ),
    "delta chunks: the next keys where these are": (
        DELTA_CHUNKS, UNSYNCHRONISED,
        Plant("run_delta_chunks", "chunk.number & 1", "chunk.number & 0", times=2),
    ),
    "delta chunks: the pairs of the first row": (
        "delta, chunks", {"wrong"},
        Plant("run_delta_chunks", "given['first_chunks'][chunk.row] + chunk.number", "chunk.number"),
    ),
    "delta chunks: as many as if no row shared one": (
        "delta, chunks", {"wrong", "buffer has shape"},
        Plant("plan_chunks", "num_tokens // CHUNK + 2 * rows.shape[0]", "num_tokens // CHUNK + 1"),
    ),
    "delta chunks: pairs read before they arrive": (
        DELTA_CHUNKS, UNSYNCHRONISED, Plant("relate_tokens", "plgpu.barrier_wait(ready)", ""),
    ),
    "delta chunks: keys overwritten while they leave": (
        DELTA_CHUNKS, {"race"},
        Plant("relate_tokens", "await_outputs()", "", times=2),
    ),
    "delta chunks: all of the triangle in every join": (
        DELTA_CHUNKS, {"wrong"},
        Plant("invert_triangle", "jnp.where(is_between(size), joined, 0.0)", "joined"),
    ),
    "delta chunks: outputs overwritten while they leave": (
        DELTA_CHUNKS, {"race"},
        Plant("chunk_steps:await_outputs", "plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "..."),
    ),
    "delta chunks: halves of a chunk apart": (
        DELTA_CHUNKS, {"wrong"},
        Plant(
            "invert_triangle", "lax.fori_loop(0, 5, join, jnp.where(row ^ column < 2, -lower, 0.0))",
            "lax.fori_loop(0, 4, join, jnp.where(row ^ column < 2, -lower, 0.0))",
        ),
    ),
    "delta chunks: pairs of tokens apart": (
        DELTA_CHUNKS, {"wrong"}, Plant("invert_triangle", "row ^ column < 2", "row ^ column < 1")
    ),
    "delta chunks: what the state has": (
        DELTA_CHUNKS, {"wrong"},
        Plant(
            "run_delta_chunks", "load_values(located().values, chunk.count) - found",
            "load_values(located().values, chunk.count)",
        ),
    ),
    "delta chunks: gains not forgotten": (
        DELTA_CHUNKS, {"wrong"},
        Plant("run_delta_chunks", "jnp.exp(whole - since(sums_s.at[slot]))", "jnp.exp(0.0 * since(sums_s.at[slot]))"),
    ),
    "delta chunks: leading bits alone": (
        DELTA_CHUNKS, {"wrong"}, Plant("halves:halve", "x - leading.astype(jnp.float32)", "0.0 * x")
    ),
    "delta chunks: another head's keys": (
        "delta, chunks", {"wrong", "buffer has shape"},
        Plant("run_delta_chunks", "lax.div(head, jnp.int32(shared))", "head"),
    ),
    "delta chunks: another head's keys among tokens": (
        "delta, chunks", {"wrong", "buffer has shape"},
        Plant("relate_tokens", "key_head = lax.div(head, jnp.int32(shared))", "key_head = head"),
    ),
    "few beside many: written before it is read": (
        "few beside many, a chain", {"wrong"}, Plant("share_rows", "batch.may_meet", "False")
    ),
    "few beside many: a chain's second link alone": (
        "few beside many, a chain", {"wrong"},
        Plant("share_rows", "meets.any(axis=0)", "(meets & is_many[:, None]).any(axis=0)"),
    ),
    "few beside many: who reads goes with many": (
        "few beside many, a chain", {"wrong"}, Plant("share_rows", "meets.any(axis=0)", "meets.any(axis=1)")
    ),
    "few beside many: many first": (
        "few beside many, shared slots", {"wrong"},
        Plant(
            "mixers:_run", "of_few, states = run_tokens(states, few)\ny, states = run_chunks(states, many)",
            "y, states = run_chunks(states, many)\nof_few, states = run_tokens(states, few)",
        ),
    ),
    "few beside many: snapshots in nobody's way": (
        "few beside many, a snapshot in a slot that was read", {"wrong"},
        Plant("share_rows", "batch.writes(num_slots)", "batch.writes(num_slots)[:, :1]"),
    ),
    "few beside many: all in both kernels": (
        "few beside many", {"wrong"}, Plant("share_rows", "(~is_many, is_many)", "(is_many | True, is_many)")
    ),
    "few beside many: outputs of few from chunks": (
        "few beside many", {"wrong"}, Plant("merge_rows", "is_many[row]", "is_many[row] | True")
    ),
    "channel chunks: pairs read before they arrive": (
        CHANNELS, UNSYNCHRONISED, Plant("relate_channels", "plgpu.barrier_wait(ready)", ""),
    ),
    "channel chunks: what is beyond the last token": (
        "channels, chunks", {"wrong"}, Plant("relate_channels", "pl.when(count < CHUNK)", "pl.when(count < 0)"),
    ),
    "channel chunks: values beyond the last token": (
        "channels, chunks", {"wrong"},
        Plant("load_values", "jnp.where(index(SQUARE, 1) < count, v, jnp.zeros_like(v))", "v"),
    ),
    "channel chunks: what is written overwritten before it leaves": (
        CHANNELS, {"race"}, Plant("relate_channels", "await_outputs()", "...", times=3),
    ),
    "channel chunks: gates as they are": (
        "channels, chunks, any gates", {"wrong"},
        Plant("relate_channels", "jnp.maximum(x, LEAST_GATE)", "jnp.maximum(x, -100.0)"),
    ),
    "channel chunks: leading bits of gates alone": (
        CHANNELS, {"wrong"},
        Plant(
            "relate_channels", "((ones, half.at[piece]) for half in located().gates)",
            "((ones, half.at[piece]) for half in located().gates[:1])",
        ),
    ),
    "channel chunks: what the state gives a gate early": (
        CHANNELS, {"wrong"}, Plant("relate_channels", "lambda token: (0, token)", "lambda token: (0, token - 1)")
    ),
    "channel chunks: a token's own gate forgets what it adds": (
        CHANNELS, {"wrong"},
        Plant("relate_channels", "lambda token: (token + 1, CHUNK)", "lambda token: (token, CHUNK)"),
    ),
    "channel chunks: a border a token late": (
        CHANNELS, {"wrong"}, Plant("relate_channels", "token | size - 1", "token | size")
    ),
    "channel chunks: halves of a chunk apart": (
        CHANNELS, {"wrong"},
        Plant("relate_channels", LEVELS, LEVELS.replace("0, 3", "0, 2")),
    ),
    "channel chunks: neighbours twice": (
        CHANNELS, {"wrong"},
        Plant("relate_channels", "jnp.where(token & size != 0, (token & -size) - 1, -1)", "token"),
    ),
    "channel chunks: eight tokens only with time": (
        CHANNELS, {"wrong"}, Plant("relate_channels", "jnp.where(row & size != 0, sums, -sums)", "sums"),
    ),
    "channel chunks: keys against time as with it": (
        CHANNELS, {"wrong"}, Plant("relate_channels", "jnp.exp2(-sums)", "jnp.exp2(sums)"),
    ),
    "channel chunks: one square in the other's place": (
        CHANNELS, {"wrong", "race"},
        Plant(
            "relate_channels", "write(SQUARES, located().results, 1)", "write(SQUARES, located().results, 0)",
        ),
    ),
    "channel chunks: half of the channels": (
        CHANNELS, {"wrong"},
        Plant("relate_channels", f"each_piece(relate_piece, {NOTHING})", f"relate_piece(0, {NOTHING})"),
    ),
    "channel chunks: another head's keys among tokens": (
        "channels, chunks", {"wrong", "buffer has shape"},
        Plant("relate_channels", "key_head = lax.div(head, jnp.int32(shared))", "key_head = head"),
    ),
    "channel chunks: states not forgotten": (
        CHANNELS, {"wrong"},
        Plant("run_channel_chunks", "state * columns(plgpu.load(kept_s, layout=COLUMN), state.shape)", "state"),
    ),
    "channel chunks: the pairs of the first row": (
        "channels, chunks", {"wrong"},
        Plant("run_channel_chunks", "given['first_chunks'][chunk.row] + chunk.number", "chunk.number"),
    ),
    "padding not hidden": (
        "tokens", {"wrong"},
        Plant("mixers:_run", "hide_padding(y.reshape(values.shape), values, batch)", "y.reshape(values.shape)"),
    ),
}  # fmt: skip
MISTAKES_BY_DAY = ("a state read before it arrives", "rows that share a slot at once")


@unless_on_a_gpu
@pytest.mark.parametrize("name", MISTAKES if NIGHTLY else MISTAKES_BY_DAY)
def test_mistake(name, monkeypatch):
    trial, expected, *plants = MISTAKES[name]
    plant(monkeypatch, *plants)
    assert outcome(TRIALS[trial]) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)


def arguments(op="gated_delta_rule", state=(4, 64, 64), stored=jnp.float32, **changed):
    """Shapes of a decode step, as `explain` takes them."""
    shape, (heads, first, last) = jax.ShapeDtypeStruct, state
    if op == "state_space":
        tokens = {"x": (heads, first), "dt": (heads,), "B": (1, last), "C": (1, last)}
        arrays = {"A": shape((heads,), jnp.float32)}
    else:
        tokens = {"q": (1, first), "k": (1, first), "v": (heads, last), "g": (heads,), "beta": (heads,)}
        arrays = {}
    arrays |= {name: shape((2, 1, *x), jnp.bfloat16) for name, x in tokens.items()}
    return dict(op=op, states=shape((9, *state), stored), platform="cuda") | arrays | changed


REFUSED = {
    "takes float32, bfloat16 and float16, but states is float64": arguments(stored=jnp.float64),
    "but beta is float8_e4m3fn; cast it": arguments(beta=jax.ShapeDtypeStruct((2, 1, 4), jnp.float8_e4m3fn)),
    "keys in multiples of 8 up to 256 and values in multiples of 64, but states have 64 and 48": arguments(
        state=(4, 64, 48)
    ),
    "states have 12 and 64": arguments(state=(4, 12, 64)),
    "states have 264 and 64": arguments(state=(4, 264, 64)),
    "keys in multiples of 32 up to 256 and values in multiples of 16, but states have 48 and 64": arguments(
        "state_space", state=(4, 64, 48)
    ),
    "no kernel of its own for causal_conv": dict(op="causal_conv", platform="cuda"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_xla_runs_what_is_refused_and_explain_says_why(reason):
    choice = pallas_kernels.explain(**REFUSED[reason])
    assert choice.implementation == "xla" and reason in choice.reason


@pytest.mark.parametrize("keys", [64, 128])
def test_gates_of_128_channels_go_in_chunks(keys):
    shape = jax.ShapeDtypeStruct
    tokens = {name: shape((32, 2, keys), jnp.bfloat16) for name in ("q", "k", "v")}
    states = shape((9, 2, keys, 64), jnp.float32)
    for gates, chunks in ((2,), True), ((2, keys), keys == 128):
        tokens |= {"g": shape((32, *gates), jnp.float32), "beta": shape((32, 2), jnp.float32)}
        assert gpu.mixers.can_chunk(tokens, states, None, most_tokens=32) == chunks


@pytest.mark.parametrize("op", ["gated_delta_rule", "state_space"])
def test_gpus_choose_the_kernel(op):
    assert pallas_kernels.explain(**arguments(op)).implementation == "gpu"
