"""Known mistakes planted in the TPU kernels of states, each with a case that notices it."""

import importlib
import itertools
import pathlib

import jax
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY
from planting import Plant, Sources
from state_kernels import CHANNELS, CONVOLUTION, DELTA, SPACE
from tpu_state_cases import (
    CHAIN,
    CHANNEL_CHUNKS,
    CHUNKS,
    EMPTIED,
    IN_CHUNKS,
    LONG,
    MIXED,
    OWN_KEYS,
    SHORT,
    TWO_HEADS,
    check_strong_gates,
    run,
)

from pallas_kernels import tpu

pytestmark = pytest.mark.timeout(240, method="thread")
FOLDER = pathlib.Path(tpu.__file__).parent
SOURCES = Sources(FOLDER, "pallas_kernels.tpu")
names = (f"broken_tpu_states_{i}" for i in itertools.count())
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
        CHUNKS, PLAIN, Plant("Transport.bring", "self.move('wait', names, item, number)", "None"),
    ),
    "tokens overwritten while they are read": (
        CHUNKS, RACES, Plant("Transport._places", "number & 1", "0 * number"),
    ),
    "tokens of the chunk that follows for a chunk's own": (
        CHUNKS, PLAIN, Plant("Transport.move", "self.counts[item[0]]", "CHUNK"),
    ),
    "tokens of other heads": (
        OWN_KEYS, PLAIN, Plant("Transport._places", "divide(group, self.groups // parts)", "0 * group"), HALVED,
    ),
    "outputs overwritten while they leave": (
        CHUNKS, RACES,
        Plant("state_prefill:_kernel", "transport.move('wait', OUTPUTS, sent, number)", "None"),
    ),
    "outputs that leave last not awaited": (
        CHUNKS, RACES, Plant("state_prefill:_kernel", "transport.move('wait', OUTPUTS, last, number)", "None"),
    ),
    "outputs overwritten while they leave, in a long row": (
        LONG, RACES,
        Plant("state_prefill:_kernel", "transport.await_whole(OUTPUTS, sent, number)", "None"),
    ),
    "tokens not awaited in a long row": (
        LONG, PLAIN,
        Plant("state_prefill:_kernel", "transport.await_whole(FIRST, following, number + 1)", "None"),
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


@pytest.mark.skipif(not NIGHTLY, reason="by day the sums as they are pass")
def test_sums_that_are_not_exact_are_noticed(tmp_path, monkeypatch):
    rounded = Plant("state_chunk:_Gates.__init__", "jnp.round(numbers[:rows] * (1 / STEP)) * STEP", "numbers[:rows]")
    with pytest.raises(AssertionError):
        check_strong_gates(broken(tmp_path, monkeypatch, rounded))


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)
