"""What a chunk's tokens are to one another in a delta rule with a gate a channel, as `delta_pairs` with a gate a head.

What one token's keys are to another's is a sum over channels, each with its own gates between the two: no factor of the
product. So tokens are taken by how far they are apart. Of 8, 16 or 32 tokens and the next as many, all pairs have the
border between both: keys decayed from there to where they are, and from where they are to there, have products that are
decayed as they should be, and no exponential is above 1. Eight tokens among themselves are taken from their middle: by
exponentials of both signs, of four gates at most, which bounds how strong a gate may be. Sums of gates are products
with ones and zeros: nothing is subtracted.

What the state gives and what it gains is of keys and queries that are decayed here, so that the walk has no gates.
"""

import math
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
    PIECE,
    ROW,
    SQUARE,
    add_products,
    await_outputs,
    columns,
    hold_zero,
    index,
    landing,
    lines,
    load_numbers,
    load_tokens,
    locate_buffers,
    multiply,
    operand,
    pad_numbers,
    pair_tokens,
    split_keys,
)
from pallas_kernels.gpu.recurrence.delta_pairs import invert_triangle
from pallas_kernels.gpu.recurrence.halves import halve, pair_halves, put
from pallas_kernels.gpu.tiles import LAYOUT, InterpretParams, anew, full, store

KEYS = 128  # of a head
# What the walk multiplies with, in order: keys and queries decayed since the chunk's beginning, squares, keys decayed
# until its end.
SINCE_KEYS, SINCE_QUERIES, SQUARES, UNTIL_KEYS = OPERANDS = range(4)
HALVES = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
INNER = 4  # tokens on either side of the middle of those that are taken from there
# Of a token and channel, in logarithms: float32 sees no state through it, and times four either way, e^72, it leaves
# room for keys.
LEAST_GATE = -18.0
LOG2_E = math.log2(math.e)


class ChannelPairs(NamedTuple):
    """What the walk over a row's chunks takes of each."""

    # bf16[C, H, 4, 128, 128], halves below one another; both squares of `ChunkPairs` beside one another
    operands: Any
    kept: Any  # f32[C, H, 128], what the chunk leaves of a state


class ChannelBuffers(NamedTuple):
    """Shared memory: so much that two thread blocks share a multiprocessor."""

    landed: tuple[Any, Any]  # queries and keys as bulk copies bring them
    landed_gates: Any  # as bulk copies bring them
    gates: tuple[Any, Any]  # their halves, in the same memory
    decayed: tuple[Any, Any]  # ... and those of keys or queries that are decayed, of two pieces or kinds
    results: tuple[Any, Any]  # ... and of squares that are written
    lower: tuple[Any, Any]  # ... and of the triangle
    left: tuple[Any, Any]  # ... and of a square
    right: tuple[Any, Any]  # ... and of another


def relate_channels(arrays: dict[str, jax.Array], chunks: jax.Array, interpret: InterpretParams) -> ChannelPairs:
    """Returns what the tokens of each chunk are to one another; anything where `chunks` has no tokens.

    Args:
      arrays: `q`, `k`, `g` and `beta` of all tokens, the first two in bfloat16, with a gate for each of 128 channels.
      chunks: `i32[C, 2]`, of `rows.plan_chunks`.
    """
    given = {name: arrays[name] for name in ("q", "k")}
    given |= {"g": arrays["g"].astype(jnp.float32), "beta": pad_numbers(arrays["beta"])}
    num_heads, key_heads = given["g"].shape[1], given["k"].shape[1]
    shared, pieces = num_heads // key_heads, split_keys(KEYS)

    def relate_chunk(nth, head, token, count, given, out, buffers, kept_s, zero_s, ready):
        key_head = lax.div(head, jnp.int32(shared))

        def located():
            return locate_buffers(buffers, zero_s)

        def load(which, piece):
            """Loads 64 channels of queries, or of keys."""
            return plgpu.load(located().landed[which].at[piece], layout=LAYOUT, optimized=False).astype(jnp.float32)

        def find_between(edges):
            """Returns which of the chunk's tokens are those from one to another, `edges(token)`."""
            row, column = pair_tokens(zero_s)
            first, last = edges(row)
            return (column >= first) & (column <= last)

        def find_ones(edges):
            """Returns ones at those tokens: products with them are sums of gates."""
            return jnp.where(find_between(edges), 1.0, 0.0).astype(jnp.bfloat16)

        def sum_gates(ones, piece):
            """Returns sums of 64 channels' gates."""
            return multiply(interpret, SQUARE, *((ones, half.at[piece]) for half in located().gates))

        def locate_decayed(piece):
            return [half.at[piece] for half in located().decayed]

        def each_piece(run, carry=()):
            """Runs 64 channels after others: in a loop, for as much code again would not fit the instruction cache."""

            def run_piece(i, carry):
                return run(lax.convert_element_type(i, jnp.int32), carry)

            return lax.fori_loop(0, len(pieces), run_piece, carry)

        def write(place, halves, piece):
            """Begins to write halves of 64 columns of an operand."""
            plgpu.commit_smem()
            for here, half in zip(HALVES, halves, strict=True):
                plgpu.copy_smem_to_gmem(half, out.operands.at[nth, head, place, here, pl.ds(piece * PIECE, PIECE)])

        def write_decayed(edges, *places):
            """Writes keys, or keys and queries, that are decayed by the gates of such tokens."""
            ones = find_ones(edges)

            def write_piece(piece, _):
                decay = jnp.exp2(sum_gates(ones, piece))
                for which, place in zip((1, 0), places, strict=False):
                    target = locate_decayed(which)
                    put(interpret, load(which, piece) * decay, target)
                    write(place, target, piece)
                await_outputs()  # others take their place
                return ()

            each_piece(write_piece)

        def relate(size, squares, *, is_inner=False):
            """Returns squares with what tokens are to one another, queries and keys to keys, that have a border between
            them and are at most `size` from it; or of eight tokens all."""

            def to_border(token):
                is_behind = (token & size) != 0
                return jnp.where(is_behind, token & -size, token + 1), jnp.where(is_behind, token, token | (size - 1))

            def seen(token):
                last = token if is_inner else jnp.where((token & size) != 0, (token & -size) - 1, -1)
                return token & (-2 * size), last

            ones = find_ones(to_border)

            def relate_piece(piece, found):
                sums = sum_gates(ones, piece)
                if is_inner:  # some are against time: before the middle what sees, behind it what is seen
                    row = index(SQUARE, 0) + zero_s[0]
                    sums = jnp.where((row & size) != 0, sums, -sums)
                decay, decayed = jnp.exp2(sums), locate_decayed(piece)
                put(interpret, load(1, piece) * (jnp.exp2(-sums) if is_inner else decay), decayed)
                plgpu.commit_smem()
                transposed = [Transposed(half) for half in decayed]
                see = (
                    halve(interpret, load(0, piece) * decay),
                    (halve(interpret, load(1, piece) * decay) if is_inner else decayed),
                )
                return add_products(interpret, found, *(pair_halves(x, transposed) for x in see))

            found, is_seen = each_piece(relate_piece, (full(SQUARE, 0.0, LAYOUT),) * 2), find_between(seen)
            return tuple(jnp.where(is_seen, *pair) for pair in zip(found, squares, strict=True))

        def relate_beyond(level, squares):
            return relate(lax.shift_left(jnp.int32(2 * INNER), lax.convert_element_type(level, jnp.int32)), squares)

        def relate_all():
            return lax.fori_loop(0, 3, relate_beyond, relate(jnp.int32(INNER), (0.0, 0.0), is_inner=True))

        hold_zero(zero_s)
        for each, piece in enumerate(pieces):
            tokens = pl.ds(token, CHUNK)
            for name, target in zip(("q", "k"), located().landed, strict=True):
                plgpu.copy_gmem_to_smem(given[name].at[tokens, key_head, piece], target.at[each], ready)
            plgpu.copy_gmem_to_smem(given["g"].at[tokens, head, piece], located().landed_gates.at[each], ready)
        plgpu.barrier_wait(ready)

        @pl.when(count < CHUNK)
        def leave_out_others():
            for landed in (*located().landed, located().landed_gates):
                for each in range(len(pieces)):
                    store(landed.at[each], load_tokens(landed.at[each], count))

        gates = [plgpu.load(located().landed_gates.at[each], layout=LAYOUT, optimized=False) for each in (0, 1)]
        for each, x in enumerate(gates):
            x = jnp.maximum(x, LEAST_GATE) * LOG2_E  # decays are powers of two
            put(interpret, x, [half.at[each] for half in located().gates])
            kept_s.at[pieces[each]][...] = jnp.exp2(x.sum(axis=0))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(kept_s, out.kept.at[nth, head])
        write_decayed(lambda token: (0, token), SINCE_KEYS, SINCE_QUERIES)
        write_decayed(lambda token: (token + 1, CHUNK), UNTIL_KEYS)
        queries, lower = relate_all()
        put(interpret, queries, located().results)
        write(SQUARES, located().results, 1)
        beta, beta_across = (
            load_numbers(given["beta"].at[head], anew(token), anew(count), layout) for layout in (ROW, COLUMN)
        )
        inverse = invert_triangle(lower * lines(beta, SQUARE), located, zero_s, interpret)
        await_outputs()
        put(interpret, inverse * columns(beta_across, SQUARE), located().results)
        write(SQUARES, located().results, 0)
        await_outputs()

    def delta_rule_channel_pairs(chunks_ref, *refs):  # the name that profiles and dumps show
        nth, head = (lax.axis_index(name) for name in ("chunk", "head"))
        given_refs, out = dict(zip(given, refs, strict=False)), ChannelPairs(*refs[len(given) :])
        token, count = chunks_ref[nth, 0], chunks_ref[nth, 1]
        tokens = (landing(len(pieces), CHUNK, PIECE),) * 2
        gates = (operand(len(pieces), *SQUARE),) * 2
        squares = (operand(*SQUARE),) * 2
        landed_gates = landing(len(pieces), CHUNK, PIECE, dtype=jnp.float32)
        shared = plgpu.RefUnion(landed_gates, (gates, gates), (squares,) * 4)
        numbers = plgpu.SMEM((KEYS,), jnp.float32), plgpu.SMEM((1,), jnp.int32)

        def run(tokens, shared, *others):
            landed_gates, others_there, triangles = shared
            buffers = ChannelBuffers(tokens, landed_gates, *others_there, *triangles)
            relate_chunk(nth, head, token, count, given_refs, out, buffers, *others)

        ready = plgpu.Barrier(num_arrivals=3 * len(pieces))
        pl.when(count > 0)(lambda: pl.run_scoped(run, tokens, shared, *numbers, ready))

    of_heads = chunks.shape[0], num_heads
    operands = jax.ShapeDtypeStruct((*of_heads, len(OPERANDS), 2 * CHUNK, KEYS), jnp.bfloat16)
    return ChannelPairs(
        *plgpu.kernel(
            delta_rule_channel_pairs,
            out_type=(operands, jax.ShapeDtypeStruct((*of_heads, KEYS), jnp.float32)),
            grid=of_heads,
            grid_names=("chunk", "head"),
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
            interpret=interpret,
        )(chunks, *given.values())
    )
