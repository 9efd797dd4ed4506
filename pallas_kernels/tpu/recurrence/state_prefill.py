"""Several tokens per row of a layer that keeps states, in chunks: products of matrices, the state in vector memory.

XLA lists the chunks of rows; their tokens come as they lie, see `chunk_tokens`. An item is a few heads of one chunk:
all heads of a chunk pass, then comes the next one, row after row. A grid step has one stage of each of three items, see
`state_chunk`. A row's states come a step before its first chunk, and leave while the next steps run.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.tpu.pages import LANES, SPILL_BYTES, keep_in_hbm, output, output_in_hbm, vector_bytes
from pallas_kernels.tpu.recurrence.chunk_tokens import (
    FIRST,
    LAST,
    OUTPUTS,
    ChunkTokens,
    Transport,
    divide_heads,
    join_heads,
    lines_shape,
    pack_numbers,
)
from pallas_kernels.tpu.recurrence.products import CHUNK
from pallas_kernels.tpu.recurrence.state_chunk import STAGES, Stages, padded_rows, run_stages, spread_keys, stage_shapes

HEADS = 16  # of a grid step, at most


class Chunks(NamedTuple):
    """The chunks of a step's rows, one row after another: i32[n] each."""

    row: jax.Array
    begin: jax.Array  # the first token's place in the flattened tokens
    tokens: jax.Array  # how many; 0: there is no such chunk
    source: jax.Array  # the slot whose state the chunk goes on from; -1: none, it begins; -2: the chunk before
    target: jax.Array  # the slot that takes the state after it; -1: none, -2: the chunk that follows
    snapshot: jax.Array  # a second one; -1: none
    total: jax.Array  # i32[1]: how many there are


class ChunkScalars(NamedTuple):
    """What to do with each chunk: arrays, and references to them in scalar memory."""

    sources: Any  # i32[n]: the slots that `Chunks` says, and those that follow
    targets: Any  # i32[n]
    snapshots: Any  # i32[n]
    begins: Any  # i32[n]: the places of their tokens
    counts: Any  # i32[n]: how many these are
    total: Any  # i32[1]: how many chunks there are
    steady: Any  # of `find_steady_steps`
    scale: Any  # f32[1]: of queries; None: 1


class ChunkInputs(NamedTuple):
    """What stays in HBM."""

    tokens: ChunkTokens
    pool: Any  # [slots, H, ., .]


class ChunkOutputs(NamedTuple):
    """What goes, and the pool, in the memory that it came in."""

    y: Any  # as `ChunkTokens` has it
    pool: Any  # [slots, H, ., .]


class ChunkScratch(NamedTuple):
    """What the kernel keeps in vector memory, and the semaphores of the copies to it and from it."""

    states: Any  # of all heads, from chunk to chunk of a row
    stages: Stages
    tokens: ChunkTokens  # of two items by turns
    lines: ChunkTokens  # the words of heads; None: of numbers and outputs
    moved: Any  # [3, 2]: tokens for the first stage, for the last one, and outputs; of items by turns
    coming: Any  # [2], of items by turns
    leaving: Any  # [groups of heads + 1]: the last is the snapshots'


def list_chunks(batch: StateBatch, num_tokens: int, num_slots: int) -> Chunks:
    """Returns rows cut at multiples of `CHUNK` of their positions, so that snapshots are at the ends of chunks."""
    assert batch.query_starts is not None
    rows = batch.query_lens.shape[0]
    first, last = batch.starts // CHUNK, (batch.kv_lens - 1) // CHUNK
    counts = jnp.where(batch.query_lens > 0, last - first + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(min(num_tokens, num_tokens // CHUNK + 2 * rows), dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(index[:, None] >= ends[None], axis=1, dtype=jnp.int32), rows - 1)
    number = index - (ends - counts)[row]
    there = index < ends[-1]
    start = batch.starts[row]
    begin = jnp.maximum((first[row] + number) * CHUNK, start)
    end = jnp.minimum((first[row] + number + 1) * CHUNK, batch.kv_lens[row])
    source = jnp.where(batch.begins, -1, jnp.clip(batch.slots, 0, num_slots - 1))
    targets = batch.targets(num_slots)
    snapshot = jnp.full(index.shape, num_slots, jnp.int32)
    if batch.snapshot_slots is not None:
        assert batch.every is not None
        own = batch._replace(snapshot_slots=batch.snapshot_slots[row])
        snapshot = own.snapshot_targets(
            end // batch.every - start // batch.every - 1, there & (end % batch.every == 0), num_slots
        )
    target, snapshot = (jnp.where(x < num_slots, x, -1) for x in (targets[row], snapshot))
    return Chunks(
        row,
        batch.query_starts[row] + begin - start,
        jnp.where(there, end - begin, 0),
        jnp.where(number == 0, source[row], -2),
        jnp.where(there & (number == counts[row] - 1), target, -2),
        snapshot,
        ends[-1:],
    )


def find_steady_steps(chunks: Chunks, groups: int) -> jax.Array:
    """Returns i32[n + STAGES - 1]: 1 for the grid steps that have to do with chunks in the middle of their rows only,
    from the one whose outputs they await to the one that follows. These are whole, and nothing begins or ends."""
    is_middle = (chunks.source == -2) & (chunks.target == -2) & (chunks.snapshot == -1)
    before, steps = -(-(STAGES + 1) // groups), is_middle.shape[0] + STAGES - 1
    is_middle = jnp.pad(is_middle, (before, STAGES))
    return functools.reduce(jnp.logical_and, [is_middle[i : i + steps] for i in range(before + 2)]).astype(jnp.int32)


def heads_of_step(heads: int, share: int) -> int:
    """Returns how many heads a grid step takes: all that share keys, or a part of them."""
    return max(n for n in range(1, HEADS + 1) if not heads % n and (not n % share or not share % n))


def state_prefill_bytes(
    keys: tuple[int, ...], values: tuple[int, ...], states: tuple[int, ...], exact: bool, by_channel: bool
) -> int:
    """Returns what the kernel takes of vector memory.

    Args:
      keys: shapes of one token's or one chunk's keys, heads first and widths last; as the other ones.
    """
    (few, *_, depth), (heads, *_, width) = keys, values
    size, own = _divide_heads(heads, few)
    buffers = _buffers(size, own, depth, width, by_channel)
    return (
        # 6.1 MiB were seen, of 16 heads in float32 on a v5p; by channel 8.1.
        (2 * SPILL_BYTES if by_channel else 4 * SPILL_BYTES // 3)
        + stage_shapes(size, own, depth, _digits(exact), by_channel).bytes
        + vector_bytes(states, jnp.float32)
        + sum(vector_bytes(x.shape, x.dtype) for x in jax.tree.leaves((buffers, _lines(buffers))))
    )


def _buffers(
    size: int, own: int, depth: int, width: int, by_channel: bool, dtypes: tuple[Any, ...] = (jnp.float32,) * 4
) -> ChunkTokens:
    """Returns the shapes of two items' tokens.

    Args:
      size, own: heads of values and of keys.
      depth, width: theirs.
      dtypes: of q, k, v and y.
    """
    q, k, v, y = dtypes

    def shape(heads, lanes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((2, CHUNK, heads, lanes), dtype)

    gates = shape(size, depth) if by_channel else None
    return ChunkTokens(
        shape(own, depth, q), shape(own, depth, k), gates, shape(1, LANES), shape(size, width, v), shape(size, width, y)
    )


def _lines(buffers: ChunkTokens) -> ChunkTokens:
    """Returns the shapes of the words of an item's heads, of what is read by them."""
    return jax.tree.map(lambda x: lines_shape(x.shape, x.dtype), buffers._replace(numbers=None, y=None))


def _divide_heads(heads: int, keys: int) -> tuple[int, int]:
    """Returns how many heads, and how many of their keys, an item has."""
    size = heads_of_step(heads, heads // keys)
    return size, max(1, size * keys // heads)


def _digits(exact: bool) -> int:
    return 3 if exact else 2


def prefill_states(
    has_delta: bool,
    keys: tuple[jax.Array, ...],
    values: jax.Array,
    numbers: list[jax.Array],
    scale: float | jax.Array | None,
    states: jax.Array,
    chunks: Chunks,
    dtype: Any,
    *,
    exact: bool = True,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs `[N, H, V]`, undefined for tokens of no chunk, and the pool, in its own memory.

    Args:
      has_delta: whether states learn what they lack of values; else they are `[slots, H, V, K]`.
      keys: q and k `[N, H', K]`; if by channel, logarithms of gates `[N, H, K]`.
      values: `[N, H, V]`.
      numbers: `[N, H]` each: logarithms of gates, unless by channel, and with delta beta.
      scale: of queries; None: 1.
      dtype: of the outputs.
      exact: whether products have all digits of float32; else 16 of its 24 bits, for values that came with 8.
    """
    (count, heads, width), depth, by_channel = values.shape, keys[0].shape[2], len(keys) > 2
    size, own = _divide_heads(heads, keys[0].shape[1])
    groups = heads // size
    lines = pack_numbers(numbers, size, padded_rows(size))
    q, k, *gates = (divide_heads(x, n) for x, n in zip(keys, (own, own, size), strict=False))
    tokens = ChunkTokens(q, k, *gates or [None], lines, divide_heads(values, size))
    given, hbm = jax.tree.leaves(tokens), pl.BlockSpec(memory_space=pltpu.HBM)
    scale = None if scale is None else jnp.asarray(scale, jnp.float32).reshape(1)
    scalars = ChunkScalars(
        chunks.source,
        chunks.target,
        chunks.snapshot,
        chunks.begin,
        chunks.tokens,
        chunks.total,
        find_steady_steps(chunks, groups),
        scale,
    )
    outputs = ChunkOutputs(
        output(tokens.v.shape, dtype, states, *given), output(states.shape, states.dtype, states, *given)
    )
    stages = stage_shapes(size, own, depth, _digits(exact), by_channel)
    buffers = _buffers(size, own, depth, width, by_channel, (q.dtype, k.dtype, values.dtype, jnp.dtype(dtype)))
    scratch = ChunkScratch(
        pltpu.VMEM(states.shape[1:], states.dtype),
        *(
            jax.tree.map(lambda x: pltpu.VMEM(x.shape, x.dtype), shapes)
            for shapes in (stages, buffers, _lines(buffers))
        ),
        pltpu.SemaphoreType.DMA((3, 2)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((groups + 1,)),
    )

    @jax.custom_batching.sequential_vmap
    def run(scalars: ChunkScalars, inputs: ChunkInputs) -> ChunkOutputs:
        # From vector memory a copy would be a loop, a register a turn.
        inputs = jax.tree.map(functools.partial(keep_in_hbm, interpret=interpret), inputs)
        (found,) = pl.pallas_call(
            functools.partial(_kernel, size=size, has_delta=has_delta),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(scalars.total[0] + -(-(STAGES - 1) // groups), groups),
                in_specs=(jax.tree.map(lambda _: hbm, inputs),),
                out_specs=(ChunkOutputs(hbm, hbm),),
                scratch_shapes=(scratch,),
            ),
            out_shape=(outputs._replace(y=output_in_hbm(outputs.y, interpret)),),
            input_output_aliases={len(jax.tree.leaves(scalars)) + len(given): 1},  # the pools
            cost_estimate=pl.CostEstimate(
                flops=8 * count * heads * depth * width,
                transcendentals=count * heads * CHUNK,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*given, values)),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",) * 2,
                disable_bounds_checks=True,
                disable_semaphore_checks=True,
                vmem_limit_bytes=state_prefill_bytes(
                    keys[0].shape[1:], values.shape[1:], states.shape[1:], exact, by_channel
                ),
            ),
            interpret=interpret,
            name="state_prefill",
        )(scalars, inputs)
        return found

    found = run(scalars, ChunkInputs(tokens, states))
    return join_heads(found.y, values.shape), found.pool


def _before(chunk, group, groups, items):
    """Returns the chunk, and its heads, of the item so many items before."""
    for _ in range(items):
        chunk, group = jnp.where(group == 0, chunk - 1, chunk), jnp.where(group == 0, groups - 1, group - 1)
    return chunk, group


def _next(chunk, group, groups):
    """Returns the chunk, and its heads, of the item that follows."""
    last = group == groups - 1
    return jnp.where(last, chunk + 1, chunk), jnp.where(last, 0, group + 1)


def _kernel(
    scalars: ChunkScalars,
    inputs: ChunkInputs,
    outputs: ChunkOutputs,
    scratch: ChunkScratch,
    *,
    size: int,
    has_delta: bool,
):
    sources, targets, snapshots, total = *scalars[:3], scalars.total
    states, stages, buffers, lines, moved, coming, leaving = scratch
    groups = states.shape[0] // size
    first = pl.program_id(0), pl.program_id(1)
    number = first[0] * groups + first[1]
    last = chunk, group = _before(*first, groups, STAGES - 1)
    transport = Transport(inputs.tokens._replace(y=outputs.y), buffers, lines, moved, scalars, groups)

    def arrival(slot, group, turn):
        heads = pl.ds(group * size, size)
        return pltpu.make_async_copy(outputs.pool.at[slot, heads], states.at[heads], coming.at[turn & 1])

    def departure(slot, group, sent):
        heads = pl.ds(group * size, size)
        return pltpu.make_async_copy(states.at[heads], outputs.pool.at[slot, heads], sent)

    def make_room(chunk, group):
        """Awaits that the states of the row before have left."""
        target = targets[jnp.maximum(chunk - 1, 0)]
        pl.when((chunk > 0) & (target >= 0))(lambda: departure(target, group, leaving.at[group]).wait())

    is_last = number == total[0] * groups + STAGES - 2
    following = _next(*first, groups)
    # Of the item whose last stage follows, and of the one whose outputs go to where this step's come from.
    coming_last, sent = _before(*first, groups, STAGES - 2), _before(*last, groups, 2)
    is_steady = scalars.steady[first[0]] == 1

    def begin_rows():
        """Brings states, where a row begins, or may begin with the item that follows, as with the first of all."""
        place, is_chunk = jnp.maximum(chunk, 0), chunk >= 0
        source, target = sources[place], targets[place]

        @pl.when((source != -2) | (target != -2))
        def _():
            # States come a step before they change, unless those of the same heads change there.
            begins, heads, turn = (chunk, group, number) if groups == 1 else (*_next(chunk, group, groups), number + 1)
            there = (begins >= 0) & (begins < total[0])
            awaited = jnp.where(there, sources[jnp.where(there, begins, 0)], -2)

            @pl.when(awaited >= 0)
            def _():
                make_room(begins, heads)
                arrival(awaited, heads, turn).start()

            pl.when(is_chunk & (source >= 0))(lambda: arrival(source, group, number).wait())

            @pl.when(is_chunk & (source == -1))
            def _():
                make_room(chunk, group)
                states[pl.ds(group * size, size)] = jnp.zeros((size, *states.shape[1:]), states.dtype)

    def end_rows():
        """Sends states, where a row ends or leaves a snapshot, and awaits what leaves last."""
        place, is_chunk = jnp.maximum(chunk, 0), chunk >= 0
        target, snapshot = targets[place], snapshots[place]

        @pl.when(is_chunk & (snapshot >= 0))
        def _():
            copy = departure(snapshot, group, leaving.at[groups])
            copy.start()
            copy.wait()

        @pl.when(is_chunk & (target >= 0))
        def _():
            departure(target, group, leaving.at[group]).start()

            @pl.when(is_last)
            def _():  # by a loop, so that the compiler branches around all of this: else each step would decide it
                lax.fori_loop(0, groups, lambda each, _: departure(target, each, leaving.at[each]).wait(), None)

        @pl.when(is_last)
        def _():
            transport.move("wait", OUTPUTS, _before(*last, groups, 1), number - 1)
            transport.move("wait", OUTPUTS, last, number)

    @pl.when(number < total[0] * groups + STAGES - 1)
    def _():
        @pl.when(~is_steady)
        def _():
            @pl.when(number == 0)
            def _():
                transport.move("start", FIRST, first, number)
                transport.move("start", FIRST, following, number + 1)
                transport.bring(FIRST, first, number)
                spread_keys(transport.find(number), stages)
                transport.move("start", FIRST, _next(*following, groups), number)
                transport.move("start", LAST, first, number)

            transport.bring(FIRST, following, number + 1)
            transport.bring(LAST, coming_last, number - STAGES + 2)
            transport.move("wait", OUTPUTS, sent, number)
            begin_rows()

        @pl.when(is_steady)
        def _():
            transport.await_whole(FIRST, following, number + 1)
            transport.await_whole(LAST, coming_last, number - STAGES + 2)
            transport.await_whole(OUTPUTS, sent, number)

        # The first steps have no items in the last stages: these compute what nobody reads.
        tokens = transport.find(number), transport.find(number + 1)
        run_stages(*tokens, states, group * size, stages.slot(number & 1), scalars.scale, has_delta)
        # Tokens come to where others have just been read. All of it is decided while the last products are awaited.
        transport.move("start", FIRST, _next(*_next(*following, groups), groups), number + 1)
        transport.move("start", LAST, following, number + 1)
        transport.move("start", OUTPUTS, last, number)
        pl.when(~is_steady)(end_rows)
