"""Several tokens per row of a layer that keeps states, in chunks: products of matrices, the state in vector memory.

XLA cuts rows into chunks and lays their tokens out heads first. A grid step takes a few heads of one chunk: all chunks
of all rows pass, row after row, then come the next heads. A row's states come with its first chunk and leave with its
last.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.tpu.pages import LANES, SPILL_BYTES, keep_in_hbm, output, vector_bytes
from pallas_kernels.tpu.state_decode import split

CHUNK = 64  # tokens, a power of two
BLOCK = 16  # of a triangle's rows, which are substituted one after another; larger blocks are joined by products
HEADS = 8  # of a grid step, at most
_MINOR, _INNER, _OUTER = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))


class Chunks(NamedTuple):
    """The chunks of a step's rows, one row after another: i32[n] each."""

    row: jax.Array
    begin: jax.Array  # the first token's place in the flattened tokens
    tokens: jax.Array  # how many; 0: there is no such chunk
    source: jax.Array  # the slot whose state the chunk goes on from; -1: none, it begins; -2: the chunk before
    target: jax.Array  # the slot that takes the state after it; -1: none
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
    numbers: Any  # f32[n, groups of heads, CHUNK, heads of a group times numbers]: a head's stand together
    pool: Any  # [slots, H, ., .]


class ChunkOutputs(NamedTuple):
    """What goes for a few heads of a chunk, and the pool, in the memory that it came in."""

    y: Any  # [n, H, CHUNK, V]
    pool: Any  # [slots, H, ., .]


class ChunkScratch(NamedTuple):
    """What the kernel keeps in vector memory, and the semaphore of the copies to it and from it."""

    states: Any  # of a few heads, from chunk to chunk of a row
    moved: Any  # the semaphore


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
    target = jnp.where(there & (number == counts[row] - 1), targets[row], num_slots)
    target, snapshot = (jnp.where(x < num_slots, x, -1) for x in (target, snapshot))
    return Chunks(
        row,
        batch.query_starts[row] + begin - start,
        jnp.where(there, end - begin, 0),
        jnp.where(number == 0, source[row], -2),
        target,
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


def prefill_states(
    has_delta: bool,
    keys: tuple[jax.Array, jax.Array],
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
      keys: q and k `[n, H', CHUNK, K]`, 0 where there is no token, as all that follows.
      values: `[n, H, CHUNK, V]`.
      numbers: f32 `[n, m, H, CHUNK]`: logarithms of gates, and with delta beta.
      dtype: of the outputs.
      exact: whether products have all digits of float32; else 16 of its 24 bits, for values that came with 8.
    """
    count, heads, _, width = values.shape
    share, size = heads // keys[0].shape[1], heads_of_step(heads, heads // keys[0].shape[1])
    groups, own = heads // size, max(1, size // share)
    columns = jnp.moveaxis(numbers.reshape(count, -1, groups, size, CHUNK), 1, 3)  # [n, groups, size, m, CHUNK]
    columns = jnp.swapaxes(columns.reshape(count, groups, -1, CHUNK), 2, 3)

    def place(chunk: jax.Array, scalars: ChunkScalars) -> jax.Array:
        return jnp.maximum(jnp.minimum(chunk, scalars.total[0] - 1), 0)

    def per_chunk(few: int, lanes: int, steps: int = 1) -> pl.BlockSpec:
        """Returns the blocks of a few heads, which so many grid steps read."""
        return pl.BlockSpec(
            (1, few, CHUNK, lanes),
            lambda group, chunk, scalars: (place(chunk, scalars), lax.div(group, jnp.int32(steps)), 0, 0),
        )

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    arrays = (*keys, values, columns)
    depth = keys[0].shape[-1]
    y = output((count, heads, CHUNK, width), dtype, states, *arrays)
    of_keys, of_values = per_chunk(own, depth, max(1, share // size)), per_chunk(size, width)
    of_numbers = per_chunk(1, columns.shape[-1])
    scalars = ChunkScalars(chunks.source, chunks.target, chunks.snapshot, chunks.total)
    inputs = ChunkInputs(*arrays, states)
    outputs = ChunkOutputs(y, output(states.shape, states.dtype, states, *arrays))
    scratch = ChunkScratch(pltpu.VMEM((size, *states.shape[2:]), states.dtype), pltpu.SemaphoreType.DMA(()))
    need = (
        SPILL_BYTES
        + vector_bytes((size, *states.shape[2:]), states.dtype)
        + 2
        * sum(
            vector_bytes((n, CHUNK, lanes), jnp.float32)
            for n, lanes in ((2 * own, depth), (2 * size, width), (1, LANES))
        )
    )
    kernel = pl.pallas_call(
        functools.partial(_kernel, has_delta=has_delta, exact=exact),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups, count),
            in_specs=(ChunkInputs(of_keys, of_keys, of_values, of_numbers, hbm),),
            out_specs=(ChunkOutputs(of_values, hbm),),
            scratch_shapes=(scratch,),
        ),
        out_shape=(outputs,),
        input_output_aliases={len(scalars) + len(arrays): 1},  # the pools
        cost_estimate=pl.CostEstimate(
            flops=8 * count * heads * CHUNK * depth * width,
            transcendentals=count * heads * CHUNK * CHUNK,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, values)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 2,
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=need,
        ),
        interpret=interpret,
        name="state_prefill",
    )

    @jax.custom_batching.sequential_vmap
    def run(scalars: ChunkScalars, inputs: ChunkInputs) -> ChunkOutputs:
        (outputs,) = kernel(scalars, inputs._replace(pool=keep_in_hbm(inputs.pool, interpret)))
        return outputs

    return run(scalars, inputs)


def _kernel(
    scalars: ChunkScalars,
    inputs: ChunkInputs,
    outputs: ChunkOutputs,
    scratch: ChunkScratch,
    *,
    has_delta: bool,
    exact: bool,
):
    sources, targets, snapshots, total = scalars
    states, moved = scratch
    group, chunk = pl.program_id(0), pl.program_id(1)
    size = states.shape[0]

    def move(slot, comes):
        there = outputs.pool.at[slot, pl.ds(group * size, size)]
        copy = pltpu.make_async_copy(*((there, states) if comes else (states, there)), moved)
        copy.start()
        copy.wait()

    @pl.when(chunk < total[0])
    def _():
        source, target, snapshot = sources[chunk], targets[chunk], snapshots[chunk]
        pl.when(source >= 0)(lambda: move(source, True))

        @pl.when(source == -1)
        def _():
            states[...] = jnp.zeros_like(states)

        _run_chunk(inputs, outputs.y, states, has_delta, functools.partial(multiply, exact=exact))
        pl.when(target >= 0)(lambda: move(target, False))
        pl.when(snapshot >= 0)(lambda: move(snapshot, False))


def _run_chunk(inputs: ChunkInputs, y_ref, states, has_delta, matmul):
    """Computes a few heads' outputs and states; the sums are those of `xla.recurrence.run_chunk`. All heads take each
    step together, for each waits long for the one before."""
    q_ref, k_ref, v_ref, numbers_ref, _ = inputs
    size, own = states.shape[0], k_ref.shape[1]
    heads, numbers = range(size), numbers_ref[0, 0]
    each = numbers.shape[1] // size
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), i) for i in range(2))
    till = (column <= row).astype(jnp.float32)
    steps = jnp.concatenate([till, (column > row).astype(jnp.float32)], axis=0)

    def spread(number):
        return [jnp.broadcast_to(numbers[:, i : i + 1], (CHUNK, LANES)) for i in range(number, numbers.shape[1], each)]

    queries, keys = ([x[0, i].astype(jnp.float32) for i in range(own)] for x in (q_ref, k_ref))
    both = [jnp.concatenate(x, axis=0) if has_delta else x[1] for x in zip(keys, queries, strict=True)]
    products = [matmul(x, k, _MINOR) for x, k in zip(both, keys, strict=True)]
    both, products, keys = ([x[head // (size // own)] for head in heads] for x in (both, products, keys))
    # Sums of gates by themselves: differences of sums lose digits.
    gates = spread(0)
    sums = [sum_exactly(steps, gate) for gate in gates]
    between = [sum_exactly(till, jnp.where(row > column, gate[:, :CHUNK], 0.0)) for gate in gates]
    between = [jnp.where(column <= row, jnp.exp(x), 0.0) for x in between]
    since_start, till_end = ([jnp.exp(x[part]) for x in sums] for part in (slice(0, CHUNK), slice(CHUNK, None)))
    wide = [_widen(x, keys[0].shape[1]) for x in since_start]
    read = [
        x * (jnp.concatenate([gate] * 2, axis=0) if has_delta else gate) for x, gate in zip(both, wide, strict=True)
    ]
    found = [matmul(read[head], states[head], _INNER if has_delta else _MINOR) for head in heads]
    u = [v_ref[0, head].astype(jnp.float32) for head in heads]
    if has_delta:
        beta = spread(1)
        lower = [
            jnp.where(column < row, products[i][:CHUNK] * between[i] * beta[i][:, :CHUNK], 0.0) for i in heads
        ]  # fmt: skip
        wanted = [_widen(beta[i], u[i].shape[1]) * (u[i] - found[i][:CHUNK]) for i in heads]
        u = [matmul(*x, _INNER) for x in zip(_invert(lower, row, column, matmul), wanted, strict=True)]
    inner = [matmul(products[i][-CHUNK:] * between[i], u[i], _INNER) for i in heads]
    gone = [keys[i] * _widen(till_end[i], keys[i].shape[1]) for i in heads]
    added = [matmul(gone[i], u[i], _OUTER) if has_delta else matmul(u[i], gone[i], _OUTER) for i in heads]
    for i in heads:
        y_ref[0, i] = (found[i][-CHUNK:] + inner[i]).astype(y_ref.dtype)
        states[i] = states[i] * _widen(since_start[i][CHUNK - 1 :], states.shape[2]) + added[i]


def _widen(x, width):
    """Returns `x [., LANES]`, the same in all lanes, `width` lanes wide."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def multiply(a, b, contract, exact):
    """Returns a product in float32: of all its digits, which takes six products of bfloat16; else of the three that
    have its first 16 bits."""
    dimensions = contract, ((), ())
    if exact:
        return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    (a, a_rest), (b, b_rest) = ([part.astype(jnp.bfloat16) for part in split(x)[:2]] for x in (a, b))
    pairs = ((a, b), (a, b_rest), (a_rest, b))
    return sum(lax.dot_general(*pair, dimensions, preferred_element_type=jnp.float32) for pair in pairs)


def sum_exactly(ones, x):
    """Returns the product of ones and zeros and `x`, of which the parts are products of bfloat16."""
    ones = ones.astype(jnp.bfloat16)
    parts = [part.astype(jnp.bfloat16) for part in split(x)]
    return sum(lax.dot_general(ones, part, (_INNER, ((), ())), preferred_element_type=jnp.float32) for part in parts)


def _invert(lower, row, column, matmul):
    """Returns the inverses of `I + lower`, strictly lower triangles: of blocks of the diagonal, then of pairs of them.
    Powers of `lower`, which are as fast, overflow where keys repeat."""
    inverse = _invert_blocks(lower, row, column)
    for bit in range(BLOCK.bit_length() - 1, CHUNK.bit_length() - 1):
        between = [jnp.where(((row ^ column) >> bit) == 1, x, 0.0) for x in lower]
        joined = [matmul(*x, _INNER) for x in zip(between, inverse, strict=True)]
        inverse = [x - matmul(x, y, _INNER) for x, y in zip(inverse, joined, strict=True)]
    return inverse


def _invert_blocks(lower, row, column):
    """Returns the inverses of the blocks on the diagonals of `I + lower`, 0 beside them, a row at a time.

    All blocks of a head lie side by side, a block's columns in lanes of their own, and two heads fill a register's.
    """
    place, lane = (lax.broadcasted_iota(jnp.int32, (BLOCK, 2 * CHUNK), i) for i in range(2))
    own = lane[:, :CHUNK] // BLOCK
    heads = [
        sum(jnp.where(own == i, x[i * BLOCK : (i + 1) * BLOCK], 0.0) for i in range(CHUNK // BLOCK)) for x in lower
    ]
    heads += heads[-1:] * (len(heads) % 2)
    pairs = [jnp.concatenate(x, axis=1) for x in zip(heads[::2], heads[1::2], strict=True)]
    inverse = [jnp.where(place == lane % BLOCK, 1.0, 0.0) for _ in pairs]
    for i in range(BLOCK - 1):
        factors = [jnp.take_along_axis(x, lane - lane % BLOCK + i, axis=1, mode="promise_in_bounds") for x in pairs]
        inverse = [x - factor * x[i : i + 1] for x, factor in zip(inverse, factors, strict=True)]
    halves = [x[:, half * CHUNK : (half + 1) * CHUNK] for x in inverse for half in range(2)]
    is_block = row // BLOCK == column // BLOCK
    return [jnp.where(is_block, jnp.concatenate([x] * (CHUNK // BLOCK), axis=0), 0.0) for x in halves[: len(lower)]]
