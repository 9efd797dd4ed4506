"""State spaces over many tokens: chunks of 64 as matrix products, one after another over a state in registers.

A thread block has 64 values of a head's state. Of a chunk it multiplies C with the state before, the decayed C B^T with
the inputs, and the inputs with the decayed B, which is what the state gains (https://arxiv.org/abs/2405.21060).
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.recurrence.chunk_steps import (
    CHUNK,
    COLUMN,
    LEAST_GATE,
    PIECE,
    ROW,
    SQUARE,
    WIDTH,
    ChunkWalk,
    await_outputs,
    columns,
    hold_zero,
    landing,
    launch_chunks,
    lay_out,
    lines,
    load_numbers,
    locate_buffers,
    multiply,
    operand,
    pad_numbers,
    see_tokens,
    split_keys,
    walk_rows,
    write_tokens,
)
from pallas_kernels.gpu.recurrence.halves import put
from pallas_kernels.gpu.tiles import LAYOUT, InterpretParams, store


class SpaceBuffers(NamedTuple):
    """Shared memory."""

    landed: tuple[Any, ...]  # the chunk's inputs as bulk copies bring them
    tiles: tuple[Any, ...]  # ... and as the matrix unit reads them
    halves: tuple[Any, ...]  # of the state before the chunk, then of the decayed B
    weights: tuple[Any, ...]  # halves of what tokens get of one another's inputs
    out: Any


def run_space_chunks(
    arrays: dict[str, jax.Array],
    out: jax.ShapeDtypeStruct,
    states: jax.Array,
    rows: jax.Array,
    snapshots: jax.Array | None,
    every: int | None,
    *,
    interpret: InterpretParams = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs a step's tokens over the states of their rows, as `tokens.update_states` does.

    Args:
      arrays: `x`, `dt`, `B` and `C` of all tokens, the first and the last two in bfloat16, and `A` and maybe `D`.
      every: a multiple of `CHUNK`.
    """
    _, num_heads, values, keys = states.shape
    groups = arrays["B"].shape[1]
    arrays = arrays | {"dt": pad_numbers(arrays["dt"])}
    names, pieces = tuple(arrays), split_keys(keys)

    def kernel(*refs):
        states_ref, rows_ref, *others, out_ref, buffers, sums_s, zero_s, ready = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span, group = pl.ds(part * WIDTH, WIDTH), lax.div(head, jnp.int32(num_heads // groups))
        rate = given["A"][head].astype(jnp.float32)
        of_keys = [(group, piece) for piece in pieces]
        copied = {"x": [(head, span)], "B": of_keys, "C": of_keys}

        hold_zero(zero_s)

        def fetch(chunk):
            landed = locate_buffers(buffers, zero_s).landed
            for (name, spots), target in zip(copied.items(), landed, strict=True):
                for nth, at in enumerate(spots):
                    plgpu.copy_gmem_to_smem(given[name].at[pl.ds(chunk.token, CHUNK), *at], target.at[nth], ready)

        def run_chunk(chunk, state, following):
            token, count = chunk.token, chunk.count
            dt = given["dt"].at[head]
            steps, steps_across = (load_numbers(dt, token, count, layout) for layout in (ROW, COLUMN))
            gates = columns(jnp.maximum(steps_across * rate, LEAST_GATE), SQUARE)
            since = jnp.where(see_tokens(zero_s), gates, 0.0).sum(axis=1)  # up to each token, its own gate included
            whole = gates.sum(axis=1)
            sums_s[...] = since
            plgpu.barrier_wait(ready)
            landed, tiles, halves, weights_s, out_s = locate_buffers(buffers, zero_s)
            for source, target in zip(landed, tiles, strict=True):
                lay_out(source, target, count)
            x_s, b_s, c_s = tiles
            for x, piece in zip(state, pieces, strict=True):
                put(interpret, x, halves, piece)
            plgpu.commit_smem()
            following(fetch)
            since_across = plgpu.load(sums_s, layout=COLUMN)
            weights = multiply(interpret, SQUARE, (c_s, b_s.T)) * columns(steps_across, SQUARE)
            weights = weights * jnp.exp(lines(since, SQUARE) - columns(since_across, SQUARE))
            put(interpret, jnp.where(see_tokens(zero_s), weights, 0.0), weights_s)
            y = multiply(interpret, SQUARE, *((c_s, half.T) for half in halves))
            y = y * lines(jnp.exp(since), y.shape)
            # What each token's input is worth to the state at the chunk's end.
            worth = lines(steps * jnp.exp(whole - since), SQUARE)
            for piece in pieces:
                b = plgpu.load(b_s.at[:, piece], layout=LAYOUT).astype(jnp.float32)
                put(interpret, b * worth, halves, piece)
            plgpu.commit_smem()
            y = y + multiply(interpret, y.shape, *((half, x_s) for half in weights_s))
            if "D" in given:
                x = plgpu.load(x_s, layout=LAYOUT).astype(jnp.float32)
                if given["D"].ndim == 1:
                    y = y + x * given["D"][head].astype(jnp.float32)
                else:
                    skip = plgpu.load(given["D"].at[head, span], layout=COLUMN, optimized=False)
                    y = y + x * columns(skip.astype(jnp.float32), y.shape)
            await_outputs()
            store(out_s, y.astype(out_s.dtype))
            write_tokens(lambda tokens: out_ref.at[tokens, head, span], out_s, token, count)
            kept = lines(jnp.exp(whole), SQUARE)
            return tuple(
                x * kept + multiply(interpret, SQUARE, *((x_s.T, half.at[:, piece]) for half in halves))
                for x, piece in zip(state, pieces, strict=True)
            )

        def places(slot):
            return [states_ref.at[slot, head, span, piece] for piece in pieces]

        walk_rows(rows_ref, first, states, ChunkWalk(fetch, places, run_chunk), snapshots_ref, every)

    def state_space_chunks(*refs):  # the name that profiles and dumps show
        sizes = (CHUNK, WIDTH), (CHUNK, keys), (CHUNK, keys)
        buffers = SpaceBuffers(
            tuple(landing(width // PIECE, CHUNK, PIECE) for _, width in sizes),
            tuple(operand(*shape) for shape in sizes),
            (operand(CHUNK, keys),) * 2,
            (operand(*SQUARE),) * 2,
            landing(CHUNK, WIDTH),
        )
        numbers = plgpu.SMEM((CHUNK,), jnp.float32), plgpu.SMEM((1,), jnp.int32)
        scratch = buffers, *numbers, plgpu.Barrier(num_arrivals=1 + 2 * len(pieces))
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), *scratch)

    return launch_chunks(
        state_space_chunks, out, states, rows, snapshots, arrays, (num_heads, values // WIDTH), interpret
    )
