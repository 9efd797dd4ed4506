"""Delta rules over many tokens: chunks of 64 as matrix products, one after another over a state in registers.

A thread block has 64 values of a head's state, each with all keys. What a chunk's tokens add to it depends on one
another: a triangular system, whose inverse is multiplied with what the state before lacks of the values
(https://arxiv.org/abs/2412.06464). Then these are what a state space's inputs are.
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
    columns,
    hold_zero,
    landing,
    launch_chunks,
    lay_out,
    lines,
    load_numbers,
    load_tokens,
    locate_buffers,
    multiply,
    operand,
    pad_numbers,
    pair_tokens,
    put,
    see_tokens,
    split_keys,
    take,
    walk_rows,
    write_tokens,
)
from pallas_kernels.gpu.tiles import LAYOUT, InterpretParams, anew


class DeltaBuffers(NamedTuple):
    """Shared memory: so much that two thread blocks share a multiprocessor."""

    landed: tuple[Any, Any]  # the chunk's queries and keys as bulk copies bring them
    lower: tuple[Any, Any]  # halves of the triangle, in the same memory until the next chunk's keys are brought
    inverse: tuple[Any, Any]  # ... and of its inverse
    tiles: tuple[Any, Any]  # the chunk's queries and keys as the matrix unit reads them
    halves: tuple[Any, Any]  # of the state before the chunk, then of two squares at a time
    values: Any  # those of the chunk, then its outputs


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
    arrays = arrays | {name: pad_numbers(arrays[name]) for name in ("g", "beta")}
    names, pieces = tuple(arrays), split_keys(keys)

    def kernel(*refs):
        states_ref, rows_ref, *others, out_ref, buffers, sums_s, zero_s, (ready, values_ready) = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span, key_head = pl.ds(part * WIDTH, WIDTH), lax.div(head, jnp.int32(shared))

        hold_zero(zero_s)

        def fetch_keys(token):
            landed = locate_buffers(buffers, zero_s).landed
            for name, target in zip(("q", "k"), landed, strict=True):
                for nth, piece in enumerate(pieces):
                    source = given[name].at[pl.ds(token, CHUNK), key_head, piece]
                    plgpu.copy_gmem_to_smem(source, target.at[nth], ready)

        def fetch_values(token):
            target = locate_buffers(buffers, zero_s).values
            plgpu.copy_gmem_to_smem(given["v"].at[pl.ds(token, CHUNK), head, span], target, values_ready)

        def fetch(token):
            fetch_keys(token)
            fetch_values(token)

        def multiply_halves(a, b):
            """Returns the product of two squares in halves; that of their last bits is left out."""
            return multiply(interpret, SQUARE, (a[0], b[0]), (a[0], b[1]), (a[1], b[0]))

        def distances():
            """Which blocks of the diagonal two tokens are in together, in powers of two: 0 for a token and itself."""
            row, column = pair_tokens(zero_s)
            return row ^ column

        def squares():
            """Places of two squares in halves."""
            halves = locate_buffers(buffers, zero_s).halves
            return [[half.at[pl.ds(at, CHUNK)] for half in halves] for at in (0, CHUNK)]

        def invert(lower):
            """Returns the inverse of `I + lower`, a strictly lower triangle that has -1 on its diagonal here: of blocks
            of the diagonal, then of pairs of them. Powers of it, which are as fast, overflow where keys repeat."""

            def join(i, inverse):
                size = lax.shift_left(jnp.int32(2), lax.convert_element_type(i, jnp.int32))
                left, right = squares()
                put(inverse, left)
                between = (distances() ^ size) < size  # from `size` to its double
                for source, target in zip(locate_buffers(buffers, zero_s).lower, right, strict=True):
                    half = plgpu.load(source, layout=LAYOUT)
                    target[...] = jnp.where(between, half, jnp.zeros_like(half))
                plgpu.commit_smem()
                joined = multiply_halves(right, left)
                put(joined, right)
                plgpu.commit_smem()
                return inverse - multiply_halves(left, right)

            put(lower, locate_buffers(buffers, zero_s).lower)
            return lax.fori_loop(0, 5, join, jnp.where(distances() < 2, -lower, 0.0))

        def run_chunk(token, count, state, next_token):
            gates = load_numbers(given["g"].at[head], token, count, COLUMN)
            gates = columns(jnp.maximum(gates, LEAST_GATE), SQUARE)

            def load_beta():
                return lines(load_numbers(given["beta"].at[head], anew(token), count, ROW), SQUARE)

            since = jnp.where(see_tokens(zero_s), gates, 0.0).sum(axis=1)  # up to each token, its own gate included
            whole = gates.sum(axis=1)
            sums_s[...] = since
            plgpu.barrier_wait(ready)
            landed, _, _, (q_s, k_s), *_ = locate_buffers(buffers, zero_s)
            for source, target in zip(landed, (q_s, k_s), strict=True):
                lay_out(source, target, count)
            plgpu.commit_smem()

            def decay(products):
                """Returns what tokens are to later ones, and to themselves."""
                since_across = plgpu.load(sums_s, layout=COLUMN)
                products = products * jnp.exp(lines(since, SQUARE) - columns(since_across, SQUARE))
                return jnp.where(see_tokens(zero_s), products, 0.0)

            lower = decay(multiply(interpret, SQUARE, (k_s, k_s.T))) * load_beta()
            put(invert(jnp.where(distances() == 0, -1.0, lower)), locate_buffers(buffers, zero_s).inverse)
            _, _, _, tiles, halves, _ = locate_buffers(buffers, zero_s)
            for x, piece in zip(state, pieces, strict=True):
                put(x, [half.at[piece] for half in halves])
            plgpu.commit_smem()
            held = [half.at[pl.ds(0, keys)] for half in halves]
            found, y = (
                multiply(interpret, SQUARE, *((tile, half) for half in held)) * lines(jnp.exp(since), SQUARE)
                for tile in tiles[::-1]
            )
            plgpu.barrier_wait(values_ready)
            values_s = locate_buffers(buffers, zero_s).values
            lacks = (load_tokens(values_s, anew(count)).astype(jnp.float32) - found) * load_beta()
            left, right = squares()
            put(lacks, right)
            plgpu.commit_smem()
            gains = multiply_halves(locate_buffers(buffers, zero_s).inverse, right)  # put, for the registers' sake
            left, right = squares()
            put(gains, left)
            q_s, k_s = locate_buffers(buffers, zero_s).tiles
            put(decay(multiply(interpret, SQUARE, (q_s, k_s.T))), right)
            plgpu.commit_smem()
            next_token(fetch_keys)
            y = (y + multiply_halves(right, left)) * given["scale"][0]
            values_s = locate_buffers(buffers, zero_s).values
            write_tokens(lambda tokens: out_ref.at[tokens, head, span], values_s, anew(token), anew(count), y)
            # What each token's gain is worth to the state at the chunk's end.
            put(take(left) * lines(jnp.exp(whole - since), SQUARE), left)
            plgpu.commit_smem()
            next_token(fetch_values)
            kept = lines(jnp.exp(whole), SQUARE)
            return tuple(
                x * kept + multiply(interpret, SQUARE, *((k_s.at[:, piece].T, half) for half in left))
                for x, piece in zip(state, pieces, strict=True)
            )

        def places(slot):
            here = pl.ds(anew(part) * WIDTH, WIDTH)  # or addresses would be kept from the reads to the writes
            return [states_ref.at[slot, anew(head), piece, here] for piece in pieces]

        walk_rows(rows_ref, first, states, ChunkWalk(fetch, places, run_chunk), snapshots_ref, every)

    def gated_delta_rule_chunks(*refs):  # the name that profiles and dumps show
        buffers = DeltaBuffers(
            (landing(len(pieces), CHUNK, PIECE),) * 2,
            (operand(*SQUARE),) * 2,
            (operand(*SQUARE),) * 2,
            (operand(CHUNK, keys),) * 2,
            (operand(max(keys, 2 * CHUNK), WIDTH),) * 2,
            landing(CHUNK, WIDTH),
        )
        barriers = plgpu.Barrier(num_arrivals=2 * len(pieces)), plgpu.Barrier()
        shared = plgpu.RefUnion(buffers.landed, (buffers.lower, buffers.inverse))
        numbers = plgpu.SMEM((CHUNK,), jnp.float32), plgpu.SMEM((1,), jnp.int32)

        def run(shared, rest, *others):
            landed, triangles = shared
            kernel(*refs, DeltaBuffers(landed, *triangles, *rest), *others)

        pl.run_scoped(run, shared, buffers[3:], *numbers, barriers)

    return launch_chunks(
        gated_delta_rule_chunks, out, states, rows, snapshots, arrays, (num_heads, values // WIDTH), interpret
    )
