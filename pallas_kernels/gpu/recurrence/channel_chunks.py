"""Delta rules with a gate a channel over many tokens: the walk of `delta_chunks`, which has a gate a head, with keys
and queries that are decayed ahead; see `channel_pairs`.

In halves, and with the squares, these take 128 KB a chunk, which is what a thread block holds: of the next chunk each
comes when it has been read of this one.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.products import Transposed
from pallas_kernels.gpu.recurrence.channel_pairs import (
    HALVES,
    SINCE_KEYS,
    SINCE_QUERIES,
    SQUARES,
    UNTIL_KEYS,
    relate_channels,
)
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
from pallas_kernels.gpu.recurrence.halves import halve, pair_halves
from pallas_kernels.gpu.recurrence.handoff import THREADS, Handed, give, make_handoff, share_work
from pallas_kernels.gpu.recurrence.rows import plan_chunks
from pallas_kernels.gpu.tiles import InterpretParams, store


class WalkBuffers(NamedTuple):
    """Shared memory."""

    since_keys: Any  # operands of `ChannelPairs`
    since_queries: Any
    until_keys: Any
    gain_squares: Any  # what tokens gain of what others lack
    output_squares: Any  # ... and get of what others gain
    values: Any
    out: Any
    handed: Handed


def run_channel_chunks(
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
      arrays: `q`, `k`, `v`, `g` and `beta` of all tokens, the first three in bfloat16, with a gate for each of 128
        channels; and `scale`.
      every: a multiple of `CHUNK`.
    """
    _, num_heads, keys, values = states.shape
    chunks, first_chunks = plan_chunks(rows, out.shape[0])
    pairs = relate_channels(arrays, chunks, interpret)
    arrays = {"v": arrays["v"], "scale": arrays["scale"], "first_chunks": first_chunks} | pairs._asdict()
    names = tuple(arrays)

    def kernel(*refs):
        states_ref, rows_ref, *others, out_ref, buffers, signals, kept_s, zero_s, barriers = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span = pl.ds(part * WIDTH, WIDTH)
        since_ready, values_ready, until_ready, gain_ready, queries_ready, output_ready = barriers
        own_zero_s = zero_s.at[pl.ds(lax.axis_index("warpgroup"), 1)]

        hold_zero(own_zero_s)

        def located():
            return locate_buffers(buffers, own_zero_s)

        def number(chunk):
            return given["first_chunks"][chunk.row] + chunk.number

        def fetch(which, name, ready, columns=slice(None)):
            """Returns what begins to bring an operand of a chunk."""

            def copy(chunk):
                source = given["operands"].at[number(chunk), head, which, :, columns]
                plgpu.copy_gmem_to_smem(source, getattr(located(), name), ready)

            return copy

        def halves(operand):
            return [operand.at[half] for half in HALVES]

        def transposed(operand):
            return [Transposed(half) for half in halves(operand)]

        def update():
            fetch_gain_squares = fetch(SQUARES, "gain_squares", gain_ready, pl.ds(0, CHUNK))

            def fetch_since(chunk):
                fetch(SINCE_KEYS, "since_keys", since_ready)(chunk)
                source = given["v"].at[pl.ds(chunk.token, CHUNK), head, span]
                plgpu.copy_gmem_to_smem(source, located().values, values_ready)

            def fetch_until(chunk):
                fetch(UNTIL_KEYS, "until_keys", until_ready)(chunk)
                plgpu.copy_gmem_to_smem(given["kept"].at[number(chunk), head], kept_s, until_ready)

            def begin(chunk):
                plgpu.commit_smem()
                fetch_since(chunk)
                fetch_gain_squares(chunk)
                fetch_until(chunk)

            def run_chunk(chunk, state, following):
                (state,) = state
                held = halve(interpret, state)
                # Beside the product, as `delta_chunks` gives it, 13.5's ptxas would spill.
                give(held, located().handed.state, signals.state_ready, signals.state_free, chunk)
                plgpu.barrier_wait(since_ready)
                found = multiply(interpret, SQUARE, *pair_halves(held, transposed(located().since_keys)))
                plgpu.barrier_wait(values_ready)
                lacks = halve(interpret, load_values(located().values, chunk.count) - found)
                plgpu.commit_smem()
                following(fetch_since)
                plgpu.barrier_wait(gain_ready)
                pairs = pair_halves(lacks, transposed(located().gain_squares))
                gains = halve(interpret, multiply(interpret, SQUARE, *pairs))

                def give_gains():
                    give(gains, located().handed.gains, signals.gains_ready, signals.gains_free, chunk)
                    following(fetch_gain_squares)

                plgpu.barrier_wait(until_ready)
                pairs = pair_halves(gains, halves(located().until_keys))
                gained, _ = multiply_while(give_gains, interpret, (WIDTH, keys), *pairs)
                state = state * columns(plgpu.load(kept_s, layout=COLUMN), state.shape) + gained
                plgpu.commit_smem()
                following(fetch_until)
                return (state,)

            walk = walk_turned(begin, run_chunk, states_ref, head, part)
            walk_rows(rows_ref, first, states, walk, snapshots_ref, every)

        def write():
            fetch_queries = fetch(SINCE_QUERIES, "since_queries", queries_ready)
            fetch_output_squares = fetch(SQUARES, "output_squares", output_ready, pl.ds(CHUNK, CHUNK))

            def begin(chunk):
                plgpu.commit_smem()
                fetch_queries(chunk)
                fetch_output_squares(chunk)

            def run_chunk(chunk, following):
                plgpu.barrier_wait(queries_ready)
                plgpu.barrier_wait(signals.state_ready)
                pairs = pair_halves(located().handed.state, transposed(located().since_queries))
                y = multiply(interpret, SQUARE, *pairs)
                plgpu.barrier_arrive(signals.state_free)
                plgpu.commit_smem()
                following(fetch_queries)
                plgpu.barrier_wait(output_ready)
                plgpu.barrier_wait(signals.gains_ready)
                pairs = pair_halves(located().handed.gains, transposed(located().output_squares))
                y = y + multiply(interpret, SQUARE, *pairs)
                plgpu.barrier_arrive(signals.gains_free)
                await_outputs()
                store(located().out.T, (y * given["scale"][0]).astype(out.dtype))
                write_tokens(lambda tokens: out_ref.at[tokens, head, span], located().out, chunk.token, chunk.count)
                following(fetch_output_squares)

            follow_rows(rows_ref, first, begin, run_chunk)

        share_work(update, write)

    def delta_rule_channel_chunks(*refs):  # the name that profiles and dumps show
        handed, signals = make_handoff(keys)
        operands = (operand(2 * CHUNK, keys),) * 3 + (operand(2 * CHUNK, CHUNK),) * 2
        buffers = WalkBuffers(*operands, *(landing(CHUNK, WIDTH),) * 2, handed)
        numbers = plgpu.SMEM((keys,), jnp.float32), plgpu.SMEM((2,), jnp.int32)
        barriers = tuple(plgpu.Barrier(num_arrivals=n) for n in (1, 1, 2, 1, 1, 1))
        scratch = (buffers, signals, *numbers, barriers)
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), *scratch, collective_axes="warpgroup")

    blocks = num_heads, values // WIDTH
    return launch_chunks(delta_rule_channel_chunks, out, states, rows, snapshots, arrays, blocks, interpret, **THREADS)
