"""What a chunk's tokens are to one another in a delta rule: of all chunks and heads at once, for none needs a state.

What a token adds to the state depends on what the chunk's earlier tokens add: a triangular system. Its inverse turns
what the state before the chunk lacks of the values into what the tokens add (https://arxiv.org/abs/2412.06464).
"""

from collections.abc import Callable
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
    await_outputs,
    columns,
    hold_zero,
    landing,
    lay_out,
    lines,
    load_numbers,
    locate_buffers,
    multiply,
    operand,
    pad_numbers,
    pair_tokens,
    see_tokens,
    split_keys,
)
from pallas_kernels.gpu.recurrence.halves import pair_halves, put
from pallas_kernels.gpu.tiles import InterpretParams, anew


class ChunkPairs(NamedTuple):
    """What the walk over a row's chunks takes of each: all as the matrix unit reads it, 0 beyond a chunk's tokens."""

    queries: Any  # bf16[C, heads of keys, 64, K]
    keys: Any
    sums: Any  # f32[C, H, 64], of gates up to each token, its own included
    squares: Any  # bf16[C, H, 4, 64, 64], halves of what tokens gain of what others lack, and get of what others gain


class PairBuffers(NamedTuple):
    """Shared memory: so much that three thread blocks share a multiprocessor."""

    landed: tuple[Any, Any]  # queries and keys as bulk copies bring them
    results: tuple[Any, Any]  # halves of what is written, in the same memory
    lower: tuple[Any, Any]  # ... and of the triangle
    tiles: tuple[Any, Any]  # queries and keys as the matrix unit reads them
    left: tuple[Any, Any]  # halves of a square, in the same memory
    right: tuple[Any, Any]  # ... and of another


def relate_tokens(arrays: dict[str, jax.Array], chunks: jax.Array, interpret: InterpretParams) -> ChunkPairs:
    """Returns what the tokens of each chunk are to one another; anything where `chunks` has no tokens.

    Args:
      arrays: `q`, `k`, `g` and `beta` of all tokens, the first two in bfloat16, with a gate a head.
      chunks: `i32[C, 2]`, of `rows.plan_chunks`.
    """
    given = {name: arrays[name] for name in ("q", "k")} | {name: pad_numbers(arrays[name]) for name in ("g", "beta")}
    (_, key_heads, keys), num_heads = given["k"].shape, given["g"].shape[0]
    shared, pieces = num_heads // key_heads, split_keys(keys)

    def relate(nth, head, token, count, given, out, buffers, sums_s, zero_s, ready):
        key_head = lax.div(head, jnp.int32(shared))

        def located():
            return locate_buffers(buffers, zero_s)

        def decay(products):
            """Returns what tokens are to later ones, and to themselves."""
            since_across = plgpu.load(sums_s, layout=COLUMN)
            products = products * jnp.exp(lines(since, SQUARE) - columns(since_across, SQUARE))
            return jnp.where(see_tokens(zero_s), products, 0.0)

        def write(square, first):
            """Writes a square in halves."""
            results = located().results
            put(interpret, square, results)
            plgpu.commit_smem()
            for half, source in enumerate(results):
                plgpu.copy_smem_to_gmem(source, out.squares.at[nth, head, first + half])

        hold_zero(zero_s)
        for name, target in zip(("q", "k"), located().landed, strict=True):
            for each, piece in enumerate(pieces):
                source = given[name].at[pl.ds(token, CHUNK), key_head, piece]
                plgpu.copy_gmem_to_smem(source, target.at[each], ready)
        gates = load_numbers(given["g"].at[head], token, count, COLUMN)
        gates = columns(jnp.maximum(gates, LEAST_GATE), SQUARE)
        since = jnp.where(see_tokens(zero_s), gates, 0.0).sum(axis=1)
        sums_s[...] = since
        plgpu.barrier_wait(ready)
        tiles = q_s, k_s = located().tiles
        for source, target in zip(located().landed, tiles, strict=True):
            lay_out(source, target, count)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_s, out.sums.at[nth, head])

        @pl.when(lax.rem(head, jnp.int32(shared)) == 0)
        def write_tiles():
            for source, target in zip(tiles, (out.queries, out.keys), strict=True):
                plgpu.copy_smem_to_gmem(source, target.at[nth, key_head])

        write(decay(multiply(interpret, SQUARE, (q_s, Transposed(k_s)))), 2)
        beta, beta_across = (
            load_numbers(given["beta"].at[head], anew(token), anew(count), layout) for layout in (ROW, COLUMN)
        )
        lower = decay(multiply(interpret, SQUARE, (k_s, Transposed(k_s)))) * lines(beta, SQUARE)
        await_outputs()  # other squares take their place
        inverse = invert_triangle(lower, located, zero_s, interpret)
        write(inverse * columns(beta_across, SQUARE), 0)
        await_outputs()

    def delta_rule_pairs(chunks_ref, *refs):  # the name that profiles and dumps show
        nth, head = (lax.axis_index(name) for name in ("chunk", "head"))
        given_refs, out = dict(zip(given, refs, strict=False)), ChunkPairs(*refs[len(given) :])
        token, count = chunks_ref[nth, 0], chunks_ref[nth, 1]
        squares = ((operand(*SQUARE),) * 2,) * 2
        first = plgpu.RefUnion((landing(len(pieces), CHUNK, PIECE),) * 2, squares)
        second = plgpu.RefUnion((operand(CHUNK, keys),) * 2, squares)
        numbers = plgpu.SMEM((CHUNK,), jnp.float32), plgpu.SMEM((1,), jnp.int32)

        def run(first, second, *others):
            (landed, others_there), (tiles, squares) = first, second
            relate(
                nth, head, token, count, given_refs, out, PairBuffers(landed, *others_there, tiles, *squares), *others
            )

        ready = plgpu.Barrier(num_arrivals=2 * len(pieces))
        pl.when(count > 0)(lambda: pl.run_scoped(run, first, second, *numbers, ready))

    of_keys = jax.ShapeDtypeStruct((chunks.shape[0], key_heads, CHUNK, keys), jnp.bfloat16)
    of_heads = chunks.shape[0], num_heads
    sums = jax.ShapeDtypeStruct((*of_heads, CHUNK), jnp.float32)
    squares = jax.ShapeDtypeStruct((*of_heads, 4, *SQUARE), jnp.bfloat16)
    return ChunkPairs(
        *plgpu.kernel(
            delta_rule_pairs,
            out_type=(of_keys, of_keys, sums, squares),
            grid=of_heads,
            grid_names=("chunk", "head"),
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
            interpret=interpret,
        )(chunks, *given.values())
    )


def invert_triangle(
    lower: jax.Array, located: Callable[[], Any], zero_ref: Any, interpret: InterpretParams
) -> jax.Array:
    """Returns the inverse of `I + lower`, of what is strictly below the diagonal: of blocks of the diagonal, then of
    pairs of them. Powers of it, which are as fast, overflow where keys repeat.

    Args:
      located: returns buffers, of which this uses `lower`, `left` and `right`; see `hold_zero`.
    """

    def is_between(size):
        """Returns which pairs of tokens are of two neighbouring blocks of so many."""
        row, column = pair_tokens(zero_ref)
        return (row ^ column ^ size) < size  # from `size` to its double

    def multiply_squares(a, b):
        return multiply(interpret, SQUARE, *pair_halves(a, b))

    def join(i, inverse):
        size = lax.shift_left(jnp.int32(2), lax.convert_element_type(i, jnp.int32))
        left, right = located().left, located().right
        put(interpret, inverse, left)
        plgpu.commit_smem()
        # Of the triangle all: what is not between two such blocks is none of it in the product either.
        joined = multiply_squares(located().lower, left)
        put(interpret, jnp.where(is_between(size), joined, 0.0), right)
        plgpu.commit_smem()
        return inverse - multiply_squares(left, right)

    row, column = pair_tokens(zero_ref)
    lower = jnp.where(row == column, -1.0, lower)
    put(interpret, lower, located().lower)
    return lax.fori_loop(0, 5, join, jnp.where((row ^ column) < 2, -lower, 0.0))
