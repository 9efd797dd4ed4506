"""How large the tiles and steps of XLA's loops are: by the platform, the bytes of a tile and what rows could hold."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.platforms import is_for_gpu

DETERMINISTIC_ITEMS = 8  # of a step whose shapes may not follow what there is to do


class LoopSizes(NamedTuple):
    """How much a step of a loop reads and computes. Many queries share one reading of their context; one alone gains
    nothing from a long tile, and loses what its row does not fill."""

    step_bytes: int  # of keys, values and logits
    # If all that rows could hold is no more than this, it is read at once: that is a third of the kernels to compile
    # and to run, which costs more than to read what rows do not hold.
    at_once_bytes: int
    decode_context: int  # tokens of a tile of one query; twice as many where a number is a byte
    queries: int  # of a tile where there is more than one
    context: int  # tokens of such a tile
    selection_bytes: int  # of what queries score, or have chosen, and of their logits


MB = 2**20
# On a CPU a step should be so long that its fixed costs do not show, and stay in cache: found by experiment on two
# cores. On a GPU it is some 20 launches, 50 us on an H200, and scratch memory is what it costs to have few of them.
# See benchmarks/NOTES.md.
SIZES = {
    False: LoopSizes(4 * MB, 4 * MB, decode_context=64, queries=32, context=256, selection_bytes=8 * MB),
    True: LoopSizes(128 * MB, 32 * MB, decode_context=256, queries=128, context=512, selection_bytes=128 * MB),
}


def find_sizes() -> LoopSizes:
    """Returns the sizes for the platform that a program traced now is lowered for."""
    return SIZES[is_for_gpu()]


class Tiling(NamedTuple):
    """One step of the loop: `items` tiles of `queries` tokens by `pieces` runs of `run` context tokens.

    A run lies in one block. A block is one run, or several when it is longer than a tile.
    """

    items: int
    queries: int
    pieces: int
    run: int
    block_size: int
    capacity: int  # tokens that a row's table can hold

    @property
    def runs_per_block(self) -> int:
        return -(-self.block_size // self.run)

    def runs(self, tokens: jax.Array) -> jax.Array:
        """The runs, the last one perhaps partly filled, that hold the first `tokens` tokens of a row."""
        full, rest = parts(tokens, self.block_size)
        return full * self.runs_per_block + cover(rest, self.run)


def parts(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """`x // n` and `x % n` of what is not negative: one operation each, where those take a dozen for signs."""
    size = jnp.full_like(x, n)
    return (x, jnp.zeros_like(x)) if n == 1 else (jax.lax.div(x, size), jax.lax.rem(x, size))


def cover(x: jax.Array, n: int) -> jax.Array:
    """Returns how many pieces of size n hold x, which is not negative."""
    return parts(x + (n - 1), n)[0]


def choose_tiling(
    q: jax.Array, kv: jax.Array, tables: jax.Array, queries: int, lanes: int, deterministic: bool = False
) -> Tiling:
    """Tile sizes for queries `[tokens, H, D]`, `queries` of them to each of so many lanes. `deterministic`: for all
    tables."""
    block_size, sizes = kv.shape[3], find_sizes()
    decode_context = sizes.decode_context * (2 if kv.dtype.itemsize == 1 else 1)
    context = decode_context if queries == 1 else sizes.context
    run = min(block_size, context)
    pieces = max(1, context // run)
    if not deterministic:
        pieces = min(pieces, tables.shape[1] * -(-block_size // run))
    context = pieces * run
    # No more than there can be, if all rows hold what they could.
    most = DETERMINISTIC_ITEMS if deterministic else lanes * -(-tables.shape[1] * block_size // context)
    items = max(1, min(sizes.step_bytes // _item_bytes(q, kv, queries, context), most))
    return Tiling(items, queries, pieces, run, block_size, tables.shape[1] * block_size)


def tile_rows(q: jax.Array, kv: jax.Array, tables: jax.Array, queries: int) -> Tiling | None:
    """A tile for each row, of `queries` tokens and all that its table could hold. None: too much for one step."""
    block_size, (rows, blocks) = kv.shape[3], tables.shape
    if rows * _item_bytes(q, kv, queries, blocks * block_size) > find_sizes().at_once_bytes:
        return None
    return Tiling(rows, queries, blocks, block_size, block_size, blocks * block_size)


def _item_bytes(q: jax.Array, kv: jax.Array, queries: int, context: int) -> int:
    """Returns the bytes of an item's keys, values and logits."""
    (num_heads, head_dim), (_, parts, num_kv_heads, *_) = q.shape[1:], kv.shape
    return context * (parts * num_kv_heads * head_dim * kv.dtype.itemsize + 4 * num_heads * queries)
