"""Delta rules over many tokens: chunks of 64 as matrix products, one after another over a state in registers.

What the chunk's tokens are to one another is known by then: see `delta_pairs`. A thread block has 64 values of a head's
state, which lie along the lines of a product, keys or tokens across: so what is multiplied stays in registers from the
state to what it lacks of the values, to what tokens gain, to the state behind them.
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
    SQUARE,
    WIDTH,
    await_outputs,
    columns,
    hold_zero,
    landing,
    launch_chunks,
    load_values,
    locate_buffers,
    multiply,
    multiply_while,
    operand,
    walk_rows,
    walk_turned,
    write_tokens,
)
from pallas_kernels.gpu.recurrence.delta_pairs import ChunkPairs, relate_tokens
from pallas_kernels.gpu.recurrence.halves import halve, pair_halves
from pallas_kernels.gpu.recurrence.rows import plan_chunks
from pallas_kernels.gpu.tiles import InterpretParams, store


class DeltaBuffers(NamedTuple):
    """Shared memory: so much that two thread blocks share a multiprocessor."""

    queries: Any
    keys: Any  # of the chunk and of the one behind it, for the state takes them last
    squares: Any  # of `ChunkPairs`
    values: Any
    out: Any


def run_delta_chunks(
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
      arrays: `q`, `k`, `v`, `g` and `beta` of all tokens, the first three in bfloat16, with a gate a head; and `scale`.
      every: a multiple of `CHUNK`.
    """
    _, num_heads, keys, values = states.shape
    shared = num_heads // arrays["k"].shape[1]
    chunks, first_chunks = plan_chunks(rows, out.shape[0])
    pairs = relate_tokens(arrays, chunks, interpret)
    arrays = {"v": arrays["v"], "scale": arrays["scale"], "first_chunks": first_chunks} | pairs._asdict()
    names = tuple(arrays)

    def kernel(*refs):
        states_ref, rows_ref, *others, out_ref, buffers, sums_s, zero_s, (ready, squares_ready) = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        pairs = ChunkPairs(*(given[name] for name in ChunkPairs._fields))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span, key_head = pl.ds(part * WIDTH, WIDTH), lax.div(head, jnp.int32(shared))

        hold_zero(zero_s)

        def located():
            return locate_buffers(buffers, zero_s)

        def fetch_tokens(chunk):
            nth, slot = given["first_chunks"][chunk.row] + chunk.number, chunk.number & 1
            plgpu.copy_gmem_to_smem(pairs.keys.at[nth, key_head], located().keys.at[slot], ready)
            plgpu.copy_gmem_to_smem(pairs.queries.at[nth, key_head], located().queries, ready)
            plgpu.copy_gmem_to_smem(pairs.sums.at[nth, head], sums_s.at[slot], ready)
            plgpu.copy_gmem_to_smem(given["v"].at[pl.ds(chunk.token, CHUNK), head, span], located().values, ready)

        def fetch_squares(chunk):
            nth = given["first_chunks"][chunk.row] + chunk.number
            plgpu.copy_gmem_to_smem(pairs.squares.at[nth, head], located().squares, squares_ready)

        def begin(chunk):
            plgpu.commit_smem()
            fetch_tokens(chunk)
            fetch_squares(chunk)

        def square(which):
            """Returns one of `ChunkPairs`, in halves."""
            return [located().squares.at[2 * which + half].T for half in (0, 1)]

        def run_chunk(chunk, state, following):
            ((state,), slot) = state, chunk.number & 1
            plgpu.barrier_wait(ready)
            whole = sums_s[slot, CHUNK - 1]

            def since():
                return columns(plgpu.load(sums_s.at[slot], layout=COLUMN), SQUARE)

            held = halve(interpret, state)
            k_s = located().keys.at[slot]
            found = multiply(interpret, SQUARE, *((half, k_s.T) for half in held))

            def find_lacks():
                return halve(interpret, load_values(located().values, chunk.count) - found * jnp.exp(since()))

            q_s = located().queries
            y, lacks = multiply_while(find_lacks, interpret, SQUARE, *((half, q_s.T) for half in held))
            y = y * jnp.exp(since())
            plgpu.commit_smem()
            following(fetch_tokens)
            plgpu.barrier_wait(squares_ready)
            gains = multiply(interpret, SQUARE, *pair_halves(lacks, square(0)))

            def find_worth():
                """Returns what each token's gain is worth to the state at the chunk's end."""
                return halve(interpret, gains * jnp.exp(whole - since()))

            halves = halve(interpret, gains)
            others, worth = multiply_while(find_worth, interpret, SQUARE, *pair_halves(halves, square(1)))

            def write():
                await_outputs()
                store(located().out.T, ((y + others) * given["scale"][0]).astype(out.dtype))
                write_tokens(lambda tokens: out_ref.at[tokens, head, span], located().out, chunk.token, chunk.count)
                following(fetch_squares)

            k_s = located().keys.at[slot]
            gained, _ = multiply_while(write, interpret, (WIDTH, keys), *((half, k_s) for half in worth))
            return (state * jnp.exp(whole) + gained,)

        walk = walk_turned(begin, run_chunk, states_ref, head, part)
        walk_rows(rows_ref, first, states, walk, snapshots_ref, every)

    def gated_delta_rule_chunks(*refs):  # the name that profiles and dumps show
        buffers = DeltaBuffers(
            operand(CHUNK, keys), operand(2, CHUNK, keys), operand(4, *SQUARE), *(landing(CHUNK, WIDTH),) * 2
        )
        numbers = plgpu.SMEM((2, CHUNK), jnp.float32), plgpu.SMEM((1,), jnp.int32)
        barriers = plgpu.Barrier(num_arrivals=4), plgpu.Barrier()
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), buffers, *numbers, barriers)

    return launch_chunks(
        gated_delta_rule_chunks, out, states, rows, snapshots, arrays, (num_heads, values // WIDTH), interpret
    )
