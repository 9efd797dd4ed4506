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

from pallas_kernels.gpu.products import Transposed
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
    follow_rows,
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
from pallas_kernels.gpu.recurrence.handoff import THREADS, await_reader, share_work
from pallas_kernels.gpu.tiles import LAYOUT, InterpretParams, store


class SpaceBuffers(NamedTuple):
    """Shared memory."""

    landed_x: Any  # the chunk's inputs as bulk copies bring them
    landed_b: Any
    landed_c: Any
    x: Any  # ... and as the matrix unit reads them, of this chunk and of the one behind it
    b: Any
    c: Any
    state: tuple[Any, Any]  # halves of the state before the chunk
    decayed: tuple[Any, Any]  # halves of the decayed B
    weights: tuple[Any, Any]  # halves of what tokens get of one another's inputs
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
        states_ref, rows_ref, *others, out_ref, buffers, sums_s, zero_s, barriers = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span, group = pl.ds(part * WIDTH, WIDTH), lax.div(head, jnp.int32(num_heads // groups))
        rate = given["A"][head].astype(jnp.float32)
        ready, c_ready, state_ready, state_free = barriers
        own_zero_s = zero_s.at[pl.ds(lax.axis_index("warpgroup"), 1)]

        hold_zero(own_zero_s)

        def located():
            return locate_buffers(buffers, own_zero_s)

        def load_steps(chunk, layout):
            return load_numbers(given["dt"].at[head], chunk.token, chunk.count, layout)

        def find_gates(steps_across):
            return columns(jnp.maximum(steps_across * rate, LEAST_GATE), SQUARE)

        def sum_gates(gates):
            """Returns the sum of gates up to each token, its own included."""
            return jnp.where(see_tokens(own_zero_s), gates, 0.0).sum(axis=1)

        def fetch_keys(name, chunk, target, ready):
            for nth, piece in enumerate(pieces):
                source = given[name].at[pl.ds(chunk.token, CHUNK), group, piece]
                plgpu.copy_gmem_to_smem(source, target.at[nth], ready)

        def update():
            def fetch(chunk):
                source = given["x"].at[pl.ds(chunk.token, CHUNK), head, span]
                plgpu.copy_gmem_to_smem(source, located().landed_x.at[0], ready)
                fetch_keys("B", chunk, located().landed_b, ready)

            def begin(chunk):
                plgpu.commit_smem()
                fetch(chunk)

            def run_chunk(chunk, state, following):
                slot, gates = chunk.nth & 1, find_gates(load_steps(chunk, COLUMN))
                since, whole = sum_gates(gates), gates.sum(axis=1)
                x_s, b_s = located().x.at[slot], located().b.at[slot]
                plgpu.barrier_wait(ready)
                await_reader(state_free, chunk)
                lay_out(located().landed_x, x_s, chunk.count)
                lay_out(located().landed_b, b_s, chunk.count)
                for x, piece in zip(state, pieces, strict=True):
                    put(interpret, x, located().state, piece)
                plgpu.commit_smem()
                plgpu.barrier_arrive(state_ready)
                following(fetch)
                # What each token's input is worth to the state at the chunk's end.
                worth = lines(load_steps(chunk, ROW) * jnp.exp(whole - since), SQUARE)
                decayed = located().decayed
                for piece in pieces:
                    b = plgpu.load(b_s.at[:, piece], layout=LAYOUT).astype(jnp.float32)
                    put(interpret, b * worth, decayed, piece)
                plgpu.commit_smem()
                kept = lines(jnp.exp(whole), SQUARE)
                return tuple(
                    x * kept + multiply(interpret, SQUARE, *((x_s.T, half.at[:, piece]) for half in decayed))
                    for x, piece in zip(state, pieces, strict=True)
                )

            def places(slot):
                return [states_ref.at[slot, head, span, piece] for piece in pieces]

            walk_rows(rows_ref, first, states, ChunkWalk(begin, places, run_chunk), snapshots_ref, every)

        def write():
            def fetch(chunk):
                fetch_keys("C", chunk, located().landed_c, c_ready)

            def begin(chunk):
                plgpu.commit_smem()
                fetch(chunk)

            def run_chunk(chunk, following):
                slot, steps_across = chunk.nth & 1, load_steps(chunk, COLUMN)
                since = sum_gates(find_gates(steps_across))
                sums_s[...] = since
                c_s = located().c
                plgpu.barrier_wait(c_ready)
                lay_out(located().landed_c, c_s, chunk.count)
                plgpu.commit_smem()
                following(fetch)
                plgpu.barrier_wait(state_ready)
                y = multiply(interpret, SQUARE, *((c_s, Transposed(half)) for half in located().state))
                plgpu.barrier_arrive(state_free)
                y = y * lines(jnp.exp(since), y.shape)
                x_s, b_s = located().x.at[slot], located().b.at[slot]
                weights = multiply(interpret, SQUARE, (c_s, Transposed(b_s))) * columns(steps_across, SQUARE)
                since_across = plgpu.load(sums_s, layout=COLUMN)
                weights = weights * jnp.exp(lines(since, SQUARE) - columns(since_across, SQUARE))
                put(interpret, jnp.where(see_tokens(own_zero_s), weights, 0.0), located().weights)
                plgpu.commit_smem()
                y = y + multiply(interpret, y.shape, *((half, x_s) for half in located().weights))
                if "D" in given:
                    x = plgpu.load(x_s, layout=LAYOUT).astype(jnp.float32)
                    if given["D"].ndim == 1:
                        y = y + x * given["D"][head].astype(jnp.float32)
                    else:
                        skip = plgpu.load(given["D"].at[head, span], layout=COLUMN, optimized=False)
                        y = y + x * columns(skip.astype(jnp.float32), y.shape)
                await_outputs()
                out_s = located().out
                store(out_s, y.astype(out_s.dtype))
                write_tokens(lambda tokens: out_ref.at[tokens, head, span], out_s, chunk.token, chunk.count)

            follow_rows(rows_ref, first, begin, run_chunk)

        share_work(update, write)

    def state_space_chunks(*refs):  # the name that profiles and dumps show
        buffers = SpaceBuffers(
            landing(1, CHUNK, PIECE), *(landing(len(pieces), CHUNK, PIECE),) * 2,
            operand(2, CHUNK, WIDTH), operand(2, CHUNK, keys), operand(CHUNK, keys),
            *((operand(CHUNK, keys),) * 2,) * 2, (operand(*SQUARE),) * 2, landing(CHUNK, WIDTH),
        )  # fmt: skip
        numbers = plgpu.SMEM((CHUNK,), jnp.float32), plgpu.SMEM((2,), jnp.int32)
        arrivals = 1 + len(pieces), len(pieces), 1, 1
        scratch = buffers, *numbers, tuple(plgpu.Barrier(num_arrivals=n) for n in arrivals)
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), *scratch, collective_axes="warpgroup")

    blocks = num_heads, values // WIDTH
    return launch_chunks(state_space_chunks, out, states, rows, snapshots, arrays, blocks, interpret, **THREADS)
