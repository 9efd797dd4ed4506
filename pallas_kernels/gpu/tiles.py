"""What the kernels share: tiles, the stream of K and V through the block table, and the softmax's small steps.

A tile is a run of one row's tokens, counted from its first; it knows nothing of blocks. Tile and block meet in a piece,
the longest run that divides both: every piece lies in one block, and is one bulk copy.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.batch import StoredKV
from pallas_kernels.common.masks import WindowMask

InterpretParams = plgpu.InterpretGPUParams | None


class Operands(NamedTuple):
    """What every kernel over a step's tokens takes."""

    q: jax.Array  # [N, H, D], D a multiple of 64: all tokens of the step
    stored: StoredKV  # D' of the pool at least D; scales with those of a token beside one another
    tables: jax.Array  # i32[S, M]
    scalars: jax.Array  # f32[2], see `logits_base2`
    window_mask: WindowMask  # how far back tokens see, where a `token_mask` does not say more
    soft_cap: bool
    interpret: InterpretParams
    sinks: jax.Array | None = None  # one more logit in each softmax's denominator
    parts: int = 1  # of the query heads of a KV head, each in thread blocks of its own
    head_dim: int = 0  # of the caller's

    @property
    def head_parts(self) -> int:
        """Parts of all KV heads: for each of them the kernels run as if it were a KV head."""
        return self.stored.kv.shape[2] * self.parts

    def kv_head(self, head):
        """The KV head that a part belongs to."""
        return head if self.parts == 1 else lax.div(head, jnp.int32(self.parts))

    @property
    def is_uniform(self) -> bool:
        """Whether outputs can be written through references: see `varies`."""
        return not (varies(self.q) or varies(self.stored.kv))


LAYOUT = plgpu.Layout.WGMMA  # how a product's result lies in registers
# How a 16-bit operand lies in shared memory. (The stubs take the classes for abstract ones.)
OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# Any rows, and no two threads of a warp at one bank.
SINGLE_ROWS = (plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
SINGLE_ROWS_32 = (plgpu.TilingTransform((1, 32)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tokens of K and V in one step of a kernel, and how many steps are in flight."""

    tokens: int
    stages: int

    def piece(self, block_size: int) -> int:
        """Tokens in one bulk copy."""
        return math.gcd(self.tokens, block_size)

    def pieces(self, block_size: int) -> int:
        """Bulk copies that fill one tile of K, or of V."""
        return self.tokens // self.piece(block_size)


def sink_tiles(window_mask: WindowMask, tokens: int) -> int:
    """Tiles of a row's first tokens, where a window leaves them to be seen."""
    return -(-window_mask.sink_tokens // tokens)


def walk_from(tile, window_mask: WindowMask, tokens: int):
    """Returns the step at which the walk over a row begins if its window begins in this tile. Tiles of sink tokens are
    walked as if they stood directly before it; tiles in between are skipped."""
    before = sink_tiles(window_mask, tokens)
    return jnp.maximum(tile - before, 0) if before else tile


def tile_at(place, first_seen, window_mask: WindowMask, tokens: int):
    """Which tile stands at a place of the walk whose window begins at `first_seen`."""
    if not window_mask.sink_tokens:
        return place
    nth = place - walk_from(lax.div(first_seen, jnp.int32(tokens)), window_mask, tokens)
    return jnp.where(nth < sink_tiles(window_mask, tokens), nth, place)


def tick(interpret: InterpretParams) -> None:
    """Advances the clock of the interpreter's race detector, which only copies and barriers do. Else what is read would
    count as part of whatever was signalled before."""
    if interpret is not None:
        plgpu.commit_smem()


def anew(x):
    """x, such that what is derived from it is derived where this stands.

    Else the compiler derives it once, ahead of the loop or of the branch, and keeps it in registers that accumulators
    need; it would spill.
    """
    return lax.optimization_barrier(x)


class Walk(NamedTuple):
    """The tiles of a row that a thread block walks over: see `fetch`."""

    row: jax.Array
    head: jax.Array | int
    start: jax.Array
    num_tiles: jax.Array
    first_seen: jax.Array
    length: jax.Array


class Ring(NamedTuple):
    """Slots of shared memory that tiles of K or of V go through."""

    slots: Any  # [.., tokens, columns]
    ready: Any  # barriers of the slots: filled
    free: Any  # ... to be filled again
    values: int = 0  # of the pool's second axis
    first_slot: int = 0  # of those that are this ring's
    first_column: int = 0  # of the pool's that the slots have


def fetch(
    kv_ref,
    tables_ref,
    walk: Walk,
    tile: Tile,
    window_mask: WindowMask,
    rings: Sequence[Ring],
    *,
    in_warps,
    scales=None,
    groups=None,
) -> None:
    """The producer: copy tiles `start`, `start + 1`, ... of a row's K and V into a ring of slots each, or of V's
    columns into several; of latent rows into one.

    Places before `first_seen`, first tokens aside, and from `length` on are not fetched: another piece that is seen is
    fetched in their stead, so that every slot gets the same number of copies. Table entries are clamped into the pool.

    `scales`: those of a quantized pool, `[num_blocks + 1, 2, K, block_size]`, and their ring, `[stages, 2, tokens]`:
    they come with the keys. With `groups`, `nibbles.EntryGroups`, `block_size * G`, and `[stages, 2, pieces, line]`.
    """
    row, head, start, num_tiles, first_seen, length = walk
    num_blocks, _, _, block_size, stored_dim = kv_ref.shape
    piece, stages = tile.piece(block_size), tile.stages
    low, high = (lax.div(position, jnp.int32(piece)) for position in (first_seen, length - 1))

    def find_columns(ring):
        """Those of the pool in a ring's slots. What lies beyond the pool's comes as zeros, for the offset is not known
        ahead."""
        count = ring.slots.shape[-1]
        is_within = ring.first_column + count <= stored_dim
        return pl.ds(ring.first_column if is_within else ring.first_column + 0 * row, count)

    def stream(*rings):
        @pl.loop(0, num_tiles)
        def fill(i):
            slot = lax.rem(i, jnp.int32(stages))
            places = []
            for j in range(tile.pieces(block_size)):  # before the wait for a free slot, which hides the reads' latency
                place = tile_at(start + i, first_seen, window_mask, tile.tokens) * (tile.tokens // piece) + j
                least = low
                if window_mask.sink_tokens:
                    least = jnp.where(place <= (window_mask.sink_tokens - 1) // piece, place, low)
                place = jnp.clip(place, least, high) * piece
                block = tables_ref[row, lax.div(place, jnp.int32(block_size))]
                offset = 0 if block_size == piece else lax.rem(place, jnp.int32(block_size))
                places.append((jnp.clip(block, 0, num_blocks - 1), pl.ds(offset, piece)))
            for ring in rings:
                nth = slot + ring.first_slot

                @pl.when(i >= stages)
                def wait_until_free(free_ref=ring.free, nth=nth):
                    plgpu.barrier_wait(free_ref.at[nth])

                for j, (block, span) in enumerate(places):
                    source = kv_ref.at[block, ring.values, head, span, find_columns(ring)]
                    here = pl.ds(j * piece, piece)
                    plgpu.copy_gmem_to_smem(source, ring.slots.at[nth, here], ring.ready.at[nth])
                    for which in range(2 if scales is not None and ring.values == 0 else 0):
                        if groups is None:
                            source = scales[0].at[block, which, head, span]
                            plgpu.copy_gmem_to_smem(source, scales[1].at[slot, which, here], ring.ready.at[nth])
                            continue
                        for begin, size in groups.copies:
                            source = scales[0].at[block, which, head, pl.ds(span.start * groups.count + begin, size)]
                            target = scales[1].at[slot, which, j, pl.ds(begin, size)]
                            plgpu.copy_gmem_to_smem(source, target, ring.ready.at[nth])

        @pl.loop(jnp.maximum(num_tiles - stages, 0), num_tiles)
        def drain(i):  # JAX 0.11's interpreter insists that every arrival is seen
            for ring in rings:
                plgpu.barrier_wait(ring.free.at[lax.rem(i, jnp.int32(stages)) + ring.first_slot])

    if not in_warps:
        return stream(*rings)

    @plgpu.warp_map  # a copy by one warp needs no barrier of all four; and K waits for no slot of V's
    def one_warp_each(warp):
        for nth, ring in enumerate(rings):
            pl.when(warp == nth)(functools.partial(stream, ring))


def varies(x) -> bool:
    """Tells whether x differs among the devices of a `shard_map`; JAX takes no such array in warps or as a ref."""
    return bool(jax.typeof(x).manual_axis_type.varying)


def select_seen_values(v_ref, first, stop, sinks=None, *, share=0, shares: int = 1) -> None:
    """Overwrite V's rows before `first` and from `stop` on with zeros, whatever they hold; not those before `sinks`.

    With `shares` warpgroups at it, each does the part that is its `share`.
    """
    tokens, head_dim = v_ref.shape
    # One swizzled tile at a time, for the registers' sake.
    for i, (token, column) in enumerate(itertools.product(range(0, tokens, 64), range(0, head_dim, 64))):

        @pl.when(share == i % shares)
        def select(token=token, column=column):
            part = v_ref.at[pl.ds(token, 64), pl.ds(column, 64)]
            v = plgpu.load(part, layout=LAYOUT)
            place = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=LAYOUT) + token
            seen = place >= first if sinks is None else (place >= first) | (place < sinks)
            part[...] = jnp.where(seen & (place < stop), v, jnp.zeros_like(v))


def logit_scalars(scale, soft_cap) -> jax.Array:
    """`f32[2]` for `logits_base2`: what products are multiplied by, and what is left to multiply after the cap."""
    log2e = math.log2(math.e)
    if soft_cap is None:
        return jnp.stack([jnp.asarray(scale, jnp.float32) * log2e, jnp.float32(1)])
    scale, soft_cap = jnp.asarray(scale, jnp.float32), jnp.asarray(soft_cap, jnp.float32)
    return jnp.stack([scale / soft_cap * (2 * log2e), soft_cap * log2e])


def logits_base2(s, scale, cap):
    """Products of queries and keys as logits in base 2, as the chip's exponential is; capped unless `cap` is None.

    tanh(x) is 1 - 2 / (1 + e^2x): the chip's own approximation of tanh is off by 5e-4 of it, times a cap of 50.
    """
    if cap is None:
        return s * scale
    return cap - (2.0 * cap) / (1.0 + jnp.exp2(s * scale))


def safe_maximum(m):
    """0 where nothing was seen yet, so that no difference is -inf - -inf."""
    return jnp.where(m == -jnp.inf, 0.0, m)


def add_sink(m, total, sink):
    """A softmax's maximum and sum with one more logit of its own, in natural terms, where anything was seen at all; and
    what the products so far are multiplied by."""
    sink = sink * math.log2(math.e)
    m, old = jnp.maximum(m, jnp.where(m == -jnp.inf, -jnp.inf, sink)), m
    safe = safe_maximum(m)
    alpha = jnp.exp2(old - safe)
    return m, total * alpha + jnp.where(m == -jnp.inf, 0.0, jnp.exp2(sink - safe)), alpha


def store(ref, x) -> None:
    """Store what lies in registers as `LAYOUT` says, in whatever small pieces that takes."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # JAX 0.11
        ref[...] = x


def load_wide(ref, shape, axis: int):
    """A line of integers in global memory, along one axis of an array that lies in registers as `LAYOUT` says."""
    line = plgpu.load(ref, layout=LAYOUT.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(line, shape, [axis])


def full(shape, value, layout):
    """A float32 array of one value, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
