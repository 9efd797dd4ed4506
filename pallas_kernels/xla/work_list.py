"""The work list of the XLA path: which tiles of queries meet which tiles of context, as index arithmetic on the device.

Nothing here touches keys, values or queries. A *lane* is a tile of one row's queries; an *item* is a lane and one tile
of the context that it sees. Items are numbered lane by lane, and what the i-th item is follows from cumulative sums, so
the list is never stored and its length is free to follow the data.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import MaskSpec, PagedBatch
from pallas_kernels.common.context_parallel import count_local_tokens, position_of
from pallas_kernels.common.masks import find_last_key
from pallas_kernels.common.ragged_layout import Tokens, default_offsets, locate
from pallas_kernels.common.shared_prefix import Shared
from pallas_kernels.common.tree_attention import Tree, climb
from pallas_kernels.common.xla_cpu import compute_once
from pallas_kernels.xla.tile_sizes import Tiling, cover, parts


class WorkRows(NamedTuple):
    """Where each row's tokens are. Tokens are flat: `query_lens[s]` of row s attend, from `query_starts[s]` on."""

    block_tables: jax.Array  # i32[S, M]
    first_position: jax.Array  # i32[S]: the position of the row's first token of this step
    kv_lens: jax.Array  # i32[S]: the row's length
    query_starts: jax.Array  # i32[S]
    query_lens: jax.Array  # i32[S]
    first: jax.Array | None = None  # i32[S]: the position that reading begins at; None: 0
    # Of rows that stand for several, whose queries see all up to `kv_lens`: i32[tokens], which token stands at a place,
    # and each token's position.
    order: jax.Array | None = None
    position: jax.Array | None = None
    shard: jax.Array | None = None  # i32[2]: which of how many runs of every block are at hand; None: all of it

    def count_slots(self, position: jax.Array, tiling: Tiling) -> jax.Array:
        """Returns how many of a row's slots before a position are here: in this shard, and in the block table."""
        most = jnp.clip(position, 0, None)
        held = most if self.shard is None else count_local_tokens(most, self.shard, tiling.block_size)
        return jnp.minimum(held, tiling.capacity)


def find_rows(token_axes: tuple[int, ...], batch: PagedBatch) -> WorkRows:
    """Returns the rows of a step whose tokens have the axes `(S, T)` or `(N,)`."""
    tables, kv_lens, query_lens, query_starts, shard = batch
    if len(token_axes) == 2:
        start = jnp.arange(tables.shape[0], dtype=jnp.int32) * token_axes[1]
        room = jnp.full_like(start, token_axes[1])
    else:
        start = default_offsets(query_lens) if query_starts is None else query_starts
        room = token_axes[0] - start
    count = jnp.maximum(jnp.minimum(query_lens, room), 0)
    return WorkRows(tables, kv_lens - query_lens, kv_lens, start, count, shard=shard)


def find_groups(rows: WorkRows, shared: Shared, token: Tokens) -> tuple[WorkRows, jax.Array]:
    """Groups of rows that read their first tokens together as rows of their own, and each token's place in them,
    `i32[tokens]`; tokens are flat, and those of no group get the first place behind all."""
    num_tokens = token.row.shape[0]
    number = jnp.arange(num_tokens, dtype=jnp.int32)
    tokens, place, start = (take(x, token.row) for x in (shared.tokens, shared.place, rows.query_starts))
    place = jnp.where(token.valid & (tokens > 0), place + number - start, num_tokens)
    order = jnp.zeros_like(number).at[place].set(number, mode="drop")
    nearest = jnp.where(shared.tokens > 0, rows.first_position, jnp.iinfo(jnp.int32).max)
    before = jnp.full_like(rows.first_position, jnp.iinfo(jnp.int32).max).at[shared.leader].min(nearest)
    groups = WorkRows(
        rows.block_tables, before, shared.tokens, shared.place, shared.queries, None, order, token.position, rows.shard
    )
    return groups, place


class TileMask(NamedTuple):
    """What decides which places of its row a token sees. Tokens are flat."""

    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    mask: jax.Array | None = None  # bool[tokens, C]
    spans: jax.Array | None = None  # i32[tokens]
    tree: Tree | None = None
    blocks: jax.Array | None = None  # i32[S, n]: the logical blocks that rows see, and -1 where there is none
    sink_tokens: int = 0  # of a row's first tokens, which are seen beside the window
    compress_ratio: int | None = None  # tokens of an entry: what places hold, where positions count tokens

    def sink_tiles(self, tiling: "Tiling", rows: WorkRows, first_tile: jax.Array) -> jax.Array | None:
        """Returns how many tiles of sink tokens are seen before the window's first tile; None without sinks."""
        if not self.sink_tokens or self.blocks is not None:
            return None
        tokens = rows.count_slots(jnp.full_like(first_tile, self.sink_tokens), tiling)
        return jnp.minimum(cover(tiling.runs(tokens), tiling.pieces), first_tile)


def find_tile_mask(token_axes: tuple[int, ...], rows: WorkRows, batch: PagedBatch, spec: MaskSpec) -> TileMask:
    """Returns what the tokens of a step see."""
    mask, blocks, tree = spec.mask, spec.blocks, None
    if mask is not None:  # there is always one place, if only one that is not seen
        mask = mask if mask.shape[-1] else jnp.zeros((*mask.shape[:-1], 1), bool)
        mask = mask.reshape(-1, mask.shape[-1])
    if spec.tree is not None:
        token = jax.tree.map(jnp.ravel, locate(token_axes, *batch[1:4]))
        tree = climb(spec.tree.reshape(-1), token, rows.first_position, rows.query_starts, token_axes[-1])
    if blocks is not None:  # no block is read twice; there is always one, if only none
        blocks = blocks if blocks.shape[1] else jnp.full((blocks.shape[0], 1), -1, jnp.int32)
        highest = jax.lax.cummax(jnp.pad(blocks, ((0, 0), (1, 0)), constant_values=-1)[:, :-1], axis=1)
        blocks = jnp.where((blocks > highest) & (blocks < rows.block_tables.shape[1]), blocks, -1)
    spans = None if spec.spans is None else spec.spans.reshape(-1)
    sink_tokens = spec.sink_tokens or 0
    return TileMask(spec.window, spec.chunk, spec.causal, mask, spans, tree, blocks, sink_tokens, spec.compress_ratio)


class Lane(NamedTuple):
    """What there is to know of lanes: of all, or of those that some items belong to. i32, one number for each."""

    row: jax.Array
    token: jax.Array  # the lane's first token
    position: jax.Array  # of that token, if the row's tokens stand in order
    num_tokens: jax.Array  # the row's tokens from the first on, which may be more than a tile has
    first_tile: jax.Array  # the first context tile that the lane sees
    begin: jax.Array  # the number of its first item
    shift: jax.Array  # from an item's number to that of its tile
    # Of its row, as in `WorkRows`:
    first_position: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array


class WorkList(NamedTuple):
    """Lanes, row by row, and how many items there are up to and including each."""

    lanes: jax.Array  # i32[lanes + 1, fields of Lane]
    ends: jax.Array  # i32[lanes]

    @property
    def num_items(self) -> jax.Array:
        """i32[]: the work there is to do. It follows the tokens that rows hold, not what their tables could hold."""
        return self.ends[-1]


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]` for what is never out of range."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def plan(tiling: Tiling, lanes: int, rows: WorkRows, tile_mask: TileMask) -> WorkList:
    """The work list of a step that needs no more than `lanes` lanes; of one-token tiles as many as there are rows."""
    columns = [rows.first_position, rows.kv_lens, rows.query_starts, rows.query_lens]
    if tile_mask.blocks is not None:  # tiles are counted through them
        place = jnp.arange(1, tile_mask.blocks.shape[1] + 1, dtype=jnp.int32)
        columns.append(jnp.max(jnp.where(tile_mask.blocks >= 0, place[None], 0), axis=1, initial=0))
    if tiling.queries == 1:  # of rows of one token the lanes are the rows: nothing needs looking up
        row = jnp.arange(rows.query_lens.shape[0], dtype=jnp.int32)
        first, is_used = jnp.zeros_like(row), rows.query_lens > 0
    else:
        lane = jnp.arange(lanes, dtype=jnp.int32)
        row_lanes = cover(rows.query_lens, tiling.queries)
        row_ends = jnp.cumsum(row_lanes)
        row_lane = row_ends - row_lanes
        row = jnp.searchsorted(row_ends, lane, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, rows.query_lens.shape[0] - 1)
        # Columns side by side cost one gather, which is one kernel to compile and to run, and not one each.
        *columns, its_row_lane = jnp.unstack(take(jnp.stack([*columns, row_lane], axis=1), row), axis=1)
        first, is_used = (lane - its_row_lane) * tiling.queries, lane < row_ends[-1]
    before, end, start, count, *listed = columns
    last = jnp.minimum(first + tiling.queries, count) - 1

    # Spans see ahead, and back to the first token of the step; tokens of a tree may be as shallow as its first.
    stop = before + last + 1 if tile_mask.causal and tile_mask.spans is None else end
    stop = find_last_key(stop - 1, tile_mask.compress_ratio) + 1
    last_tile = cover(tiling.runs(rows.count_slots(stop, tiling)), tiling.pieces)
    first_tile = jnp.zeros_like(last_tile)
    in_order = tile_mask.tree is None and rows.position is None
    oldest = _oldest_seen(before + first if in_order else before, tile_mask)
    if tile_mask.blocks is not None:
        last_tile = cover(tiling.runs(listed[0] * tiling.block_size), tiling.pieces)
    elif oldest is not None or rows.first is not None:
        oldest = jnp.zeros_like(row) if oldest is None else oldest
        oldest = oldest if tile_mask.spans is None else jnp.minimum(oldest, before)
        oldest = oldest if rows.first is None else jnp.maximum(oldest, take(rows.first, row))
        first_tile, _ = parts(tiling.runs(rows.count_slots(oldest, tiling) + 1) - 1, tiling.pieces)
    num_tiles = jnp.maximum(last_tile - first_tile, 0)
    if (sink_tiles := tile_mask.sink_tiles(tiling, rows, first_tile)) is not None:
        num_tiles += sink_tiles
    num_tiles = jnp.where(is_used, num_tiles, 0)
    ends = jnp.cumsum(num_tiles)
    begin = ends - num_tiles
    of_token = row, start + first, before + first, count - first
    known = Lane(*of_token, first_tile, begin, first_tile - begin, before, end, start)
    # Behind the last lane stands that of items beyond the end of the list, which has no token.
    return WorkList(jnp.pad(jnp.stack(known, axis=1), ((0, 1), (0, 0))), ends)


def _oldest_seen(position: jax.Array, tile_mask: TileMask) -> jax.Array | None:
    """The first position that a token at `position` sees by window or chunk; None: all before it."""
    if tile_mask.chunk is not None:
        return position // tile_mask.chunk * tile_mask.chunk
    return None if tile_mask.window is None else position - tile_mask.window + 1


class Items(NamedTuple):
    """The items of one step of the loop."""

    token: jax.Array  # i32[items, queries]: in range also for padding
    is_token: jax.Array  # bool[items, queries]: False for padding
    place: jax.Array  # i32[items]: of the first token among the step's tokens, or in `WorkRows.order`
    block: jax.Array  # i32[items, pieces]: physical; may be out of range, as the table may be
    offset: jax.Array  # i32[items, pieces]: of the run in its block
    seen: jax.Array  # bool[items, queries, pieces * run]: may the query see the place?
    distance: jax.Array  # i32[items, queries, pieces * run]: between their positions


def find_items(tiling: Tiling, work: WorkList, rows: WorkRows, step, tile_mask: TileMask) -> Items:
    """The items number `step * tiling.items` and on. Those beyond the end of the list have no token."""
    item = step * tiling.items + jnp.arange(tiling.items, dtype=jnp.int32)
    number = jnp.searchsorted(work.ends, item, side="right", method="compare_all").astype(jnp.int32)
    lane = Lane(*(x[:, None] for x in jnp.unstack(take(work.lanes, number), axis=1)))
    tile = item[:, None] + lane.shift
    if (sink_tiles := tile_mask.sink_tiles(tiling, rows, lane.first_tile)) is not None:
        nth_tile = item[:, None] - lane.begin
        tile = jnp.where(nth_tile < sink_tiles, nth_tile, tile - sink_tiles)
    return _see(tiling, rows, tile_mask, lane, tile)


def whole_rows(tiling: Tiling, rows: WorkRows, tile_mask: TileMask) -> Items:
    """An item for each row: all its queries, and all that its table could hold. It needs no work list."""
    number = jnp.arange(rows.block_tables.shape[0], dtype=jnp.int32)
    nothing = jnp.zeros_like(number)
    start, before = rows.query_starts, rows.first_position
    known = Lane(number, start, before, rows.query_lens, nothing, nothing, nothing, before, rows.kv_lens, start)
    lane = Lane(*(x[:, None] for x in known))
    return _see(tiling, rows, tile_mask, lane, jnp.zeros((1, 1), jnp.int32), whole=True)


def _see(
    tiling: Tiling, rows: WorkRows, tile_mask: TileMask, lane: Lane, tile: jax.Array, whole: bool = False
) -> Items:
    """The items of some lanes with a tile of the context each, `i32[items, 1]`; `whole`: these are all rows, one after
    another, with all of their tables, in which nothing needs looking up."""
    run = tile * tiling.pieces + jnp.arange(tiling.pieces, dtype=jnp.int32)[None]
    logical, cut = parts(run, tiling.runs_per_block)
    context, offset = tiling.pieces * tiling.run, cut * tiling.run
    begin, places = tile * context, jnp.arange(context, dtype=jnp.int32)[None, None]
    # bool[items, 1, context]: is the place the tile's own, and in the table? None: all whose positions the table has.
    own = None
    position = begin[:, :, None] + places
    if tile_mask.blocks is not None or rows.shard is not None or tiling.block_size % tiling.run:
        # The last run of a block may have to begin inside the one before it, whose tokens are then not its own.
        offset = jnp.minimum(offset, tiling.block_size - tiling.run)
        place = offset[:, :, None] + jnp.arange(tiling.run, dtype=jnp.int32)[None, None]
        own = place >= (cut * tiling.run)[:, :, None]
        own &= logical[:, :, None] * tiling.block_size + place < tiling.capacity
        if tile_mask.blocks is not None:
            blocks = tile_mask.blocks
            logical = blocks if whole else blocks.at[lane.row, logical].get(mode="fill", fill_value=-1)
            own &= (logical >= 0)[:, :, None]
            logical = jnp.maximum(logical, 0)
        if rows.shard is None:
            position = logical[:, :, None] * tiling.block_size + place
        else:
            position = position_of(logical[:, :, None], place, rows.shard, tiling.block_size)
        own, position = (x.reshape(-1, 1, context) for x in (own, position))

    index = jnp.arange(tiling.queries, dtype=jnp.int32)[None]
    token, query, is_token = lane.token + index, lane.position + index, index < lane.num_tokens
    before, end = lane.first_position[:, :, None], lane.kv_lens[:, :, None]
    nth = position - before  # the place's number among the row's new tokens
    if rows.order is not None and rows.position is not None:
        token = rows.order.at[token].get(mode="clip")
        query = take(rows.position, token)
    their_token = lane.query_starts[:, :, None] + nth
    is_new = (nth >= 0) & (position < end)
    last = query if tile_mask.causal else jnp.broadcast_to(lane.kv_lens - 1, query.shape)
    last = jnp.where(is_token, find_last_key(last, tile_mask.compress_ratio), -1)
    if own is None:  # counted from the tile's first place, it says in one comparison what is seen
        last = jnp.minimum(last, tiling.capacity - 1) - begin
    last = compute_once(last)  # else XLA computes it in each fusion that asks what is seen
    sees, key = (places if own is None else position) <= last[:, :, None], position
    if tile_mask.tree is not None:
        sees = tile_mask.tree.ancestors.at[token[:, :, None], jnp.maximum(nth, 0)].get(mode="fill", fill_value=False)
        sees |= nth < 0
        query = lane.first_position + tile_mask.tree.depth.at[token].get(mode="clip")
        key = jnp.where(
            is_new, before + tile_mask.tree.depth.at[jnp.maximum(their_token, 0)].get(mode="clip"), position
        )
    query = query[:, :, None]
    if (oldest := _oldest_seen(query, tile_mask)) is not None:
        sees &= (key >= oldest) | (key < tile_mask.sink_tokens) if tile_mask.sink_tokens else key >= oldest
    if tile_mask.spans is not None:
        span = tile_mask.spans.at[token].get(mode="clip")[:, :, None]
        theirs = tile_mask.spans.at[jnp.maximum(their_token, 0)].get(mode="clip")
        sees |= is_new & (span != 0) & (span == theirs)
    if tile_mask.tree is not None or tile_mask.spans is not None:
        sees &= is_token[:, :, None]
        own = position < tiling.capacity if own is None else own
    if own is not None:
        sees &= own
    if rows.first is not None:
        sees &= position >= take(rows.first, lane.row)[:, :, None]
    if tile_mask.mask is not None:
        sees &= tile_mask.mask.at[token[:, :, None], position].get(mode="fill", fill_value=False)
    block = rows.block_tables
    if not whole or tile_mask.blocks is not None:
        block = block.at[lane.row, logical].get(mode="clip", wrap_negative_indices=False)
    seen = jnp.broadcast_to(sees, (block.shape[0], tiling.queries, context))
    place = jnp.broadcast_to(lane.token[:, 0], block.shape[:1])
    return Items(token, is_token, place, block, jnp.broadcast_to(offset, block.shape), seen, jnp.abs(query - key))
