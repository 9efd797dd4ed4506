"""Several tokens per row of a layer that keeps states, in chunks: products of matrices, the state in vector memory.

XLA cuts rows into chunks and lays their tokens out heads first. An item is a few heads of one chunk: all heads of a
chunk pass, then comes the next one, row after row. A grid step has one stage of each of three items, see `state_chunk`.
A row's states come a step before its first chunk, and leave while the next steps run.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.tpu.pages import SPILL_BYTES, divide, keep_in_hbm, output, vector_bytes
from pallas_kernels.tpu.recurrence.products import CHUNK
from pallas_kernels.tpu.recurrence.state_chunk import STAGES, Stages, padded_rows, run_stages, stage_shapes

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
    total: Any  # i32[1]: how many chunks there are


class ChunkInputs(NamedTuple):
    """What comes for a few heads of a chunk, and the pool, which stays in HBM."""

    q: Any  # [n, H', CHUNK, K]
    k: Any  # as q
    v: Any  # [n, H, CHUNK, V]
    numbers: Any  # f32[n, groups of heads, numbers times padded_rows(heads of a group), CHUNK]: a row for each head
    gates: Any  # f32[n, H, CHUNK, K], logarithms, if by channel, else None
    pool: Any  # [slots, H, ., .]


class ChunkOutputs(NamedTuple):
    """What goes for a few heads of a chunk, and the pool, in the memory that it came in."""

    y: Any  # [n, H, CHUNK, V]
    pool: Any  # [slots, H, ., .]


class ChunkScratch(NamedTuple):
    """What the kernel keeps in vector memory, and the semaphores of the copies to it and from it."""

    states: Any  # of all heads, from chunk to chunk of a row
    stages: Stages
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


def gather_tokens(x: jax.Array, chunks: Chunks) -> jax.Array:
    """Returns `[n, heads, CHUNK, ...]` of tokens `[N, heads, ...]`, 0 where a chunk has none."""
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None]
    found = x[jnp.minimum(chunks.begin[:, None] + place, x.shape[0] - 1)]
    there = (place < chunks.tokens[:, None]).reshape(*found.shape[:2], *[1] * (found.ndim - 2))
    return jnp.swapaxes(jnp.where(there, found, jnp.zeros((), x.dtype)), 1, 2)


def scatter_tokens(y: jax.Array, batch: StateBatch, row: jax.Array, position: jax.Array) -> jax.Array:
    """Returns `[N, heads, ...]` of chunks `[n, heads, CHUNK, ...]`, for tokens of these rows and positions."""
    first, begin = batch.starts // CHUNK, batch.starts
    counts = jnp.where(batch.query_lens > 0, (batch.kv_lens - 1) // CHUNK - first + 1, 0)
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    number = position // CHUNK
    chunk = before[row] + number - first[row]
    lane = position - jnp.maximum(number * CHUNK, begin[row])
    flat = jnp.swapaxes(y, 1, 2).reshape(-1, y.shape[1], *y.shape[3:])
    return flat[jnp.clip(chunk * CHUNK + lane, 0, flat.shape[0] - 1)]


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
    blocks = [(2 * own, CHUNK, depth), (2 * size, CHUNK, width), (2, padded_rows(size), CHUNK)]
    blocks += [(size, CHUNK, depth)] * by_channel
    return (
        # 6.1 MiB were seen, of 16 heads in float32 on a v5p; by channel 8.1.
        (2 * SPILL_BYTES if by_channel else 4 * SPILL_BYTES // 3)
        + stage_shapes(size, own, depth, _digits(exact), by_channel).bytes
        + vector_bytes(states, jnp.float32)
        + 2 * sum(vector_bytes(shape, jnp.float32) for shape in blocks)
    )


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
    numbers: jax.Array,
    states: jax.Array,
    chunks: Chunks,
    dtype: Any,
    *,
    exact: bool = True,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs `[n, H, CHUNK, V]`, undefined where there is no token, and the pool, in its own memory.

    Args:
      has_delta: whether states learn what they lack of values; else they are `[slots, H, V, K]`.
      keys: q and k `[n, H', CHUNK, K]`, 0 where there is no token, as all that follows; if by channel, logarithms of
        gates `[n, H, CHUNK, K]`.
      values: `[n, H, CHUNK, V]`.
      numbers: f32 `[n, m, H, CHUNK]`: logarithms of gates, unless by channel, and with delta beta.
      dtype: of the outputs.
      exact: whether products have all digits of float32; else 16 of its 24 bits, for values that came with 8.
    """
    count, heads, _, width = values.shape
    by_channel = len(keys) > 2
    if by_channel:
        keys = tuple(x.astype(jnp.float32) for x in keys)  # rows of registers are read one by one
    share, (size, own) = heads // keys[0].shape[1], _divide_heads(heads, keys[0].shape[1])
    groups = heads // size
    lines = jnp.moveaxis(numbers.reshape(count, -1, groups, size, CHUNK), 2, 1)  # [n, groups, m, size, CHUNK]
    lines = jnp.pad(lines, [(0, 0)] * 3 + [(0, padded_rows(size) - size), (0, 0)]).reshape(count, groups, -1, CHUNK)

    def blocks(*shape: int, steps: int = 1, late: bool = False) -> pl.BlockSpec:
        """Returns the blocks of the first stage's items, or of the last one's, each for so many of them."""

        def place(chunk: jax.Array, group: jax.Array, scalars: ChunkScalars) -> tuple[Any, ...]:
            if late:
                chunk, group = _last_stage(chunk, group, groups)
            last = scalars.total[0] - 1
            group = jnp.where(chunk > last, groups - 1, jnp.where(chunk < 0, 0, group))  # nothing comes where none is
            return jnp.maximum(jnp.minimum(chunk, last), 0), divide(group, steps), 0, 0

        return pl.BlockSpec((1, *shape), place)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    arrays = (*keys[:2], values, lines, keys[2] if by_channel else None)
    given = jax.tree.leaves(arrays)
    depth = keys[0].shape[-1]
    y = output((count, heads, CHUNK, width), dtype, states, *given)
    of_keys, of_values = blocks(own, CHUNK, depth, steps=max(1, share // size)), blocks(size, CHUNK, width, late=True)
    of_numbers, of_gates = blocks(1, *lines.shape[2:]), blocks(size, CHUNK, depth) if by_channel else None
    scalars = ChunkScalars(chunks.source, chunks.target, chunks.snapshot, chunks.total)
    inputs = ChunkInputs(*arrays, states)
    outputs = ChunkOutputs(y, output(states.shape, states.dtype, states, *given))
    stages = stage_shapes(size, own, depth, _digits(exact), by_channel)
    scratch = ChunkScratch(
        pltpu.VMEM(states.shape[1:], states.dtype),
        jax.tree.map(lambda x: pltpu.VMEM(x.shape, x.dtype), stages),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((groups + 1,)),
    )
    kernel = pl.pallas_call(
        functools.partial(_kernel, size=size, has_delta=has_delta),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count + -(-(STAGES - 1) // groups), groups),
            in_specs=(ChunkInputs(of_keys, of_keys, of_values, of_numbers, of_gates, hbm),),
            out_specs=(ChunkOutputs(of_values, hbm),),
            scratch_shapes=(scratch,),
        ),
        out_shape=(outputs,),
        input_output_aliases={len(scalars) + len(given): 1},  # the pools
        cost_estimate=pl.CostEstimate(
            flops=8 * count * heads * CHUNK * depth * width,
            transcendentals=count * heads * CHUNK * CHUNK,
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
    )

    @jax.custom_batching.sequential_vmap
    def run(scalars: ChunkScalars, inputs: ChunkInputs) -> ChunkOutputs:
        (outputs,) = kernel(scalars, inputs._replace(pool=keep_in_hbm(inputs.pool, interpret)))
        return outputs

    return run(scalars, inputs)


def _last_stage(chunk, group, groups):
    """Returns the chunk, and its heads, whose last stage is run when those have their first."""
    for _ in range(STAGES - 1):
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
    sources, targets, snapshots, total = scalars
    states, stages, coming, leaving = scratch
    groups = states.shape[0] // size
    number = pl.program_id(0) * groups + pl.program_id(1)
    chunk, group = _last_stage(pl.program_id(0), pl.program_id(1), groups)

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

    @pl.when(number < total[0] * groups + STAGES - 1)
    def _():
        place, is_chunk = jnp.maximum(chunk, 0), chunk >= 0
        source, target, snapshot = sources[place], targets[place], snapshots[place]

        @pl.when((source != -2) | (target != -2))
        def _():  # a row begins, or may begin with the item that follows, as with the first of all
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

        # The first steps have no items in the last stages: these compute what nobody reads.
        run_stages(inputs, outputs.y, states, group * size, stages.slot(number & 1), has_delta)

        @pl.when(is_chunk & (snapshot >= 0))
        def _():
            copy = departure(snapshot, group, leaving.at[groups])
            copy.start()
            copy.wait()

        @pl.when(is_chunk & (target >= 0))
        def _():
            departure(target, group, leaving.at[group]).start()

            @pl.when(number == total[0] * groups + STAGES - 2)
            def _():
                for each in range(groups):
                    departure(target, each, leaving.at[each]).wait()
