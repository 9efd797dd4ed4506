"""States by the TPU kernels, interpreted: against the reference, with NaN in all that must not be read."""

import functools
import importlib
import itertools
import pathlib

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY
from planting import Plant, Sources
from state_kernels import CASES, CHANNELS, CONVOLUTION, DELTA, SPACE, Mixing, check, expect, make_arrays, make_batch

import pallas_kernels
from pallas_kernels import tpu
from pallas_kernels.tpu import mixers
from pallas_kernels.tpu.recurrence import chunk_tokens, state_decode, state_prefill

pytestmark = pytest.mark.timeout(240, method="thread")
FOLDER = pathlib.Path(tpu.__file__).parent
SOURCES = Sources(FOLDER, "pallas_kernels.tpu")
TWO_HEADS = 2 * 16 * 128 * 4  # bytes of an item: half of a row, so that there are twice as many
# Row 1 goes on from a snapshot's position, in the slot that it shares; row 3 from the middle of a chunk.
CHUNKS = Mixing(
    before=(0, 64, 3, 70), new=(70, 2, 0, 60), slots=(2, 5, 0, 1), to_slots=(2, 6, 0, 1),
    snapshots=(3, -1, -1, 8), packed=True, every=64,
)  # fmt: skip
CHANNEL_CHUNKS = CHUNKS._replace(by_channel=True)
IN_CHUNKS = {"delta": CHUNKS, "channels": CHANNEL_CHUNKS, "space": CHUNKS._replace(op="state_space")}
names = (f"broken_tpu_states_{i}" for i in itertools.count())


def run(case, mode, module=mixers, tolerance=None):
    """Runs a case in the interpreter, and checks it: of chunks all digits, or 16 bits where values are no longer."""
    tolerance, is_given = tolerance or 2e-5, tolerance is not None
    if case.packed and case.op == "gated_delta_rule" and not is_given:
        tolerance = 1e-4 if case.dtypes[0] == "bfloat16" else 4e-6
    check(interpreter.run(bind(case, module), make_arrays(case), mode=mode), case, tolerance=tolerance)


def bind(case, module=mixers):
    """Returns a function of a case's arrays."""
    batch = make_batch(case)

    def step(arrays, interpret):
        return getattr(module, case.op)(**arrays, **case.options, batch=batch, interpret=interpret)

    return step


@pytest.fixture
def small_items(monkeypatch):
    """Two items a row, or of a convolution two on their way, and two rows a grid step."""
    monkeypatch.setattr(state_decode, "ITEM_BYTES", TWO_HEADS)
    monkeypatch.setattr(mixers, "WINDOWS", 2)
    monkeypatch.setattr(state_decode, "rows_of_block", lambda *_: 2)


@pytest.mark.parametrize("mode", interpreter.MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_token_of_each_row(name, mode, small_items):
    by_day = ("delta", "races"), ("channels", "plain"), ("space", "races"), ("convolution", "races")
    if not NIGHTLY and (name, mode) not in by_day:
        pytest.skip("by day each mixer runs in one mode")
    run(CASES[name], interpreter.MODES[mode])


BFLOAT16 = CONVOLUTION._replace(dtypes=("bfloat16", "bfloat16"))


@pytest.mark.parametrize(
    "case",
    [BFLOAT16, *[CONVOLUTION._replace(dtypes=("float32", "bfloat16"), new=(0, 1, 0, 1, 1)), BFLOAT16._replace(
        before=(5,), new=(1,), slots=(10,), to_slots=(0,), snapshots=(-1,), heads=12)] * NIGHTLY],
)  # fmt: skip
def test_inputs_of_other_dtypes_and_sizes(case):
    run(case, RACES)


def test_a_step_without_a_token():
    case = SPACE._replace(new=(0,) * 5, to_slots=(-1,) * 5, heads=2)
    run(case, RACES)


@pytest.mark.parametrize(("heads", "keys"), [(3, 3), *[(6, 2), (4, 2)] * NIGHTLY])
def test_a_row_of_one_item(heads, keys):
    """A last head alone, two heads side by side of two keys, or of one."""
    run(DELTA._replace(heads=heads, keys=keys), RACES)


@pytest.mark.skipif(not NIGHTLY, reason="six programs to interpret")
@pytest.mark.parametrize("fields", [{}, {"new": (1, 3), "packed": True, "every": 64}])
def test_batches_and_scans(fields):
    """Under `vmap` each pool is its own; a scan carries a pool from layer to layer."""
    case = Mixing(before=(2, 0), new=(1, 1), slots=(5, 2), to_slots=(5, 2), snapshots=(-1, 8), heads=2)
    case = case._replace(**fields)
    step, arrays = bind(case), [make_arrays(case), make_arrays(case, 1)]
    layers = jax.tree.map(lambda *x: jnp.stack(x), *arrays)

    def batched(layers, interpret):
        return jax.vmap(functools.partial(step, interpret=interpret))(layers)

    found = interpreter.run(batched, layers, mode=PLAIN)
    for i, each in enumerate(arrays):
        check(jax.tree.map(lambda x, i=i: x[i], found), case, each)

    def scanned(layers, interpret):
        def layer(states, x):
            y, states = step(x | {"states": states}, interpret)
            return states, y

        states, ys = jax.lax.scan(layer, layers["states"][0], layers)
        return ys[1], states

    after = expect(case, arrays[0])[1]
    check(interpreter.run(scanned, layers, mode=PLAIN), case, arrays[1] | {"states": jnp.asarray(after)})


@pytest.mark.parametrize(
    "case",
    [
        DELTA,
        *[CONVOLUTION, DELTA._replace(new=(1, 3, 0, 1, 70), every=64), CHANNEL_CHUNKS._replace(packed=False)] * NIGHTLY,
    ],
)
def test_heads_over_devices(case):
    mesh, arrays = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), make_arrays(case)
    heads, whole = jax.P(None, None, "x"), jax.P()
    fixed = {"scale": whole, "weight": jax.P("x"), "bias": jax.P("x"), "states": jax.P(None, "x")}
    specs = dict.fromkeys(arrays, heads) | {name: spec for name, spec in fixed.items() if name in arrays}

    def divided(arrays, interpret):
        step = functools.partial(bind(case), interpret=interpret)
        out_specs = heads, specs["states"]
        return jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(arrays)

    check(interpreter.run(divided, arrays, mode=PLAIN), case)


def shape(*axes, dtype="float32"):
    return jax.ShapeDtypeStruct(axes, dtype)


def explain(axes=(4, 1), widths=(128, 128), states="float32", values="bfloat16", **others):
    """Returns what is said of the gated delta rule on a TPU."""
    heads, (keys, width) = 4, widths
    q = shape(*axes, heads, keys)
    arrays = dict(q=q, k=q, v=shape(*axes, heads, width, dtype=values), g=shape(*axes, heads))
    arrays |= dict(beta=arrays["g"], states=shape(9, heads, keys, width, dtype=states))
    return pallas_kernels.explain("gated_delta_rule", **arrays | others, platform="tpu")


def test_the_choice_is_explained():
    assert explain().implementation == "tpu"
    refused = {
        "keep states in float32, not bfloat16": explain(states="bfloat16"),
        "v is float16: cast it": explain(values="float16"),
        "128 x 192 fill no whole register tiles of 8 x 128": explain(widths=(128, 192)),
        "12 x 128 fill no whole": explain(widths=(12, 128)),
    }
    for sentence, choice in refused.items():
        assert choice.implementation == "xla" and sentence in choice.reason, choice
    assert explain((4, 70)).implementation == explain((70,)).implementation == "tpu"
    assert explain((70,), g=shape(70, 4, 128)).implementation == "tpu"
    for width in (64, 256):
        other = explain((70,), widths=(width, 128), g=shape(70, 4, width))
        assert other.implementation == "xla" and f"128 keys a head, not {width}" in other.reason, other
    x, gates = shape(70, 512, 128), shape(70, 512)
    many = dict(q=x, k=x, v=x, g=gates, beta=gates, states=shape(9, 512, 128, 128))
    many = pallas_kernels.explain("gated_delta_rule", **many, platform="tpu")
    assert many.implementation == "xla" and "512 states of a row take 5" in many.reason, many
    every = explain((70,), every=48, snapshot_slots=shape(4, 2, dtype="int32"))
    assert every.implementation == "xla" and "not after every 48" in every.reason


def explain_convolution(inner=(8, 3, 128), axes=(4, 1), states="bfloat16", **others):
    """Returns what is said of a convolution on a TPU."""
    channels, taps = (inner[0] * inner[2], inner[1]) if len(inner) == 3 else inner
    arrays = dict(x=shape(*axes, channels), weight=shape(channels, taps + 1), states=shape(9, *inner, dtype=states))
    return pallas_kernels.explain("causal_conv", **arrays | others, platform="tpu")


def test_the_choice_for_a_convolution_is_explained():
    assert pallas_kernels.explain("causal_conv", platform="tpu").implementation == "tpu"
    assert explain_convolution().implementation == explain_convolution((24, 3, 128)).implementation == "tpu"
    refused = {
        "states is float16: cast it": explain_convolution(states="float16"),
        "[1024, 3] are no whole register tiles of 8 x 128": explain_convolution((1024, 3)),
        "[26, 3, 128] are no whole": explain_convolution((26, 3, 128)),
        "[16, 3, 64] are no whole": explain_convolution((16, 3, 64)),
        "tiles of 2 inputs of 128 channels": explain_convolution((8, 2, 128)),
        "take more than the 1 MiB": explain_convolution((2048, 3, 128)),
        "more than a token of each row": explain_convolution(axes=(4, 2)),
        "more than a token of each": explain_convolution(axes=(4,)),
    }
    for sentence, choice in refused.items():
        assert choice.implementation == "xla" and sentence in choice.reason, choice


@pytest.mark.parametrize("mode", interpreter.MODES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunks_of_tokens(name, packed, mode):
    by_day = ("delta", True, "races"), ("channels", True, "races"), ("space", False, "plain")
    if not NIGHTLY and (name, packed, mode) not in by_day:
        pytest.skip("by day each mixer runs in one layout and mode")
    run(IN_CHUNKS[name]._replace(packed=packed), interpreter.MODES[mode])


@pytest.mark.skipif(not NIGHTLY, reason="many chunks")
def test_rows_of_all_lengths_with_gates_by_channel():
    """About the ends of chunks, and of the blocks within them; the last row shares what the one before read."""
    new = 0, 1, 15, 16, 17, 127, 128, 129, 300
    case = Mixing(
        by_channel=True, before=(5, 0, 1, 64, 63, 2, 0, 100, 100), new=new, slots=(0, 1, 2, 3, 4, 5, 6, 7, 7),
        to_slots=(0, 1, 2, 3, 4, 5, 6, 8, 7), snapshots=(-1,) * 7 + (9, 10), packed=True, every=128, heads=2,
    )  # fmt: skip
    run(case, RACES, tolerance=2e-5)


ONE_ROW = dict(before=(3,), new=(70,), slots=(5,), to_slots=(6,), snapshots=(-1,))
# Three heads of one key: the last one has no second beside it where triangles' blocks are inverted.
SHORT = CHUNKS._replace(dtypes=("bfloat16", "float32"), heads=3)
# A row begins behind one whose states leave.
EMPTIED = CHUNKS._replace(before=(64, 0, 3, 70), new=(2, 70, 0, 60), snapshots=(-1, 3, -1, 8))
OWN_KEYS = CHUNKS._replace(keys=4)  # two heads whose triangles lie side by side have not one key
# Rows of one token go by the kernel of these, beside the others.
MIXED = Mixing(
    before=(5, 0, 3, 63, 70), new=(1, 70, 0, 1, 2), slots=(2, 5, 0, 1, 4), to_slots=(2, 6, 0, 7, 4),
    snapshots=(-1, 3, -1, 8, -1), packed=True, every=64, heads=2,
)  # fmt: skip
# Row 1 reads what 2, of one token, writes, which reads what 3 does; and writes what 0, of one token, reads.
CHAIN = MIXED._replace(
    before=(4, 64, 7, 2), new=(1, 6, 1, 1), slots=(5, 6, 3, 2), to_slots=(9, 5, 6, 3), snapshots=(-1,) * 4
)
EVERY_COUNT = MIXED._replace(
    before=(3, 5, 49, 0, 40, 1, 0, 64, 30), new=(0, 1, 15, 16, 17, 63, 64, 65, 200), slots=tuple(range(9)),
    to_slots=tuple(range(9)), snapshots=(-1,) * 7 + (9, -1),
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        MIXED,
        *[case._replace(packed=packed, op=op) for case in (MIXED, CHAIN, EVERY_COUNT) for packed in (True, False)
          for op in ("gated_delta_rule", "state_space")] * NIGHTLY,
        *[MIXED._replace(by_channel=True)] * NIGHTLY,
    ],
)  # fmt: skip
def test_rows_of_one_token_beside_others(case):
    run(case, RACES, tolerance=2e-5)


@pytest.mark.parametrize("heads", [4, *[3, 2] * NIGHTLY])
def test_chunks_of_values_of_16_bits(heads):
    """Two heads are one word where they are even."""
    case = SHORT if NIGHTLY else SHORT._replace(**ONE_ROW)
    run(case._replace(heads=heads), PLAIN)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (OWN_KEYS._replace(**ONE_ROW), 2),  # heads of a grid step, at most: an item follows another of the same chunk
        *[
            (OWN_KEYS, 2),
            (OWN_KEYS._replace(by_channel=True), 2),
            (CHANNEL_CHUNKS, 1),
            (SHORT._replace(by_channel=True), 16),
            (CHANNEL_CHUNKS._replace(new=(0,) * 4, to_slots=(-1,) * 4), 16),
            (CHUNKS, 1),  # two items read a key
            (EMPTIED, 2),
            (IN_CHUNKS["space"], 2),
            (CHUNKS._replace(heads=10, **ONE_ROW), 16),
            (CHUNKS._replace(new=(0,) * 4, to_slots=(-1,) * 4), 16),
        ]
        * NIGHTLY,
    ],
)
def test_heads_of_chunks(case, most, monkeypatch):
    """Few heads a grid step, and more than a register has rows; no token at all."""
    monkeypatch.setattr(state_prefill, "HEADS", most)
    if case.before == ONE_ROW["before"]:  # of heads as they lie, not divided by XLA
        monkeypatch.setattr(chunk_tokens, "SUBLANES", 2)
    run(case, RACES)


def check_strong_gates(module=mixers, by_channel=False):
    """Half of all gates forget all, the others next to nothing: sums are large, and what lies between tokens small."""
    case = CHUNKS._replace(**ONE_ROW | {"new": (61,)}, heads=2, by_channel=by_channel)
    arrays = make_arrays(case)
    weak = np.random.default_rng(1).random(arrays["g"].shape) < 0.5
    arrays["g"] = jnp.where(weak & (arrays["g"] == arrays["g"]), arrays["g"] / 4096, 32 * arrays["g"])
    check(interpreter.run(bind(case, module), arrays, mode=PLAIN), case, arrays, tolerance=2e-5)


def test_sums_of_strong_gates():
    check_strong_gates()


def test_strong_gates_by_channel():
    """A channel forgets all between two tokens, or nothing, whatever it does between others."""
    check_strong_gates(by_channel=True)


@pytest.mark.skipif(not NIGHTLY, reason="by day the sums as they are pass")
def test_sums_that_are_not_exact_are_noticed(tmp_path, monkeypatch):
    rounded = Plant("state_chunk:_Gates.__init__", "jnp.round(numbers[:rows] * (1 / STEP)) * STEP", "numbers[:rows]")
    with pytest.raises(AssertionError):
        check_strong_gates(broken(tmp_path, monkeypatch, rounded))


HALVED = Plant("state_prefill:heads_of_step", "HEADS + 1", "2 + 1")  # no mistake: two items a chunk
# name: (case, mode, what is planted).
CONTROLS = {
    "a state not awaited": (
        DELTA, PLAIN,
        Plant("state_decode:_kernel", "pl.when(~begins)", "pl.when(item < 0)"),
    ),
    "a slot refilled while it is computed": (
        DELTA, RACES,
        Plant("state_decode:_kernel", "(number + depth - 1) & (depth - 1)", "number & (depth - 1)"),
    ),
    "a state overwritten while it leaves": (
        DELTA, RACES,
        Plant("state_decode:_kernel", "coming.at[slot], leaving.at[slot]", "coming.at[slot], leaving.at[0 * slot]"),
    ),
    "what leaves last not awaited": (
        DELTA, PLAIN,
        Plant("state_decode:_kernel", "block == blocks - 1", "block == blocks"),
    ),
    "a row that begins with what its slot holds": (
        DELTA, PLAIN,
        Plant("state_decode:list_items", "jnp.where(batch.begins, -1, jnp.clip(batch.slots, 0, num_slots - 1))",
              "jnp.clip(batch.slots, 0, num_slots - 1)"),
    ),
    "a row without a token written": (
        DELTA, PLAIN,
        Plant("state_decode:list_items", "batch.query_lens > 0", "batch.query_lens >= 0"),
    ),
    "a state written over the one that is shared": (
        DELTA, PLAIN,
        Plant("state_decode:_kernel", "place(target, group)", "place(jnp.maximum(sources[item], 0), group)"),
    ),
    "a snapshot forgotten": (
        DELTA, PLAIN,
        Plant("state_decode:_kernel", "snapshot >= 0", "snapshot >= 99"),
    ),
    "another item's heads": (
        DELTA, PLAIN,
        Plant("state_decode:_kernel", "pl.ds(group * size, size)", "pl.ds(0 * group, size)"),
    ),
    "a grid step's first item again": (
        DELTA, PLAIN,
        Plant("state_decode:list_items", "ends[block - 1 :: block]", "0 * ends[block - 1 :: block]"),
    ),
    "a token's own part left out": (
        DELTA, PLAIN,
        Plant("state_decode:update_delta", "at_query + alike[own : own + 1] * u", "at_query + 0 * u"),
    ),
    "numbers of one part": (
        DELTA, PLAIN,
        Plant("state_decode:split", "x - parts[-1]", "0 * x"),
    ),
    "a channel's gate left out of what is found": (
        CHANNELS, PLAIN,
        Plant("state_decode:update_delta", "repeat_rows(x, share) * decays[0]", "repeat_rows(x, share)"),
    ),
    "a state's small parts left out": (
        SPACE, PLAIN,
        Plant("state_decode:update_space", "enumerate(split(states))", "enumerate(split(states)[:1])"),
    ),
    "a state's second part left out of what keys read": (
        DELTA, PLAIN,
        Plant("state_decode:read_states", "split(before[head])[:2]", "split(before[head])[:1]"),
    ),
    "a key's second part left out of what it reads": (
        DELTA, PLAIN,
        Plant("state_decode:read_states", "mine[:2] + mine[2:4]", "mine[:2] + 0 * mine[2:4]"),
    ),
    "what a key reads of the first of two heads for both": (
        DELTA, PLAIN,
        Plant("state_decode:read_states", "enumerate(pair)", "((0, head) for head in pair)"),
    ),
    "what the key of the first of two heads reads for both": (
        CHANNELS, PLAIN,
        Plant("state_decode:read_states", "6 * own.index(head // share)", "0 * head"),
    ),
    "last inputs overwritten while they leave": (
        CONVOLUTION, RACES,
        Plant("state_decode:_kernel", "coming.at[slot], leaving.at[slot]", "coming.at[slot], leaving.at[0 * slot]"),
    ),
    "last inputs not moved on": (
        CONVOLUTION, PLAIN,
        Plant("state_decode:update_conv", "before[tap + 1]", "before[tap]"),
    ),
    "the token's own input not kept": (
        CONVOLUTION, PLAIN,
        Plant("state_decode:update_conv", "x.astype(after.dtype)", "before[tap]"),
    ),
    "weights of other taps": (
        CONVOLUTION, PLAIN,
        Plant("state_decode:update_conv", "weights[tap]", "weights[taps - 1 - tap]"),
    ),
    "a bias forgotten": (
        CONVOLUTION, PLAIN,
        Plant("state_decode:update_conv", "bias[0]", "0 * bias[0]"),
    ),
    "an activation forgotten": (
        CONVOLUTION, PLAIN,
        Plant("state_decode:update_conv", "activation == 'silu'", "activation is None"),
    ),
    "a chunk begins with the state of the row before": (
        CHUNKS, PLAIN,
        Plant("state_prefill:_kernel", "source == -1", "source == -9"),
    ),
    "another state fetched": (
        CHUNKS, PLAIN,
        Plant("state_prefill:_kernel", "arrival(awaited, heads, turn)", "arrival(0 * awaited, heads, turn)"),
    ),
    "a state not awaited, of chunks": (
        CHUNKS, RACES,
        Plant("state_prefill:_kernel", "is_chunk & (source >= 0)", "is_chunk & (source >= 99)"), HALVED,
    ),
    "a state overwritten while the row before leaves": (
        CHUNKS, RACES,
        Plant("state_prefill:_kernel", "make_room(begins, heads)", "None"), HALVED,
    ),
    "a state emptied while the row before leaves": (
        EMPTIED, RACES,
        Plant("state_prefill:_kernel", "make_room(chunk, group)", "None"), HALVED,
    ),
    "what leaves last not awaited, of chunks": (
        CHUNKS, RACES,
        Plant("state_prefill:_kernel", "number == total[0] * groups + STAGES - 2", "number < 0"), HALVED,
    ),
    "a state written over the one that is shared, after chunks": (
        CHUNKS, PLAIN,
        Plant("state_prefill:list_chunks", "targets = batch.targets(num_slots)", "targets = batch.slots"),
    ),
    "a snapshot of the wrong number": (
        CHUNKS, PLAIN,
        Plant("state_prefill:list_chunks", "end // batch.every - start // batch.every - 1", "end // batch.every - 1"),
    ),
    "chunks cut at multiples of their own": (
        CHUNKS, PLAIN,
        Plant("state_prefill:list_chunks", "jnp.maximum((first[row] + number) * CHUNK, start)",
              "(first[row] + number) * CHUNK"),
    ),
    "padding of the last chunk computed": (
        CHUNKS, PLAIN,
        Plant("Transport.bring", "count < CHUNK", "count < 0"),
    ),
    "tokens not awaited": (
        CHUNKS, PLAIN, Plant("Transport.bring", "self.fetch('wait', names, item, number)", "None"),
    ),
    "tokens overwritten while they are read": (
        CHUNKS, RACES, Plant("Transport._places", "number & 1", "0 * number"),
    ),
    "tokens of the chunk that follows for a chunk's own": (
        CHUNKS, PLAIN, Plant("Transport._places", "self.counts[chunk]", "CHUNK"),
    ),
    "tokens of other heads": (
        OWN_KEYS, PLAIN, Plant("Transport._places", "divide(group, self.groups // parts)", "0 * group"), HALVED,
    ),
    "outputs overwritten while they leave": (
        CHUNKS, RACES,
        Plant("state_prefill:_kernel", "transport.send('wait', _before(*last, groups, 2), number)", "None"),
    ),
    "outputs that leave last not awaited": (
        CHUNKS, RACES, Plant("state_prefill:_kernel", "transport.send('wait', last, number)", "None"),
    ),
    "the first of two heads in a word for both": (
        SHORT._replace(heads=4), PLAIN, Plant("HeadLines.head", "head % 2", "0 * head"),
    ),
    "queries without their scale": (
        CHUNKS, PLAIN, Plant("state_chunk:relate", "x * scale[0]", "x"),
    ),
    "queries without their scale, by channel": (
        CHANNEL_CHUNKS, PLAIN, Plant("_far_tokens", "tokens.q.head(key) * scale[0]", "tokens.q.head(key)"),
    ),
    "items of the stage before": (
        CHUNKS, PLAIN,
        Plant("state_prefill:_kernel", "_before(*first, groups, STAGES - 1)", "_before(*first, groups, STAGES - 2)"),
    ),
    "what the next item leaves read for this one's": (
        CHUNKS, PLAIN,
        Plant("state_prefill:_kernel", "number & 1", "0 * number"),
    ),
    "the last item's last stage not run": (
        CHUNKS, PLAIN,
        Plant("state_prefill:_kernel", "total[0] * groups + STAGES - 1", "total[0] * groups + STAGES - 2"),
    ),
    "a key seen by earlier queries": (
        CHUNKS, PLAIN,
        Plant("state_chunk:_Gates.between", "jnp.where(column <= row, total, -jnp.inf)", "total"),
    ),
    "the small rest of gates left out": (
        CHUNKS, PLAIN,
        Plant("state_chunk:_Gates.__init__", "numbers[:rows] - first", "0 * first"),
    ),
    "gates of the first of two heads for both": (
        CHUNKS, PLAIN,
        Plant("state_chunk:_Gates.spread_sums", "lane // CHUNK & 1", "0 * lane"),
    ),
    "a key of the first of two heads for both": (
        OWN_KEYS, PLAIN,
        Plant("state_chunk:relate", "key_of[a] != key_of[b]", "False"),
    ),
    "attention of the first of two heads for both": (
        CHUNKS, PLAIN,
        Plant("state_chunk:relate", "head % 2 * CHUNK", "0 * head"),
    ),
    "pairs of blocks not joined": (
        CHUNKS, PLAIN,
        Plant("state_chunk:join_blocks", "jnp.where(is_even, -corner, x)", "jnp.where(is_even, 0.0, x)"),
    ),
    "blocks of the second of two pairs joined as the first's": (
        CHUNKS, PLAIN,
        Plant("state_chunk:join_blocks", "(y, pltpu.roll(y, PAIR - BLOCK, 1))", "(y, y)"),
    ),
    "pairs of blocks joined by the first ones' inverses": (
        CHUNKS, PLAIN,
        Plant("state_chunk:first_product", "split(second, digits)", "split(first, digits)"),
    ),
    "a block's last row not substituted": (
        CHUNKS, PLAIN,
        Plant("state_chunk:invert_blocks", "range(BLOCK - 1)", "range(BLOCK - 2)"),
    ),
    "the first half's inverse for the second's": (
        CHUNKS, PLAIN,
        Plant("state_chunk:solve", "(inverse, begin + HALF)", "(inverse, begin)"),
    ),
    "what lies below the first half left out": (
        CHUNKS, PLAIN,
        Plant("state_chunk:advance", "x[HALF:] - y", "x[HALF:]"),
    ),
    "a number's second part left out": (
        SHORT, PLAIN,
        Plant("products:multiply_left", "b[:2]", "[b[0], 0 * b[1]]"),
    ),
    "a number's second part left out of what is added": (
        SHORT, PLAIN,
        Plant("products:multiply_rows", "b[: max(2, len(b) - i)]", "b[:1]"),
    ),
    "a number's third part left out": (
        CHUNKS, PLAIN,
        Plant("products:multiply_left", "len(b) == 2", "len(b) <= 3"),
    ),
    "rows of one token by both kernels": (
        MIXED, PLAIN, Plant("mixers:_share", "prefill(tokens, states, many)", "prefill(tokens, states, batch)"),
    ),
    "the first row's token for all that decode": (
        MIXED, PLAIN,
        Plant("mixers:_share", "jnp.clip(flat.query_starts, 0, math.prod(axes) - 1)", "1 + 0 * flat.query_starts"),
    ),
    "outputs of decode left out": (
        MIXED, PLAIN, Plant("mixers:_share", "merge_rows(of_few[row, 0], y, is_many, row)", "y"),
    ),
    "places behind a decoded token": (
        MIXED._replace(packed=False), PLAIN,
        Plant("mixers:_share", "hide_padding(merge_rows(of_few[row, 0], y, is_many, row), values, batch)",
              "merge_rows(of_few[row, 0], y, is_many, row)"),
    ),
    "rows of many tokens before those of one": (
        CHAIN, PLAIN,
        Plant("mixers:_share", "of_few, states = decode(first, states, few)\ny, states = prefill(tokens, states, many)",
              "y, states = prefill(tokens, states, many)\nof_few, states = decode(first, states, few)"),
    ),
    "rows that meet apart": (
        CHAIN, PLAIN,
        Plant("mixers:_share", "few, many, is_many = share_rows(flat, 2, states.shape[0])",
              "few, many, is_many = share_rows(flat._replace(to_slots=None), 2, states.shape[0])\n"
              "few, many = (own._replace(to_slots=flat.to_slots) for own in (few, many))"),
    ),
    "earlier keys without their gates": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.join", "k[0] * till[0]", "k[0]"),
    ),
    "later keys without their gates": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.join", "k[1] * since[1]", "k[1]"),
    ),
    "queries without their gates": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.join", "q[1] * since[1]", "q[1]"),
    ),
    "blocks joined without the former's gates": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.join", "since[1] * first", "since[1]"),
    ),
    "blocks joined without the latter's gates": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.join", "till[0] * second", "till[0]"),
    ),
    "half of a block's gates for all": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.join", "first * second", "first"),
    ),
    "gates of eight tokens' first for all": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("_far_tokens", "since[:, SUBLANES - 1 :]", "since[:, :1]"),
    ),
    "gates till the end of eight tokens where those since their start belong": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("_far_tokens", "stages.reach[head, 0]", "stages.reach[head, 1]"),
    ),
    "a query's own key left out": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("Triangles.add_diagonal", "self.block == place", "self.block == -1"),
    ),
    "keys of a block itself for those of the one before": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("Triangles.add_blocks", "self.block // size == place // size - 1", "self.block // size == place // size"),
    ),
    "products of the first of two heads for both": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("Triangles.add_blocks", "_beside(found[0, kind, i], found[1, kind, i])", "found[0, kind, i]"),
    ),
    "second parts of earlier keys left out": (
        SHORT._replace(by_channel=True), PLAIN,
        Plant("Triangles.add_blocks", "pltpu.roll(product, PAIR - SUBLANES * size, 1)", "0 * product"),
    ),
    "third parts of keys left out": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("channel_gates:_multiply", "digits == 3", "digits > 3"),
    ),
    "tokens eight apart left in their order": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("Triangles.leave", "jnp.take_along_axis(x, turned, axis=1, mode='promise_in_bounds')", "x"),
    ),
    "what eight tokens have of each other for what they have of others": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("Triangles.join", "self.block == i", "self.block <= i"),
    ),
    "gains not multiplied by beta": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("Triangles.join", "x * beta", "x"),
    ),
    "beta of the first of two heads for both": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("relate_channels", "beta[pair[-1] : pair[-1] + 1]", "beta[pair[0] : pair[0] + 1]"),
    ),
    "attention of the first of two heads for both, by channel": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("relate_channels", "head % 2 * CHUNK", "0 * head"),
    ),
    "a chunk's gates left out of its state": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("relate_channels", "own.total[0, :1]", "jnp.ones_like(own.total[0, :1])"),
    ),
    "keys of other heads": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("relate_channels", "head // (size // num_keys)", "0 * head"),
    ),
    "keys as the state reads them for what they add": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("state_chunk:advance", "stages.ends[i, part]", "stages.keys[i, part]"),
    ),
    "queries without gates since the chunk's start": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.finish", "self.q * self.since", "self.q"),
    ),
    "what keys read of the state without gates": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("GatedTokens.finish", "self.k * self.since", "self.k"),
    ),
    "what the next item leaves read for this one's, by channel": (
        CHANNEL_CHUNKS, PLAIN,
        Plant("state_prefill:_kernel", "number & 1", "0 * number"),
    ),
    "what stands at a chunk's end forgotten less": (
        IN_CHUNKS["space"], PLAIN,
        Plant("state_chunk:advance", "u[i] * _widen(till_end[i], width)", "u[i]"),
    ),
}  # fmt: skip
BY_DAY = ("a slot refilled while it is computed", "a snapshot of the wrong number", "last inputs not moved on")


def broken(tmp_path, monkeypatch, *plants):
    """The kernels' mixers under another name, with mistakes planted in them."""
    name = next(names)
    SOURCES.write_copy(tmp_path, name, *plants)
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.import_module(f"{name}.recurrence.state_decode")
    monkeypatch.setattr(found, "ITEM_BYTES", TWO_HEADS)
    monkeypatch.setattr(found, "rows_of_block", lambda *_: 2)
    found = importlib.import_module(f"{name}.mixers")
    monkeypatch.setattr(found, "WINDOWS", 2)
    return found


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else BY_DAY)
def test_control(control, tmp_path, monkeypatch):
    case, mode, *plants = CONTROLS[control]
    module = broken(tmp_path, monkeypatch, *plants)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        run(case, mode, module)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)
