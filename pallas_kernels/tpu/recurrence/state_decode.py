"""One new token per row of a layer that keeps states, or of a convolution that keeps its last inputs: each is read,
changed and written where it lies in the pool.

The work is a list of items, a row's heads or a part of them. States come and go by copies that run on from item to
item: the next items' states come, and the last ones' leave, while one is computed. A row without a token is no item, so
that nothing of it is read or written. Between copy and copy stands one straight piece of code, all heads of an item one
after another: their chains of operations are long, and cost nothing only beside each other.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.tpu.pages import LANES, SPILL_BYTES, compiler_params, keep_in_hbm, output, vector_bytes

ITEM_BYTES = 2 * 2**20  # of states, at most
DEPTH = 4  # items whose states have room before they are computed, and as many after; a power of two
BLOCK_BYTES = 4 * 2**20  # of tokens in vector memory together; they are buffered twice
TILE = 8  # rows of a register


class StateItems(NamedTuple):
    """The rows with a token, in order; i32[S] each, but for `count` and `first`."""

    row: jax.Array
    source: jax.Array  # the slot that holds the row's state; -1: it has none, and begins with 0
    target: jax.Array  # the slot that takes it; -1: none
    snapshot: jax.Array  # a second one; -1: none
    first: jax.Array  # i32[blocks + 1]: how many stand before each block of rows
    count: jax.Array  # i32[1]


def list_items(batch: StateBatch, num_slots: int, block: int) -> StateItems:
    """Returns the work list of a decode step over blocks of rows."""
    rows = batch.query_lens.shape[0]
    active = batch.query_lens > 0
    ends = jnp.cumsum(active, dtype=jnp.int32)
    index = jnp.arange(rows, dtype=jnp.int32)
    # Each item picks its row's numbers by comparing and adding: a gather would cost a TPU more.
    mine = active[None] & (ends[None] == index[:, None] + 1)

    def pick(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine, x[None], 0), axis=1, dtype=jnp.int32)

    source = jnp.where(batch.begins, -1, jnp.clip(batch.slots, 0, num_slots - 1))
    target = batch.targets(num_slots)
    snapshot = jnp.full(rows, num_slots, jnp.int32)
    if batch.snapshot_slots is not None:
        assert batch.every is not None
        taken = active & (batch.kv_lens % batch.every == 0)
        snapshot = batch.snapshot_targets(jnp.zeros_like(batch.slots), taken, num_slots)
    target, snapshot = (jnp.where(x < num_slots, x, -1) for x in (target, snapshot))
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[block - 1 :: block], ends[-1:]])[: -(-rows // block) + 1]
    return StateItems(pick(index), pick(source), pick(target), pick(snapshot), first, ends[-1:])


class StateTokens(NamedTuple):
    """What a decode step takes of its tokens, by head groups: `[S, groups, ...]`."""

    arrays: tuple[jax.Array, ...]  # `[S, groups, heads of a group, D]`; numbers `[S, groups, n, heads of a group]` last
    masks: tuple[jax.Array, ...] = ()  # `[.., .., LANES]`, the same for all rows


class StateInputs(NamedTuple):
    """What comes for a block of rows, and the pool, which stays in HBM."""

    masks: Any  # of `StateTokens`, as the arrays
    arrays: Any
    pool: Any  # [slots, H, ., .]


class StateOutputs(NamedTuple):
    """What goes for a block of rows, and the pool, in the memory that it came in."""

    y: Any  # [S, groups, ., .]
    pool: Any  # [slots, H, ., .]


class StateScratch(NamedTuple):
    """What the kernel keeps in vector memory, and the semaphores of its copies."""

    coming: Any  # [depth, heads of a group, ., .]: items' states before
    leaving: Any  # as many: after
    arriving: Any  # [depth]
    sending: Any  # [depth + 1]: the last is the snapshots'
    marks: Any  # i32[4 + depth] in scalar memory: what one block of rows leaves to the next


# From an item's part of the tokens' arrays, references to its states before and after, and masks, its output.
Update = Callable[..., jax.Array]


def decode_states(
    update: Update,
    tokens: StateTokens,
    states: jax.Array,
    batch: StateBatch,
    out: tuple[int, int],
    dtype: Any,
    *,
    depth: int = DEPTH,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs `[S, groups, *out]`, 0 for rows without a token, and the pool, in its own memory if donated.

    Args:
      update: computes an item, e. g. `update_delta`.
      tokens: of all rows.
      states: `[slots, H, ., .]`.
      dtype: of the outputs.
      depth: see `DEPTH`; more for items so small that a copy is more waiting than bytes.
    """
    rows, groups = tokens.arrays[0].shape[:2]
    size, block = states.shape[1] // groups, rows_of_block(tokens, out)
    blocks, items = -(-rows // block), list_items(batch, states.shape[0], block)

    def per_block(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((block, *x.shape[1:]), lambda block, *_: (block, 0, 0, 0))

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs = StateInputs(tokens.masks, tokens.arrays, states)
    of_masks = tuple(pl.BlockSpec(x.shape, lambda block, *_: (0, 0, 0)) for x in tokens.masks)
    arrays = (*tokens.masks, *tokens.arrays)
    y = output((rows, groups, *out), dtype, states, *arrays)
    outputs = StateOutputs(y, output(states.shape, states.dtype, states, *arrays))
    item = pltpu.VMEM((depth, size, *states.shape[2:]), states.dtype)
    scratch = StateScratch(
        item,
        item,
        pltpu.SemaphoreType.DMA((depth,)),
        pltpu.SemaphoreType.DMA((depth + 1,)),
        pltpu.SMEM((4 + depth,), jnp.int32),
    )
    kernel = pl.pallas_call(
        functools.partial(_kernel, update=update),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks,),
            in_specs=(StateInputs(of_masks, tuple(map(per_block, tokens.arrays)), hbm),),
            out_specs=(StateOutputs(per_block(y), hbm),),
            scratch_shapes=(scratch,),
        ),
        out_shape=(outputs,),
        input_output_aliases={len(items) + len(arrays): 1},  # the pools
        cost_estimate=pl.CostEstimate(
            flops=8 * rows * math.prod(states.shape[1:]),
            transcendentals=tokens.arrays[-1].size,
            bytes_accessed=2 * rows * math.prod(states.shape[1:]) * states.dtype.itemsize,
        ),
        compiler_params=compiler_params(state_decode_bytes(tokens, states, out, dtype, depth)),
        interpret=interpret,
        name="state_decode",
    )

    @jax.custom_batching.sequential_vmap  # a kernel that copies by itself has no pool of a batch's pools
    def run(items: StateItems, inputs: StateInputs) -> StateOutputs:
        (outputs,) = kernel(items, inputs._replace(pool=keep_in_hbm(inputs.pool, interpret)))
        return outputs

    return run(items, inputs)


def rows_of_block(tokens: StateTokens, out: tuple[int, int]) -> int:
    """Returns the rows of a grid step: all, or a power of two."""
    rows, groups = tokens.arrays[0].shape[:2]
    row_bytes = sum(vector_bytes(x.shape[1:], jnp.float32) for x in tokens.arrays)
    most = max(1, BLOCK_BYTES // (row_bytes + vector_bytes((groups, *out), jnp.float32)))
    return rows if rows <= most else 1 << (most.bit_length() - 1)


def heads_of_item(states: Any) -> int:
    """Returns how many heads an item has: as many as its room and a register's lanes hold."""
    heads, head_bytes = states.shape[1], vector_bytes(states.shape[2:], states.dtype)
    return max(n for n in range(1, heads + 1) if not heads % n and n <= max(1, min(LANES, ITEM_BYTES // head_bytes)))


def state_decode_bytes(tokens: StateTokens, states: Any, out: tuple[int, int], dtype: Any, depth: int = DEPTH) -> int:
    """Returns the vector memory that the kernel takes, at most."""
    groups, block = tokens.arrays[0].shape[1], rows_of_block(tokens, out)
    item = vector_bytes((states.shape[1] // groups, *states.shape[2:]), states.dtype)
    of_tokens = sum(vector_bytes((block, *x.shape[1:]), x.dtype) for x in tokens.arrays)
    of_tokens += vector_bytes((block, groups, *out), dtype)
    of_tokens += sum(vector_bytes(x.shape, x.dtype) for x in tokens.masks)
    return SPILL_BYTES + 2 * depth * item + 2 * of_tokens


def _kernel(items: StateItems, inputs: StateInputs, outputs: StateOutputs, scratch: StateScratch, *, update: Update):
    rows, sources, targets, snapshots, firsts, counts = items
    mask_refs, token_refs, _ = inputs
    y_ref, pool = outputs
    coming, leaving, arriving, sending, marks = scratch
    block, blocks = pl.program_id(0), pl.num_programs(0)
    count, (block_rows, groups), (depth, size) = counts[0], y_ref.shape[:2], coming.shape[:2]

    def place(slot, group):
        return pool.at[slot, pl.ds(group * size, size)]

    def after(item, group):
        last = group == groups - 1
        return jnp.where(last, item + 1, item), jnp.where(last, 0, group + 1)

    def fetch(item, group, slot):
        """Starts the copy of an item's states, if there is such an item, and it has any. Returns the next item."""
        there = item < count
        source = sources[jnp.where(there, item, 0)]

        @pl.when(there & (source >= 0))
        def _():
            pltpu.make_async_copy(place(source, group), coming.at[slot], arriving.at[slot]).start()

        return after(item, group)

    def await_leaving(was_sent, slot):
        of_slot = leaving.at[slot]
        pl.when(was_sent > 0)(pltpu.make_async_copy(of_slot, of_slot, sending.at[slot]).wait)

    @pl.when(block == 0)
    def _():
        at = jnp.int32(0), jnp.int32(0)
        for slot in range(depth - 1):
            at = fetch(*at, slot)
        for i, x in enumerate((*at, 0, 0, *[0] * depth)):
            marks[i] = x

    y_ref[...] = jnp.zeros_like(y_ref)

    def step(number, carry):
        next_item, next_group, item, group, *was_sent = carry
        slot, free = number & (depth - 1), (number + depth - 1) & (depth - 1)
        ahead = fetch(next_item, next_group, free)
        here, of_item = coming.at[slot], leaving.at[slot]
        begins = sources[item] < 0
        pl.when(~begins)(pltpu.make_async_copy(here, here, arriving.at[slot]).wait)

        @pl.when(begins)
        def _():
            @pl.loop(0, size)
            def _(head):
                here[head] = jnp.zeros(here.shape[1:], here.dtype)

        await_leaving(was_sent[0], slot)
        row = rows[item] - block * block_rows
        given = [x[row, group].astype(jnp.float32) for x in token_refs]
        y_ref[row, group] = update(given, here, of_item, *mask_refs).astype(y_ref.dtype)
        target, snapshot = targets[item], snapshots[item]
        pl.when(target >= 0)(lambda: pltpu.make_async_copy(of_item, place(target, group), sending.at[slot]).start())

        @pl.when(snapshot >= 0)
        def _():  # seldom
            copy = pltpu.make_async_copy(of_item, place(snapshot, group), sending.at[depth])
            copy.start()
            copy.wait()

        return (*ahead, *after(item, group), *was_sent[1:], (target >= 0).astype(jnp.int32))

    carry = tuple(marks[i] for i in range(4 + depth))
    carry = lax.fori_loop(firsts[block] * groups, firsts[block + 1] * groups, step, carry)
    for i, x in enumerate(carry):
        marks[i] = x

    @pl.when(block == blocks - 1)
    def _():
        for i, was_sent in enumerate(carry[4:]):
            await_leaving(was_sent, (count * groups + i) & (depth - 1))


def update_conv(inputs, before, after, weights, bias=None, *, activation):
    """Computes an item of a convolution: x `[C / LANES, LANES]`; weights of the inputs before it, first the oldest, and
    of itself."""
    (x,), taps = inputs, before.shape[0]
    y = weights[taps].astype(jnp.float32) * x
    if bias is not None:
        y += bias[0].astype(jnp.float32)
    for tap in range(taps):
        y += weights[tap].astype(jnp.float32) * before[tap].astype(jnp.float32)
        after[tap] = before[tap + 1] if tap + 1 < taps else x.astype(after.dtype)
    return jax.nn.silu(y) if activation == "silu" else y


def update_delta(inputs, before, after, keys_mask, gates_mask=None):
    """Computes an item of the gated delta rule: q and k `[H', K]`, v `[H, V]`, with gates by channel these `[H, K]`,
    and numbers: gates, unless by channel, and beta. Masks are those of `make_masks`, of H' and H heads."""
    q, k, v, *channel_gates, numbers = inputs
    (heads, width), (shared, depth) = v.shape, k.shape
    share, tiles = heads // shared, [slice(i, i + TILE) for i in range(0, depth, TILE)]
    decays = [jnp.exp(x) for x in channel_gates]
    keys, *gate_columns = [to_columns(x) for x in (k, *decays)]
    rates = [to_rows(x, width) for x in split_numbers(numbers)]
    gates = None if decays else jnp.exp(rates[0])
    beta, alike = rates[-1], jnp.broadcast_to(jnp.sum(q * k, axis=1, keepdims=True), (shared, width))
    # Of states that forget by channel keys and queries read what is left: they may forget instead.
    lines = [split(repeat_rows(x, share) * decays[0] if decays else x) for x in (k, q)]
    found = read_states(lines, before, share=1 if decays else share)
    outputs = []
    for head in range(heads):
        own, this = head // share, slice(head, head + 1)
        at_key, at_query = next(found)
        if head % share == 0:
            key = spread_column(keys, keys_mask[own], width)
        if not decays:
            at_key, at_query = gates[this] * at_key, gates[this] * at_query
        u = beta[this] * (v[this] - at_key)
        outputs.append(at_query + alike[own : own + 1] * u)
        decay = spread_column(gate_columns[0], gates_mask[head], width) if decays else None
        for tile in tiles:
            after[head, tile] = before[head, tile] * (gates[this] if decay is None else decay[tile]) + key[tile] * u
    return jnp.concatenate(outputs, axis=0)


def read_states(lines, before, share):
    """Yields of each head what its states hold for its key and for its query, `[1, V]` each. Lines are three parts of
    keys and of queries; so many heads share one.

    Two heads' states lie side by side in a product. Of states it takes two parts, 16 of 24 bits, for splits are what
    bounds the kernel. They are written with all, and what keys find is learned anew with every token.
    """
    heads, _, width = before.shape
    for first in range(0, heads, 2):
        pair = range(first, min(first + 2, heads))
        own = sorted({head // share for head in pair})
        rows = [x[i : i + 1] for i in own for parts in zip(*lines, strict=True) for x in parts]
        left = pad_rows(jnp.concatenate(rows, axis=0)).astype(jnp.bfloat16)
        parts = zip(*(split(before[head])[:2] for head in pair), strict=True)
        sums = sum(dot(left, jnp.concatenate(x, axis=1).astype(jnp.bfloat16)) for x in parts)
        for i, head in enumerate(pair):
            start = 6 * own.index(head // share)
            mine = sums[start : start + 6, i * width : (i + 1) * width]
            found = mine[:2] + mine[2:4] + mine[4:]
            yield found[:1], found[1:]


def update_space(inputs, before, after):
    """Computes an item of a selective state space: x `[H, P]`, B and C `[G, n]`, and numbers: gates, and times. Returns
    `[G, H P / G]`."""
    x, b, c, numbers = inputs
    (heads, width), (shared, depth) = x.shape, b.shape
    share, tiles = heads // shared, [slice(i, i + TILE) for i in range(0, width, TILE)]
    gates, times = (to_rows(x, lanes) for x, lanes in zip(split_numbers(numbers), (depth, width), strict=True))
    gates, columns = jnp.exp(gates), pad_rows(x * times).T
    outputs = []
    for own in range(shared):
        this, those = slice(own, own + 1), slice(own * share, (own + 1) * share)
        for head in range(those.start, those.stop):
            for tile in tiles:
                into = jnp.broadcast_to(columns[tile, head : head + 1], (TILE, depth)) * b[this]
                after[head, tile] = before[head, tile] * gates[head : head + 1] + into
        states = after[those].reshape(share * width, depth)
        query = pad_rows(jnp.concatenate(split(c[this]), axis=0)).astype(jnp.bfloat16)
        found = jnp.zeros((1, share * width), jnp.float32)
        for i, part in enumerate(split(states)):  # the products of small parts are too small to count
            found += jnp.sum(dot(query, part.astype(jnp.bfloat16), 1)[: 3 - i], axis=0, keepdims=True)
        outputs.append(found)
    return jnp.concatenate(outputs, axis=0)


def split_numbers(numbers):
    """Returns `[1, H]` of each of the numbers `[n, H]`."""
    return [numbers[i : i + 1] for i in range(numbers.shape[0])]


def to_rows(x, width):
    """Returns `[H, width]`, each of `[1, H]` numbers in all lanes of a row of its own."""
    heads = x.shape[1]
    diagonal = lax.broadcasted_iota(jnp.int32, (heads, heads), 0) == lax.broadcasted_iota(jnp.int32, (heads, heads), 1)
    column = jnp.sum(jnp.where(diagonal, jnp.broadcast_to(x, (heads, heads)), 0.0), axis=1, keepdims=True)
    return jnp.broadcast_to(column, (heads, width))


def split(x):
    """Returns three parts of each number of `x`, as bfloat16 has them, which add up to it exactly."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16).astype(jnp.float32))
        x = x - parts[-1]
    return parts


def pad_rows(x):
    """Returns `[H padded, D]`, whole registers of rows."""
    missing = -x.shape[0] % TILE
    return x if not missing else jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)], axis=0)


def to_columns(x):
    """Returns `bf16[D, 3 H padded]` of `f32[H, D]`: the three parts of each number."""
    return jnp.concatenate(split(pad_rows(x)), axis=0).T.astype(jnp.bfloat16)


def make_masks(heads: int) -> jax.Array:
    """Returns `bf16[H, 3 H padded, LANES]`: by products with them heads' columns come out in all lanes."""
    padded = heads + -heads % TILE
    own = jnp.arange(3 * padded, dtype=jnp.int32)[None] % padded == jnp.arange(heads, dtype=jnp.int32)[:, None]
    return jnp.broadcast_to(own[..., None], (*own.shape, LANES)).astype(jnp.bfloat16)


def spread_column(columns, mask, width):
    """Returns `f32[D, width]`, a head's column in all lanes."""
    spread = dot(columns, mask)
    return spread if width == LANES else jnp.concatenate([spread] * (width // LANES), axis=1)


def dot(a, b, axis=0):
    """Returns a product in float32, over an axis of `b`."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def repeat_rows(x, times):
    """Returns each row so many times."""
    return x if times == 1 else jnp.concatenate([x[i // times :][:1] for i in range(times * x.shape[0])], axis=0)
