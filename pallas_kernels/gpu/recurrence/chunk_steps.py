"""What kernels of chunks share: the walk over a row's chunks, their inputs, and products of numbers in halves.

All is float32. What the matrix unit takes in 16 bits is either an input, which has no more, or it comes in two halves,
a number's 8 leading bits and the 8 behind them.

Chunks begin at multiples of 64 of a row's positions, so that snapshots are at the end of one. A chunk may have fewer
tokens: what stands in the others' places is selected away, never multiplied by zero.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import products
from pallas_kernels.gpu.products import Pair
from pallas_kernels.gpu.recurrence.rows import (
    BEGIN,
    BEGINS,
    CHUNK,
    COUNT,
    NEXT,
    POSITION,
    SOURCE,
    TARGET,
    TURNS,
    count_chunks,
    find_edge,
    write_snapshot,
)
from pallas_kernels.gpu.tiles import (
    LAYOUT,
    OPERAND,
    SINGLE_ROWS,
    SINGLE_ROWS_32,
    InterpretParams,
    anew,
    full,
    store,
)

WIDTH = 64  # values of a state in a thread block
PIECE = 64  # keys at once, for the registers' sake
MOST_KEYS = 128  # for the registers' sake
LEAST_GATE = -30.0  # of a token, in logarithms: sums over a chunk keep more digits, and no state is seen through it
SQUARE = CHUNK, CHUNK
ROW, COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)

State = tuple[jax.Array, ...]  # of some values of a head: in pieces, if those take fewer registers


def operand(*shape: int):
    """Shared memory for an operand of the matrix unit."""
    return plgpu.SMEM((1, *shape), jnp.bfloat16, transforms=OPERAND)


def landing(*shape: int, dtype: Any = jnp.bfloat16):
    """Shared memory for bulk copies that begin at any token: 64 columns, or several such pieces.

    A piece is a buffer of its own, no slice of a wider one: a load swizzles by the place in what it is given, a bulk
    copy by the address, and only at multiples of 1,024 bytes are these one.
    """
    return plgpu.SMEM((1, *shape), dtype, transforms=SINGLE_ROWS if dtype == jnp.bfloat16 else SINGLE_ROWS_32)


def hold_zero(zero_ref: Any) -> None:
    """Puts a zero where no compiler knows it: what is derived from it, read anew each time, is derived where this
    stands. Else addresses, masks and the matrix unit's descriptors are all derived ahead, and kept in registers that
    there are not: an optimization barrier hides a number from LLVM, but not from the assembler behind it."""
    zero_ref[0] = jnp.int32(0)
    plgpu.commit_smem()


def locate_buffers(buffers: Any, zero_ref: Any) -> Any:
    """Returns the buffers, such that addresses in them are derived where this stands: see `hold_zero`."""
    nothing = zero_ref[0]
    return jax.tree.map(lambda ref: ref.at[nothing], buffers, is_leaf=lambda x: not isinstance(x, tuple))


def split_keys(keys: int) -> list[Any]:
    """Returns the pieces of a head's keys."""
    return [pl.ds(first, PIECE) for first in range(0, keys, PIECE)]


def lines(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns one number of each row, along all columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns one number of each column, along all rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def index(shape: tuple[int, int], axis: int) -> jax.Array:
    """Returns each element's row or column."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)


def pair_tokens(zero_ref: Any) -> tuple[jax.Array, jax.Array]:
    """Returns each element's row and column of a square, derived where this stands: see `hold_zero`."""
    nothing = zero_ref[0]
    row, column = (plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout) + nothing for layout in (ROW, COLUMN))
    return lines(row, SQUARE), columns(column, SQUARE)


def see_tokens(zero_ref: Any) -> jax.Array:
    """Returns which tokens each sees, of those in its chunk."""
    row, column = pair_tokens(zero_ref)
    return column <= row


def pad_numbers(x: jax.Array) -> jax.Array:
    """Returns numbers of tokens, `[N, H]`, as `load_numbers` takes them: `f32[H, 2, N + 64]`, or one more for an even
    length. Whole chunks are read of them, by no bulk copy, which would stop at the end.

    Threads load two numbers at once, at even places, and a chunk begins at any token: so all are there once more, one
    place earlier.
    """
    length = x.shape[0] + CHUNK + x.shape[0] % 2
    x = jnp.pad(x.astype(jnp.float32).T, ((0, 0), (0, length + 1 - x.shape[0])))
    return jnp.stack([x[:, :-1], x[:, 1:]], axis=1)


def load_numbers(ref: Any, token: jax.Array, count: jax.Array, layout: Any) -> jax.Array:
    """Loads one number of each token of a chunk that begins at `token`, and 0 beyond its last token.

    Args:
      ref: a head's numbers, of `pad_numbers`.
    """
    here = (token & 1, pl.ds(token & -2, CHUNK)) if layout == COLUMN else (0, pl.ds(token, CHUNK))
    x = plgpu.load(ref.at[here], layout=layout, optimized=False)
    place = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
    return jnp.where(place < count, x, jnp.zeros_like(x))


def load_tokens(source: Any, count: jax.Array) -> jax.Array:
    """Loads a piece of a chunk's inputs that landed. What is beyond its last token becomes 0."""
    x = plgpu.load(source, layout=LAYOUT, optimized=False)
    return jnp.where(index(x.shape, 0) < count, x, jnp.zeros_like(x))


def load_values(source: Any, count: jax.Array) -> jax.Array:
    """Loads a chunk's values that landed, tokens across. What is beyond its last token becomes 0."""
    v = plgpu.load(source.T, layout=LAYOUT, optimized=False)
    return jnp.where(index(SQUARE, 1) < count, v, jnp.zeros_like(v)).astype(jnp.float32)


def lay_out(source: Any, target: Any, count: jax.Array) -> None:
    """Moves a chunk's inputs, in pieces, to where the matrix unit reads them, as tiles: a chunk begins at any token,
    and bulk copies of tiles at multiples of 8."""
    for nth, piece in enumerate(split_keys(target.shape[1])):
        target.at[:, piece][...] = load_tokens(source.at[nth], count)


def multiply(interpret: InterpretParams, shape: tuple[int, int], *pairs: Pair) -> jax.Array:
    """Returns the sum of products of operands' pairs. See `multiply_while` for why what follows begins `anew`."""
    return anew(products.multiply(interpret, shape, *pairs))


def multiply_while(
    meanwhile: Callable[[], Any], interpret: InterpretParams, shape: tuple[int, int], *pairs: Pair
) -> tuple[jax.Array, Any]:
    """Returns the sum of products, and what is computed while the matrix unit is at them.

    LLVM would put a first step of what follows, a change of sign, before the wait; and an assembler that sees one there
    waits for each of the products. So what follows begins `anew`.
    """
    total, made = products.multiply_while(meanwhile, interpret, shape, *pairs)
    return anew(total), made


def add_products(
    interpret: InterpretParams, totals: tuple[jax.Array, ...], *sums: tuple[Pair, ...]
) -> tuple[jax.Array, ...]:
    """Returns totals, to each of which a sum of products is added. All are waited for at once."""
    return anew(products.accumulate_all(interpret, totals, *sums))


def write_tokens(target: Any, out_s: Any, token: jax.Array, count: jax.Array) -> None:
    """Begins to write a chunk's outputs, those of its tokens, which were stored in shared memory; see `await_outputs`.

    Args:
      target: from a span of tokens to where their outputs belong.
    """
    plgpu.commit_smem()
    for size in (64, 32, 16, 8, 4, 2, 1):

        @pl.when((count & size) != 0)
        def copy(size=size):
            begin = count & (-2 * size)
            plgpu.copy_smem_to_gmem(out_s.at[pl.ds(begin, size)], target(pl.ds(token + begin, size)))


def await_outputs() -> None:
    """Waits until the outputs before have left shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class RowChunk(NamedTuple):
    """A chunk of a row's tokens."""

    row: Any
    number: Any  # of the row's chunks in this step
    nth: Any  # of the thread block's
    token: Any  # its first among those of the step
    count: Any  # its tokens


class ChunkWalk(NamedTuple):
    """What is done with the chunks of a row."""

    begin: Callable[[RowChunk], None]  # begins to bring the inputs of the row's first chunk
    places: Callable[[Any], list[Any]]  # `(slot) -> references`: where a state lies
    # `(chunk, state, following) -> state`: runs a chunk. `following(f)` calls `f(chunk)` if there is one more.
    run: Callable[..., State]
    layout: Any = LAYOUT  # in which they are loaded and stored


def walk_turned(
    begin: Callable[[Any], None], run_chunk: Callable[..., Any], states_ref: Any, head: Any, part: Any
) -> ChunkWalk:
    """Returns the walk of a delta rule, over 64 values of a head's state: they lie along the lines of products, and are
    turned in registers, for global memory does not take them else."""

    def places(slot):
        here = pl.ds(anew(part) * WIDTH, WIDTH)  # or addresses would be kept from the reads to the writes
        return [states_ref.at[slot, anew(head), :, here].T]

    return ChunkWalk(begin, places, run_chunk, plgpu.Layout.WGMMA_TRANSPOSED)


class Turn(NamedTuple):
    """A row whose turn it is: what `rows.plan_rows` says of it."""

    done: Any  # chunks of the rows before it
    row: Any
    source: Any
    target: Any
    begin: Any
    count: Any
    begins: Any
    position: Any

    def count_chunks(self) -> Any:
        return count_chunks(self.position, self.count)[1]

    def find_chunk(self, number: Any) -> RowChunk:
        before, _ = count_chunks(self.position, self.count)
        start, stop = (find_edge(number + i, before, self.count) for i in (0, 1))
        return RowChunk(self.row, number, self.done + number, self.begin + start, stop - start)

    def call_with_next(self, number: Any, f: Callable[[RowChunk], None]) -> None:
        """Calls `f` with the chunk behind one, if there is one."""
        pl.when(number + 1 < self.count_chunks())(lambda: f(self.find_chunk(number + 1)))


def take_turns(rows_ref: Any, first: Any, take_turn: Callable[[Turn], None]) -> None:
    """Calls `take_turn` for each of the rows that are a thread block's, whose first is given."""

    def told(row):
        return row, *(rows_ref[row, i] for i in (SOURCE, TARGET, BEGIN, COUNT, BEGINS, POSITION, NEXT))

    def take(_, carry):
        *turn, following = carry
        turn = Turn(*turn)
        take_turn(turn)
        return turn.done + turn.count_chunks(), *told(following)

    lax.fori_loop(0, rows_ref[first, TURNS], take, (jnp.int32(0), *told(first)))
    await_outputs()


def walk_rows(
    rows_ref: Any, first: Any, states: jax.Array, walk: ChunkWalk, snapshots_ref: Any, every: int | None
) -> None:
    """Runs the rows that are a thread block's, one after another; see `rows.plan_rows`.

    Args:
      first: its first row.
      states: the pool, for its dtype and shape.
      snapshots_ref: see `rows.write_snapshot`, or None.
    """

    def take_turn(turn):
        def read():
            found = (plgpu.load(ref, layout=walk.layout, optimized=False) for ref in walk.places(turn.source))
            return tuple(plgpu.layout_cast(x.astype(jnp.float32), LAYOUT) for x in found)

        def write(state, slot):
            for x, ref in zip(state, walk.places(slot), strict=True):
                store(ref, plgpu.layout_cast(x, walk.layout).astype(states.dtype))

        walk.begin(turn.find_chunk(0))
        nothing = (full(ref.shape, 0.0, LAYOUT) for ref in walk.places(0))
        state = lax.cond(turn.begins == 0, read, lambda: tuple(nothing))

        def step(number, state):
            chunk = turn.find_chunk(number)
            state = walk.run(chunk, state, functools.partial(turn.call_with_next, number))
            if snapshots_ref is not None:
                after, slots = turn.position + chunk.token + chunk.count - turn.begin, states.shape[0]
                write_to = functools.partial(write, state)
                write_snapshot(snapshots_ref, turn.row, turn.position, after, every, slots, write_to)

            return state

        state = lax.fori_loop(0, turn.count_chunks(), step, state)
        pl.when(turn.target >= 0)(lambda: write(state, turn.target))

    take_turns(rows_ref, first, take_turn)


def follow_rows(
    rows_ref: Any, first: Any, begin: Callable[[RowChunk], None], run: Callable[[RowChunk, Any], None]
) -> None:
    """Runs the chunks of the same rows in a second warpgroup, which has no state.

    Args:
      begin: as of `ChunkWalk`.
      run: `(chunk, following)`, as of `ChunkWalk`.
    """

    def take_turn(turn):
        begin(turn.find_chunk(0))

        def step(number, carry):
            run(turn.find_chunk(number), functools.partial(turn.call_with_next, number))
            return carry

        lax.fori_loop(0, turn.count_chunks(), step, ())

    take_turns(rows_ref, first, take_turn)


def launch_chunks(
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    states: jax.Array,
    rows: jax.Array,
    snapshots: jax.Array | None,
    arrays: dict[str, jax.Array],
    blocks: tuple[int, int],
    interpret: InterpretParams,
    **threads: Any,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel whose thread blocks walk over rows, and returns its outputs and the pool, updated in place.

    Args:
      blocks: heads, and parts of `WIDTH` values of a head's state.
      threads: of `plgpu.kernel`: the warpgroups of a thread block, if there is more than one.
    """
    ref = jax.new_ref(states)
    (y,) = plgpu.kernel(
        kernel,
        out_type=(out,),
        grid=(rows.shape[0], *blocks),
        grid_names=("row", "head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        interpret=interpret,
        **threads,
    )(ref, rows, *(() if snapshots is None else (snapshots,)), *arrays.values())
    return y, jax.freeze(ref)
