"""Delta rules with a gate a channel over many tokens: the walk of `delta_chunks`, which has a gate a head, with keys
and queries that are decayed ahead; see `channel_pairs`.

In halves, and with the squares, these take 128 KB a chunk. A thread block holds three quarters of it: each operand
comes to where the third before it has been read.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.recurrence.channel_pairs import (
    HALVES,
    OPERANDS,
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
from pallas_kernels.gpu.recurrence.rows import plan_chunks
from pallas_kernels.gpu.tiles import InterpretParams, anew, store

SLOTS = 3  # of operands


class WalkBuffers(NamedTuple):
    """Shared memory: so much that two thread blocks share a multiprocessor."""

    operands: Any  # three of a chunk's and the next one's, in turn
    values: Any
    out: Any


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
    arrays["kept"] = lax.bitcast_convert_type(pairs.kept, jnp.int32)  # shares memory with a zero, see `hold_zero`
    names = tuple(arrays)

    def kernel(*refs):
        states_ref, rows_ref, *others, out_ref, buffers, numbers_s, (ready, values_ready, kept_ready) = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span = pl.ds(part * WIDTH, WIDTH)
        kept_s, zero_s = numbers_s.at[pl.ds(0, keys)], numbers_s.at[pl.ds(keys, 1)]

        hold_zero(zero_s)

        def located():
            return locate_buffers(buffers, zero_s)

        def slot(chunk, which):  # of a chunk's four, the last lies where the first did, and the next chunk's a slot on
            return lax.rem(anew(chunk.number) + which, jnp.int32(SLOTS))

        def fetch(which):
            """Returns what begins to bring an operand of a chunk, to where the third before it was."""

            def copy(chunk):
                nth, here = given["first_chunks"][chunk.row] + chunk.number, slot(chunk, which)
                source = given["operands"].at[nth, head, which]
                plgpu.copy_gmem_to_smem(source, located().operands.at[here], ready.at[here])
                if which == UNTIL_KEYS:
                    plgpu.copy_gmem_to_smem(given["kept"].at[nth, head], kept_s, kept_ready)
                if which == SINCE_KEYS:
                    source = given["v"].at[pl.ds(chunk.token, CHUNK), head, span]
                    plgpu.copy_gmem_to_smem(source, located().values, values_ready)

            return copy

        def begin(chunk):
            plgpu.commit_smem()
            for which in OPERANDS[:SLOTS]:
                fetch(which)(chunk)

        def run_chunk(chunk, state, following):
            (state,) = state

            def halves(which, columns=slice(None)):
                return [located().operands.at[slot(chunk, which), half, columns] for half in HALVES]

            def turned(*which):
                return [half.T for half in halves(*which)]

            held = halve(interpret, state)
            plgpu.barrier_wait(ready.at[slot(chunk, SINCE_KEYS)])
            found = multiply(interpret, SQUARE, *pair_halves(held, turned(SINCE_KEYS)))
            plgpu.commit_smem()
            fetch(UNTIL_KEYS)(chunk)
            plgpu.barrier_wait(ready.at[slot(chunk, SINCE_QUERIES)])

            def find_lacks():
                plgpu.barrier_wait(values_ready)
                return halve(interpret, load_values(located().values, chunk.count) - found)

            y, lacks = multiply_while(find_lacks, interpret, SQUARE, *pair_halves(held, turned(SINCE_QUERIES)))
            plgpu.commit_smem()
            following(fetch(SINCE_KEYS))
            plgpu.barrier_wait(ready.at[slot(chunk, SQUARES)])
            gains = halve(interpret, multiply(interpret, SQUARE, *pair_halves(lacks, turned(SQUARES, pl.ds(0, CHUNK)))))
            y = y + multiply(interpret, SQUARE, *pair_halves(gains, turned(SQUARES, pl.ds(CHUNK, CHUNK))))
            plgpu.barrier_wait(ready.at[slot(chunk, UNTIL_KEYS)])

            def write():
                await_outputs()
                store(located().out.T, (y * given["scale"][0]).astype(out.dtype))
                write_tokens(lambda tokens: out_ref.at[tokens, head, span], located().out, chunk.token, chunk.count)
                following(fetch(SINCE_QUERIES))

            gained, _ = multiply_while(write, interpret, (WIDTH, keys), *pair_halves(gains, halves(UNTIL_KEYS)))
            plgpu.barrier_wait(kept_ready)
            kept = lax.bitcast_convert_type(plgpu.load(kept_s, layout=COLUMN), jnp.float32)
            state = state * columns(kept, state.shape) + gained
            plgpu.commit_smem()
            following(fetch(SQUARES))
            return (state,)

        walk = walk_turned(begin, run_chunk, states_ref, head, part)
        walk_rows(rows_ref, first, states, walk, snapshots_ref, every)

    def delta_rule_channel_chunks(*refs):  # the name that profiles and dumps show
        buffers = WalkBuffers(operand(SLOTS, 2 * CHUNK, keys), *(landing(CHUNK, WIDTH),) * 2)
        numbers = plgpu.SMEM((keys + 1,), jnp.int32)
        barriers = plgpu.Barrier(num_barriers=SLOTS), plgpu.Barrier(), plgpu.Barrier()
        pl.run_scoped(lambda *scratch: kernel(*refs, *scratch), buffers, numbers, barriers)

    return launch_chunks(
        delta_rule_channel_chunks, out, states, rows, snapshots, arrays, (num_heads, values // WIDTH), interpret
    )
