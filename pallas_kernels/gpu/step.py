"""A step of paged attention: prepare the operands, run the kernels, put their outputs back where the tokens lie."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.batch import MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.masks import TokenMask, WindowMask, drop_empty_rows, find_token_mask, tile_masks
from pallas_kernels.common.ragged_layout import Tokens, default_offsets, locate
from pallas_kernels.gpu import decode, latent, prefill, tuning, work_items as work
from pallas_kernels.gpu.support import kernel_head_dim
from pallas_kernels.gpu.tiles import InterpretParams, Operands, logit_scalars


class DecodeRows(NamedTuple):
    """The rows of a step, whose tokens are flat."""

    kv_lens: jax.Array  # i32[S]
    query_lens: jax.Array  # i32[S]
    start: jax.Array  # i32[S]: where each row's tokens begin
    token: Tokens  # where each of the N belongs
    token_mask: TokenMask | None
    deterministic: bool


def attend(
    q,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
    *,
    interpret: InterpretParams = None,
):
    """[`pallas_kernels.paged_attention`][] on a GPU, for what `unsupported` does not refuse.

    The decode kernels spread a row over the chip; the prefill kernel shares keys and values among tokens. Rows of a
    padded step that is narrow enough all take the decode kernels. Of any other step those with one new token do and
    those with more take the prefill kernel; both run if the shapes allow both. `deterministic`: so it is of any step.
    Over latent rows one kernel does both, with lists of work as these have.

    `interpret` runs the kernels in Pallas's GPU interpreter, on any machine.
    """
    kv, rank, sinks = stored.kv, stored.latent_rank, options.sinks
    causal, deterministic, return_lse = mask.causal, options.deterministic, options.return_lse
    if q.size == 0:
        q = q[..., :rank]
        return (q, jnp.zeros(q.shape[:-1], jnp.float32)) if return_lse else q
    token_axes, (num_heads, head_dim) = q.shape[:-2], q.shape[-2:]
    num_rows, width = batch.query_lens.shape[0], token_axes[-1]
    shared = num_heads // kv.shape[2]
    if rank is None:
        split = tuning.split_heads(shared, kernel_head_dim(head_dim), stored)
        padded, prefill_rows = split.parts * split.group, _prefill_rows
    else:
        padded, prefill_rows = -(-num_heads // 8) * 8, _prefill_latent  # bulk copies of a token's are of whole tiles
        split = tuning.Split(1, latent.heads_at_once(padded), latent.QUERY_ROWS)
    sinks = None if sinks is None else _pad_heads(sinks, 0, kv.shape[2], padded)
    capacity, held = batch.block_tables.shape[1] * kv.shape[3], batch.kv_lens
    batch = batch._replace(kv_lens=jnp.clip(held, 0, capacity))  # so that no length reads past its row's table
    if not causal:
        batch = drop_empty_rows(batch)
    tables, kv_lens, query_lens, query_starts, _ = batch
    token = locate(token_axes, kv_lens, query_lens, query_starts)
    token = Tokens(*(x.reshape(-1) for x in token))
    q = _pad_heads(q.reshape(-1, num_heads, head_dim), 1, kv.shape[2], padded)
    # Whole swizzled tiles: no bulk copy may reach beyond a dimension that is cut into tiles.
    parts = stored.format.numbers_per_entry  # of a head, in columns of their own
    q = _pad_columns(q, kernel_head_dim(head_dim), parts)
    if stored.format.group_size is not None:  # those of a token side by side: bulk copies are of no short lines
        stored = stored.replace(kv, stored.scale.reshape(*kv.shape[:3], -1))
    if len(token_axes) == 2:
        start = jnp.arange(num_rows, dtype=jnp.int32) * width
    else:
        start = default_offsets(query_lens) if query_starts is None else query_starts
    operands = Operands(
        q,
        stored,
        tables,
        logit_scalars(options.logit_scale(head_dim), options.soft_cap),
        WindowMask.from_spec(mask, capacity),
        options.soft_cap is not None,
        interpret,
        sinks,
        split.parts,
        head_dim,
    )
    token_mask = None
    if width > 1 and mask.by_token:
        tree, spans = (None if x is None else x.reshape(-1) for x in (mask.tree, mask.spans))
        token_mask = find_token_mask(token, kv_lens - query_lens, start, width, operands.window_mask, tree, spans)
    elif width > 1 and not causal:
        last = kv_lens[token.row] - 1  # all of the row
        token_mask = TokenMask(last, jnp.zeros_like(last), last, jnp.zeros_like(last), None)
    rows = DecodeRows(kv_lens, query_lens, start, token, token_mask, deterministic)

    if len(token_axes) == 2 and split.can_decode(width, deterministic=deterministic):
        out, lse = _decode_rows(operands, rows._replace(kv_lens=held), width, None, width, None)
        lse = lse.reshape(num_rows, -1, width, split.group)
        lse = jnp.swapaxes(lse, 1, 2)
    else:
        seen = token.valid & (token.position >= 0) if causal else token.valid
        if width > 1:
            decodes = deterministic or (causal and num_rows > 1)
            least = 2 if decodes else 1  # new tokens of a row that is not decoded
            many = rows._replace(query_lens=jnp.where(query_lens < least, 0, query_lens))
            out, lse = prefill_rows(operands, many, least)
            if rank is not None:  # the other kernel writes zeros itself
                out = jnp.where(seen[:, None, None], out, jnp.zeros_like(out))
            lse = jnp.where(seen[:, None], lse, -jnp.inf)
        else:
            least, out, lse = 2, jnp.zeros_like(q[..., :rank]), jnp.full(q.shape[:-1], -jnp.inf)
        if least == 2:
            place = width if len(token_axes) == 2 else start
            alone = rows._replace(kv_lens=held, token_mask=None)
            out, alone_lse = _decode_rows(operands, alone, place, q.shape[0], 1, out)
            lse = jnp.where(
                (seen & (query_lens[token.row] == 1))[:, None], alone_lse.reshape(num_rows, -1)[token.row], lse
            )
    out = _drop_padded_heads(_drop_columns(out, rank or head_dim, parts), 1, kv.shape[2], shared)
    out = out.reshape(*token_axes, num_heads, -1)
    lse = _drop_padded_heads(lse.reshape(q.shape[0], -1), 1, kv.shape[2], shared).reshape(*token_axes, num_heads)
    return (out, lse) if return_lse else out


def _pad_heads(x, axis: int, num_kv_heads: int, count: int):
    """Pads the query heads of each KV head, along an axis, to so many."""
    group = x.shape[axis] // num_kv_heads
    if group == count:
        return x
    x = x.reshape(*x.shape[:axis], num_kv_heads, group, *x.shape[axis + 1 :])
    x = jnp.pad(x, [(0, count - group if i == axis + 1 else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], num_kv_heads * count, *x.shape[axis + 2 :])


def _drop_padded_heads(x, axis: int, num_kv_heads: int, group: int):
    """Inverts `_pad_heads`: leaves so many query heads of each KV head."""
    count = x.shape[axis] // num_kv_heads
    if group == count:
        return x
    x = x.reshape(*x.shape[:axis], num_kv_heads, count, *x.shape[axis + 1 :])
    x = lax.slice_in_dim(x, 0, group, axis=axis + 1)
    return x.reshape(*x.shape[:axis], num_kv_heads * group, *x.shape[axis + 2 :])


def _pad_columns(x, width: int, parts: int):
    """Pads heads `[..., D]` to whole swizzled tiles, in each of their parts as far."""
    x = x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width // parts - x.shape[-1])])
    return x.reshape(*x.shape[:-2], width)


def _drop_columns(x, head_dim: int, parts: int):
    """Inverts `_pad_columns`."""
    x = x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)[..., : head_dim // parts]
    return x.reshape(*x.shape[:-2], head_dim)


def tiles_of_a_row(capacity: int, window_mask: WindowMask, new_tokens: int, tile_tokens: int) -> int:
    """Returns the most tiles that `new_tokens` consecutive tokens see of a row with room for `capacity` tokens."""
    most, seen = -(-capacity // tile_tokens), window_mask.most(new_tokens)
    return most if seen is None else min(most, -(-seen // tile_tokens) + 1 + (window_mask.sink_tokens > 0))


def _decode_rows(operands: Operands, rows: DecodeRows, place, alone_of: int | None, new_tokens: int, into):
    """Attention of rows of at most `new_tokens` tokens each.

    Args:
      rows: whose lengths may be more than their tables have room for.
      place: their start, as `work.decode_items` takes it.
      alone_of: None takes all rows; a number, those with one new token that is among so many: another has no work.

    Returns:
      `into`, `[N, H, D]` or of latent rows `[N, H, rank]`, with the output of those rows' tokens, or a new array that
      has it where it is None, and the LSE `f32[S, K, new_tokens * group]`, K of latent rows the tiles of heads; 0 and
      -inf for tokens that see nothing. Rows not taken have any LSE.
    """
    q, stored, tables, _, window_mask, _, interpret, sinks, *_ = operands
    kv, rank, (_, new, start, token, token_mask, deterministic) = stored.kv, stored.latent_rank, rows
    num_rows, num_kv_heads, block_size = tables.shape[0], operands.head_parts, kv.shape[3]
    if rank is not None:  # tiles of heads, all of the one KV head
        num_kv_heads = q.shape[1] // latent.heads_at_once(q.shape[1])
    used = new_tokens * (q.shape[1] // num_kv_heads)
    if rank is None:
        columns = -(-used // 8) * 8
        plan = tuning.decode_plan(q.shape[2], columns, tuning.number_bytes(stored), stored.format.group_size)
        split = functools.partial(decode.split, columns=columns)
    else:
        columns, plan = latent.QUERY_ROWS, tuning.latent_plan(q.shape[2])
    most_tiles = tiles_of_a_row(tables.shape[1] * block_size, window_mask, new_tokens, plan.tile.tokens)
    items, num_items, most_cut = work.decode_items(
        rows.kv_lens,
        new,
        place,
        work.Cutting(
            tables.shape[1] * block_size,
            window_mask,
            plan.tile.tokens,
            -(-plan.num_blocks // num_kv_heads),
            most_tiles,
            plan.part_tiles,
            deterministic,
        ),
        alone_of=alone_of,
        interpret=interpret,
    )
    if rank is not None:
        split = functools.partial(latent.split, some_cut=most_cut > 0)
    lines = None
    if token_mask is not None:  # for each token's heads the same
        nth = jnp.arange(new_tokens, dtype=jnp.int32)[None]
        tiles = tile_masks(token_mask, start[:, None] + nth, nth < new[:, None])
        lines = jnp.repeat(tiles.tokens, q.shape[1] // num_kv_heads, axis=2)
        lines = jnp.pad(lines, ((0, 0), (0, 0), (0, columns - used)))
    if sinks is not None:  # for each token its heads'
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), (1, new_tokens))
        sinks = jnp.pad(sinks, ((0, 0), (0, columns - used)))
    in_place, refs = operands.is_uniform, None
    if in_place and into is not None:
        refs = jax.new_ref(into), jax.new_ref(jnp.zeros((num_rows, num_kv_heads, columns), jnp.float32))
    part, part_lse, *new_arrays = split(
        operands._replace(sinks=sinks),
        items,
        refs,
        num_items=num_items,
        new_tokens=new_tokens,
        tile=plan.tile,
        token_mask=lines,
    )
    if in_place and most_cut:
        refs = refs or tuple(map(jax.new_ref, new_arrays))
    out, lse = refs or new_arrays
    if most_cut:
        merged = decode.merge(
            (part, part_lse),
            items,
            sinks,
            (out, lse),
            new_tokens=new_tokens,
            most_cut=most_cut,
            num_blocks=tuning.merge_blocks(),
            interpret=interpret,
            deterministic=deterministic,
        )
    if refs:
        out, lse = map(jax.freeze, refs)
    elif not in_place:  # select what in place is left as it is
        if most_cut:
            is_cut = jnp.zeros(num_rows, bool).at[items[:, 0]].max(items[:, 6] == work.PART)
            out = jnp.where(is_cut[token.row][:, None, None], merged[0], out)
            lse = jnp.where(is_cut[:, None, None], merged[1], lse)
        if into is not None:
            taken = (new == 1) & (start >= 0) & (start < alone_of)
            out = jnp.where((taken[token.row] & token.valid)[:, None, None], out, into)
    return out, lse[:, :, :used]


def _prefill_items(operands: Operands, rows: DecodeRows, least: int, *, item_tokens, tile_tokens, num_heads):
    """The work of rows that have at least `least` new tokens, each item `item_tokens` of them, in thread blocks of one
    of `num_heads`.

    Returns:
      `work.prefill_items`' items and token masks; and of each token its item and which one of its tokens it is,
      `i32[N]`.
    """
    lengths, new, start, token, token_mask, deterministic = rows
    window_mask, capacity = operands.window_mask, operands.tables.shape[1] * operands.stored.kv.shape[3]
    num_tokens = token.row.shape[0]
    num_rows = min(new.shape[0], num_tokens // least)
    num_items = (num_tokens - num_rows) // item_tokens + num_rows  # as many as these can have at the most
    most_tiles = tiles_of_a_row(capacity, window_mask, item_tokens, tile_tokens)
    chunks = 1 if deterministic else tuning.prefill_chunks(num_items * num_heads, most_tiles)
    items, first_item, place, token_masks = work.prefill_items(
        lengths, new, start, window_mask, item_tokens, num_items, tile_tokens, chunks, token_mask
    )
    nth = jnp.where(token.valid, token.position - (lengths - new)[token.row], 0)
    item = place[jnp.clip(first_item[token.row] + nth // item_tokens, 0, num_items - 1)]
    return items, token_masks, item, nth % item_tokens


def _prefill_rows(operands: Operands, rows: DecodeRows, least: int):
    """Attention of the rows that have at least `least` new tokens, if any.

    Returns:
      `[N, H, D]` and the LSE, `f32[N, H]`. Tokens of other rows have anything, and padding an output of 0.
    """
    q, stored, _, _, _, _, interpret, sinks, *_ = operands
    kv, quantized, token = stored.kv, stored.format.is_quantized, rows.token
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = operands.head_parts
    group = num_heads // num_kv_heads
    plan = tuning.prefill_plan(head_dim, kv.shape[3], tuning.number_bytes(stored))
    division, own = tuning.divide(head_dim), prefill.tokens_of(group)
    halves, item_tokens = division.halves, division.halves * own
    items, token_masks, item, nth = _prefill_items(
        operands,
        rows,
        least,
        item_tokens=item_tokens,
        tile_tokens=plan.tile.tokens,
        num_heads=num_kv_heads,
    )
    num_items, chunks = items.shape[:2]
    if token_masks is not None:  # for each head the same
        token_masks = _as_query_rows(token_masks.reshape(*token_masks.shape[:2], halves, 1, own), group)
        token_masks = token_masks.reshape(*token_masks.shape[:2], halves * tuning.HALF)
    of_rows = None
    if sinks is not None and chunks == 1:
        of_rows = _as_query_rows(sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1), group)
    holes = jnp.pad(~token.valid, (0, num_items * item_tokens - num_tokens))
    holes = work.bits(holes.reshape(num_items, halves, own))
    alone = quantized or division.splits_columns  # consumers that wait for one another have no order besides
    out, lse = prefill.attend(
        operands._replace(sinks=of_rows),
        items,
        holes,
        tuning.PrefillPlan(
            plan.tile,
            plan.weights_in_registers and interpret is None,
            plan.in_turns and not alone,
            plan.ahead and not alone and token_masks is None,  # whose masks take the registers
        ),
        token_mask=token_masks,
    )

    def of_tokens(x):
        """Returns tokens `[N, K, group, ...]` from items' query rows `[W, K, n, 64, ...]`."""
        x = x.reshape(num_items, num_kv_heads, halves, tuning.HALF, *x.shape[4:])
        x = x[:, :, :, : group * own].reshape(*x.shape[:3], group, own, *x.shape[4:])
        return x[item, :, nth // own, :, nth % own]

    if chunks > 1:
        out, lse = _merge_chunks(out, lse.reshape(out.shape[:-1]), items[..., 4] > items[..., 3])
        out = of_tokens(out)[..., :head_dim].reshape(q.shape)
        out = jnp.where(token.valid[:, None, None], out, jnp.zeros_like(out))
    lse = of_tokens(lse.reshape(*lse.shape[:2], halves, tuning.HALF)).reshape(num_tokens, num_heads)
    return _with_sinks(out, lse, sinks if chunks > 1 else None)


def _prefill_latent(operands: Operands, rows: DecodeRows, least: int):
    """Attends as `_prefill_rows` does, over latent rows; returns `[N, H, rank]`. Unless items are cut into chunks, the
    kernel reads queries and writes outputs where they lie."""
    q, sinks = operands.q, operands.sinks
    num_tokens, num_heads, head_dim = q.shape
    group = latent.heads_at_once(num_heads)
    head_tiles, item_tokens = num_heads // group, latent.QUERY_ROWS // group
    plan = tuning.latent_plan(head_dim)
    items, token_masks, item, nth = _prefill_items(
        operands,
        rows,
        least,
        item_tokens=item_tokens,
        tile_tokens=plan.tile.tokens,
        num_heads=head_tiles,
    )
    (num_items, chunks, _), window_mask = items.shape, operands.window_mask
    if token_masks is not None:
        window_mask = WindowMask(
            1, None, operands.window_mask.sink_tokens
        )  # what is seen begins at the first position itself
        token_masks = jnp.repeat(token_masks, group, axis=2)
        token_masks = jnp.pad(token_masks, ((0, 0), (0, 0), (0, latent.QUERY_ROWS - item_tokens * group)))
    row, first_token, stop, first, last, at, count = (items[..., i] for i in range(7))
    role = jnp.where(count > 0, work.PART if chunks > 1 else work.WHOLE, work.UNUSED)
    lines = (row, first, last, stop, stop - first_token, at, role, count)
    part, part_lse, out, lse = latent.split(
        operands._replace(sinks=None, window_mask=window_mask),
        jnp.stack(lines, axis=2).reshape(-1, len(lines)),
        num_items=num_items * chunks,
        new_tokens=item_tokens,
        tile=plan.tile,
        some_cut=chunks > 1,
        by_item=True,
        token_mask=token_masks,
    )

    def of_tokens(x):
        """Returns tokens `[N, H, ...]` from items' queries `[W, tiles of heads, 64, ...]`."""
        x = x[:, :, : item_tokens * group].reshape(num_items, head_tiles, item_tokens, group, *x.shape[3:])
        return x[item, :, nth].reshape(num_tokens, num_heads, *x.shape[4:])

    if chunks > 1:
        part, lse = _merge_chunks(jnp.swapaxes(part, 2, 3), part_lse * math.log(2), last > first)
        out = of_tokens(part.astype(q.dtype))
    return _with_sinks(out, of_tokens(lse), sinks)


def _with_sinks(out, lse, sinks):
    """Adds a logit per head, `[H]`, to the softmax of outputs `[N, H, D]` with log-sum-exps `f32[N, H]`."""
    if sinks is None:
        return out, lse
    with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None])
    return (out.astype(jnp.float32) * jnp.exp(lse - with_sink)[..., None]).astype(out.dtype), with_sink


def _as_query_rows(x, group: int):
    """`[..., group or 1, tokens or 1]` as one for each of a consumer's query rows, `[..., 64]`."""
    own = prefill.tokens_of(group)
    x = jnp.broadcast_to(x, (*x.shape[:-2], group, own)).reshape(*x.shape[:-2], group * own)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tuning.HALF - group * own)])


def _merge_chunks(out, lse, some):
    """One output of each item, `[W, K, ..., D]`, from those of its chunks, `[W * C, K, ..., D]`, and the LSE likewise.

    Args:
      some: `bool[W, C]`: whether the chunk has any tile; if not, its output is not written.
    """
    out, lse = (x.reshape(*some.shape, *x.shape[1:]) for x in (out, lse))
    some = some.reshape(*some.shape, *[1] * (lse.ndim - 2))
    lse = jnp.where(some, lse, -jnp.inf)
    merged = jax.nn.logsumexp(lse, axis=1)  # -inf where no chunk is seen
    weight = jnp.exp(lse - jnp.where(merged == -jnp.inf, 0.0, merged)[:, None])
    part = jnp.where(some[..., None], out.astype(jnp.float32), 0.0) * weight[..., None]
    return part.sum(axis=1).astype(out.dtype), merged
