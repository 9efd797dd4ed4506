"""Delta rules over many tokens: chunks of 64 as matrix products, one after another over a state in registers.

What the chunk's tokens are to one another is known by then: see `delta_pairs`. A thread block has 64 values of a head's
state, which lie along the lines of a product, keys or tokens across: so what is multiplied stays in registers from the
state to what it lacks of the values, to what tokens gain, to the state behind them. Outputs are another warpgroup's,
see `handoff`.
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
    SQUARE,
    WIDTH,
    await_outputs,
    columns,
    follow_rows,
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
from pallas_kernels.gpu.recurrence.handoff import THREADS, Handed, give, make_handoff, share_work
from pallas_kernels.gpu.recurrence.rows import plan_chunks
from pallas_kernels.gpu.tiles import InterpretParams, store


class DeltaBuffers(NamedTuple):
    """Shared memory."""

    keys: Any  # of the chunk and of the one behind it, for the state takes them last
    queries: Any
    gain_squares: Any  # of `ChunkPairs`, what tokens gain of what others lack
    output_squares: Any  # ... and get of what others gain
    values: Any
    out: Any
    handed: Handed


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
        states_ref, rows_ref, *others, out_ref, buffers, signals, sums_s, writer_sums_s, zero_s, barriers = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        pairs = ChunkPairs(*(given[name] for name in ChunkPairs._fields))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span, key_head = pl.ds(part * WIDTH, WIDTH), lax.div(head, jnp.int32(shared))
        ready, gain_ready, queries_ready, output_ready = barriers
        own_zero_s = zero_s.at[pl.ds(lax.axis_index("warpgroup"), 1)]

        hold_zero(own_zero_s)

        def located():
            return locate_buffers(buffers, own_zero_s)

        def number(chunk):
            return given["first_chunks"][chunk.row] + chunk.number

        def transposed(squares):
            return [Transposed(squares.at[half]) for half in (0, 1)]

        def since(ref):
            return columns(plgpu.load(ref, layout=COLUMN), SQUARE)

        def update():
            def fetch_tokens(chunk):
                nth, slot = number(chunk), chunk.number & 1
                plgpu.copy_gmem_to_smem(pairs.keys.at[nth, key_head], located().keys.at[slot], ready)
                plgpu.copy_gmem_to_smem(pairs.sums.at[nth, head], sums_s.at[slot], ready)
                plgpu.copy_gmem_to_smem(given["v"].at[pl.ds(chunk.token, CHUNK), head, span], located().values, ready)

            def fetch_gain_squares(chunk):
                source = pairs.squares.at[number(chunk), head, pl.ds(0, 2)]
                plgpu.copy_gmem_to_smem(source, located().gain_squares, gain_ready)

            def begin(chunk):
                plgpu.commit_smem()
                fetch_tokens(chunk)
                fetch_gain_squares(chunk)

            def run_chunk(chunk, state, following):
                ((state,), slot) = state, chunk.number & 1
                held, k_s = halve(interpret, state), located().keys.at[slot]

                def give_state():
                    give(held, located().handed.state, signals.state_ready, signals.state_free, chunk)

                plgpu.barrier_wait(ready)
                found, _ = multiply_while(give_state, interpret, SQUARE, *((half, Transposed(k_s)) for half in held))
                found, whole = found * jnp.exp(since(sums_s.at[slot])), sums_s[slot, CHUNK - 1]
                lacks = halve(interpret, load_values(located().values, chunk.count) - found)
                plgpu.commit_smem()
                following(fetch_tokens)
                plgpu.barrier_wait(gain_ready)
                gains = multiply(interpret, SQUARE, *pair_halves(lacks, transposed(located().gain_squares)))
                # What each token's gain is worth to the state at the chunk's end.
                worth = halve(interpret, gains * jnp.exp(whole - since(sums_s.at[slot])))
                k_s = located().keys.at[slot]

                def give_gains():
                    halves = halve(interpret, gains)
                    give(halves, located().handed.gains, signals.gains_ready, signals.gains_free, chunk)
                    following(fetch_gain_squares)

                gained, _ = multiply_while(give_gains, interpret, (WIDTH, keys), *((half, k_s) for half in worth))
                return (state * jnp.exp(whole) + gained,)

            walk = walk_turned(begin, run_chunk, states_ref, head, part)
            walk_rows(rows_ref, first, states, walk, snapshots_ref, every)

        def write():
            def fetch_queries(chunk):
                nth = number(chunk)
                plgpu.copy_gmem_to_smem(pairs.queries.at[nth, key_head], located().queries, queries_ready)
                plgpu.copy_gmem_to_smem(pairs.sums.at[nth, head], writer_sums_s, queries_ready)

            def fetch_output_squares(chunk):
                source = pairs.squares.at[number(chunk), head, pl.ds(2, 2)]
                plgpu.copy_gmem_to_smem(source, located().output_squares, output_ready)

            def begin(chunk):
                plgpu.commit_smem()
                fetch_queries(chunk)
                fetch_output_squares(chunk)

            def run_chunk(chunk, following):
                plgpu.barrier_wait(queries_ready)
                plgpu.barrier_wait(signals.state_ready)
                q_s = located().queries
                y = multiply(interpret, SQUARE, *((half, Transposed(q_s)) for half in located().handed.state))
                plgpu.barrier_arrive(signals.state_free)
                y = y * jnp.exp(since(writer_sums_s))
                plgpu.commit_smem()
                following(fetch_queries)
                plgpu.barrier_wait(output_ready)
                plgpu.barrier_wait(signals.gains_ready)
                squares = transposed(located().output_squares)
                y = y + multiply(interpret, SQUARE, *pair_halves(located().handed.gains, squares))
                plgpu.barrier_arrive(signals.gains_free)
                await_outputs()
                store(located().out.T, (y * given["scale"][0]).astype(out.dtype))
                write_tokens(lambda tokens: out_ref.at[tokens, head, span], located().out, chunk.token, chunk.count)
                following(fetch_output_squares)

            follow_rows(rows_ref, first, begin, run_chunk)

        share_work(update, write)

    def gated_delta_rule_chunks(*refs):  # the name that profiles and dumps show
        handed, signals = make_handoff(keys)
        buffers = DeltaBuffers(
            operand(2, CHUNK, keys),
            operand(CHUNK, keys),
            *(operand(2, *SQUARE),) * 2,
            *(landing(CHUNK, WIDTH),) * 2,
            handed,
        )
        numbers = plgpu.SMEM((2, CHUNK), jnp.float32), plgpu.SMEM((CHUNK,), jnp.float32), plgpu.SMEM((2,), jnp.int32)
        barriers = tuple(plgpu.Barrier(num_arrivals=n) for n in (3, 1, 2, 1))
        scratch = (buffers, signals, *numbers, barriers)
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), *scratch, collective_axes="warpgroup")

    blocks = num_heads, values // WIDTH
    return launch_chunks(gated_delta_rule_chunks, out, states, rows, snapshots, arrays, blocks, interpret, **THREADS)
