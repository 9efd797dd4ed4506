"""State spaces over many tokens: chunks of 64 as matrix products, one after another over a state in registers.

A thread block has 64 values of a head's state. Of a chunk it multiplies C with the state before, the decayed C B^T with
the inputs, and the inputs with the decayed B, which is what the state gains (https://arxiv.org/abs/2405.21060). All is
float32: what the matrix unit takes in 16 bits is either an input, which has no more, or it comes in two halves, a
number's 8 leading bits and the 8 behind them.

Chunks begin at multiples of 64 of a row's positions, so that snapshots are at the end of one. A chunk may have fewer
tokens: what stands in the others' places is selected away, never multiplied by zero.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.recurrence.rows import (
    BEGIN,
    BEGINS,
    COUNT,
    NEXT,
    POSITION,
    SOURCE,
    TARGET,
    TURNS,
    write_snapshot,
)
from pallas_kernels.gpu.tiles import (
    LAYOUT,
    OPERAND,
    SINGLE_ROWS,
    InterpretParams,
    anew,
    full,
    probe,
    store,
)

CHUNK = 64  # tokens
WIDTH = 64  # values of a state in a thread block
PIECE = 64  # keys at once, for the registers' sake
MOST_KEYS = 128  # for the registers' sake
LEAST_GATE = -30.0  # of a token, in logarithms: sums over a chunk keep more digits, and no state is seen through it
ROW, COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)


class Buffers(NamedTuple):
    """Shared memory."""

    landed: tuple[Any, ...]  # the chunk's inputs as bulk copies bring them
    tiles: tuple[Any, ...]  # ... and as the matrix unit reads them
    halves: tuple[Any, ...]  # of the state before the chunk, then of the decayed B
    weights: tuple[Any, ...]  # halves of what tokens get of one another's inputs
    out: Any


def run_chunks(
    arrays: dict[str, jax.Array], out: jax.ShapeDtypeStruct, states: jax.Array, rows: jax.Array,
    snapshots: jax.Array | None, every: int | None, *, interpret: InterpretParams = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs a step's tokens over the states of their rows, as `tokens.update_states` does.

    Args:
      arrays: `x`, `dt`, `B` and `C` of all tokens, the first and the last two in bfloat16, and `A` and maybe `D`.
      every: a multiple of `CHUNK`.
    """
    num_slots, num_heads, values, keys = states.shape
    groups = arrays["B"].shape[1]
    # Whole chunks are read of it, by no bulk copy, which would stop at the end.
    arrays = arrays | {"dt": jnp.pad(arrays["dt"].astype(jnp.float32).T, ((0, 0), (0, CHUNK)))}
    names, square = tuple(arrays), (CHUNK, CHUNK)
    pieces = [pl.ds(first, PIECE) for first in range(0, keys, PIECE)]

    def kernel(*refs):
        states_ref, rows_ref, *others, out_ref, buffers, sums_s, ready = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span, group = pl.ds(part * WIDTH, WIDTH), lax.div(head, jnp.int32(num_heads // groups))
        rate = given["A"][head].astype(jnp.float32)
        place = {"x": (head, span), "B": (group, slice(None)), "C": (group, slice(None))}

        def fetch(token):
            for (name, at), target in zip(place.items(), locate_buffers().landed, strict=True):
                plgpu.copy_gmem_to_smem(given[name].at[pl.ds(token, CHUNK), *at], target, ready)

        def locate_buffers():
            """The buffers, such that addresses in them are derived where this stands; else they are all derived ahead
            of the loop, and kept in registers that there are not."""
            nothing = anew(first) - first
            return jax.tree.map(lambda ref: ref.at[nothing], buffers, is_leaf=lambda x: not isinstance(x, tuple))

        def lay_out(count):
            """Moves the chunk's inputs to where the matrix unit reads them, as tiles: a chunk begins at any token, and
            bulk copies of tiles at multiples of 8. What is beyond its last token becomes 0."""
            plgpu.barrier_wait(ready)
            held = locate_buffers()
            for source, target in zip(held.landed, held.tiles, strict=True):
                for piece in pieces[: source.shape[1] // PIECE]:
                    x = plgpu.load(source.at[:, piece], layout=LAYOUT, optimized=False)
                    target.at[:, piece][...] = jnp.where(index(x.shape, 0) < count, x, jnp.zeros_like(x))

        def product(shape, *pairs):
            for pair in pairs:
                probe(interpret, *pair)

            def multiply(acc_ref):
                for a, b in pairs:
                    plgpu.wgmma(acc_ref, a, b)
                return acc_ref[...]

            return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

        def put(x, targets, piece=slice(None)):
            """Store numbers' leading bits, and those behind them."""
            leading = x.astype(jnp.bfloat16)
            targets[0].at[:, piece][...] = leading
            targets[1].at[:, piece][...] = (x - leading.astype(jnp.float32)).astype(jnp.bfloat16)

        def lines(x, shape):
            return lax.broadcast_in_dim(x, shape, [0])

        def columns(x, shape):
            return lax.broadcast_in_dim(x, shape, [1])

        def index(shape, axis):
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)

        def seen():
            """Which tokens each sees, of those in its chunk."""
            return index(square, 1) - index(square, 0) <= anew(first) - first

        def load_steps(token, count, layout):
            """The chunk's time steps, and 0 beyond its last token."""
            steps = plgpu.load(given["dt"].at[head, pl.ds(token, CHUNK)], layout=layout, optimized=False)
            place = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
            return jnp.where(place < count, steps, jnp.zeros_like(steps))

        def run_chunk(token, count, state, fetch_next):
            steps, steps_across = (load_steps(token, count, layout) for layout in (ROW, COLUMN))
            gates = columns(jnp.maximum(steps_across * rate, LEAST_GATE), square)
            since = jnp.where(seen(), gates, 0.0).sum(axis=1)  # up to each token, its own gate included
            whole = gates.sum(axis=1)
            sums_s[...] = since
            lay_out(count)
            (x_s, b_s, c_s), halves, weights_s = locate_buffers()[1:4]
            for x, piece in zip(state, pieces, strict=True):
                put(x, halves, piece)
            plgpu.commit_smem()
            fetch_next()
            since_across = plgpu.load(sums_s, layout=COLUMN)
            weights = product(square, (c_s, b_s.T)) * columns(steps_across, square)
            weights = weights * jnp.exp(lines(since, square) - columns(since_across, square))
            put(jnp.where(seen(), weights, 0.0), weights_s)
            y = product((CHUNK, WIDTH), *((c_s, half.T) for half in halves))
            y = y * lines(jnp.exp(since), y.shape)
            # What each token's input is worth to the state at the chunk's end.
            worth = lines(steps * jnp.exp(whole - since), square)
            for piece in pieces:
                b = plgpu.load(b_s.at[:, piece], layout=LAYOUT).astype(jnp.float32)
                put(b * worth, halves, piece)
            plgpu.commit_smem()
            y = y + product(y.shape, *((half, x_s) for half in weights_s))
            if "D" in given:
                x = plgpu.load(x_s, layout=LAYOUT).astype(jnp.float32)
                if given["D"].ndim == 1:
                    y = y + x * given["D"][head].astype(jnp.float32)
                else:
                    skip = plgpu.load(given["D"].at[head, span], layout=COLUMN, optimized=False)
                    y = y + x * columns(skip.astype(jnp.float32), y.shape)
            write_tokens(token, count, y)
            kept = lines(jnp.exp(whole), square)
            return tuple(
                x * kept + product(square, *((x_s.T, half.at[:, piece]) for half in halves))
                for x, piece in zip(state, pieces, strict=True)
            )

        def write_tokens(token, count, y):
            out_s = locate_buffers().out
            store(out_s, y.astype(out.dtype))
            plgpu.commit_smem()
            for size in (64, 32, 16, 8, 4, 2, 1):

                @pl.when((count & size) != 0)
                def copy(size=size):
                    begin = count & (-2 * size)
                    target = out_ref.at[pl.ds(token + begin, size), head, span]
                    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(begin, size)], target)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def told(row):
            return row, *(rows_ref[row, i] for i in (SOURCE, TARGET, BEGIN, COUNT, BEGINS, POSITION, NEXT))

        def take_turn(_, turn):
            row, source, target, begin, count, begins, position, following = turn

            def places(slot):
                return [states_ref.at[slot, head, span, piece] for piece in pieces]

            def read():
                found = (plgpu.load(ref, layout=LAYOUT, optimized=False) for ref in places(source))
                return tuple(x.astype(jnp.float32) for x in found)

            def write(state, slot):
                for x, ref in zip(state, places(slot), strict=True):
                    store(ref, x.astype(states.dtype))

            fetch(begin)
            state = lax.cond(begins == 0, read, lambda: tuple(full(square, 0.0, LAYOUT) for _ in pieces))
            before = lax.rem(position, jnp.int32(CHUNK))  # places of the first chunk that are not of this step
            chunks = lax.div(before + count + (CHUNK - 1), jnp.int32(CHUNK))

            def edge(i):
                return jnp.clip(i * CHUNK - before, 0, count)

            def step(i, state):
                start, stop = edge(i), edge(i + 1)

                def fetch_next():
                    pl.when(i + 1 < chunks)(lambda: fetch(begin + stop))

                state = run_chunk(begin + start, stop - start, state, fetch_next)
                if snapshots_ref is not None:
                    after = position + stop
                    write_snapshot(snapshots_ref, row, position, after, every, num_slots, lambda to: write(state, to))

                return state

            state = lax.fori_loop(0, chunks, step, state)
            pl.when(target >= 0)(lambda: write(state, target))
            return told(following)

        lax.fori_loop(0, rows_ref[first, TURNS], take_turn, told(first))

    def state_space_chunks(*refs):  # the name that profiles and dumps show
        def operand(*shape):
            return plgpu.SMEM((1, *shape), jnp.bfloat16, transforms=OPERAND)

        sizes = (CHUNK, WIDTH), (CHUNK, keys), (CHUNK, keys)
        landed = tuple(plgpu.SMEM((1, *shape), jnp.bfloat16, transforms=SINGLE_ROWS) for shape in sizes)
        tiles = tuple(operand(*shape) for shape in sizes)
        halves, weights = (operand(CHUNK, keys),) * 2, (operand(*square),) * 2
        sums, of_out = (
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.SMEM((1, CHUNK, WIDTH), out.dtype, transforms=SINGLE_ROWS),
        )
        buffers = Buffers(landed, tiles, halves, weights, of_out), sums, plgpu.Barrier(num_arrivals=len(landed))
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), *buffers)

    ref = jax.new_ref(states)
    (y,) = plgpu.kernel(
        state_space_chunks, out_type=(out,),
        grid=(rows.shape[0], num_heads, values // WIDTH), grid_names=("row", "head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024), interpret=interpret,
    )(ref, rows, *(() if snapshots is None else (snapshots,)), *arrays.values())  # fmt: skip
    return y, jax.freeze(ref)
