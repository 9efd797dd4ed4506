"""Attention over chosen tokens by kernels: XLA brings each query's rows together in blocks, which the kernels read.

Blocks of the pool hold mostly what nobody chose, and no copy of a single row reaches the layouts of eight rows that
chips multiply. So of each chosen row three times its bytes are moved, whatever the context: read where it lies,
written, and read again by the kernel. Each query is a row of one new token there; many queries take turns, so that
what is brought together stays within bounds.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.batch import Call, MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.xla.chosen.tokens import TokenQueries, find_slots
from pallas_kernels.xla.tile_sizes import parts

MOST_BYTES = 1 << 28  # of rows that are brought together at once


class RowBlocks(NamedTuple):
    """The blocks that a backend's kernels read best."""

    tokens: int = 64  # of a block
    lanes: int = 64  # rows are padded to multiples of so many numbers


PLAIN = RowBlocks()


def attend_tokens(
    attend: Callable[..., Any],
    q: jax.Array,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
    form: RowBlocks = PLAIN,
) -> Any:
    """Returns what [`pallas_kernels.paged_attention`][] does with `tokens`, by `attend`, which has none."""
    axes, num_tokens = q.shape[:-2], math.prod(q.shape[:-2])
    assert mask.tokens is not None
    if not num_tokens:
        q = q[..., : stored.value_dim(q.shape[-1])]
        return (q, jnp.zeros(q.shape[:-1], jnp.float32)) if options.return_lse else q
    chosen = mask.tokens.reshape(num_tokens, -1) if mask.tokens.size else jnp.full((num_tokens, 1), -1, jnp.int32)
    token = jax.tree.map(jnp.ravel, locate(axes, *batch[1:4]))
    queries = TokenQueries(q.reshape(num_tokens, *q.shape[-2:]), token, chosen)
    options = dataclasses.replace(options, shared=None)

    def run(queries: TokenQueries) -> Any:
        held, tables, count = gather_chosen(queries, stored, batch, mask, form)
        rows = PagedBatch(tables, count, (count > 0).astype(jnp.int32))
        return attend(queries.q[:, None], held, rows, MaskSpec(), options)

    at_once = _count_at_once(num_tokens, chosen.shape[1], stored.kv, form)
    if num_tokens <= at_once:
        return jax.tree.map(lambda x: x.reshape(*axes, *x.shape[2:]), run(queries))
    turns = -(-num_tokens // at_once)
    missing = turns * at_once - num_tokens
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]), queries)
    found = lax.map(run, jax.tree.map(lambda x: x.reshape(turns, at_once, *x.shape[1:]), padded))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:])[:num_tokens].reshape(*axes, *x.shape[3:]), found)


def gather_chosen(
    queries: TokenQueries, stored: StoredKV, batch: PagedBatch, mask: MaskSpec, form: RowBlocks
) -> tuple[StoredKV, jax.Array, jax.Array]:
    """Returns a pool of the rows that queries chose, the blocks of each query, and how many tokens it sees, i32[n]."""
    num_tokens, block_size = queries.chosen.shape[0], stored.kv.shape[3]
    slots = find_slots(queries, batch, mask, block_size, seen_first=True)  # the kernels take a row's first tokens
    # XLA's GPU compiler would look each up again for every number of its row.
    slot = lax.optimization_barrier(slots.block * block_size + slots.offset)
    columns = _count_blocks(slot.shape[1], form) * form.tokens
    slot = jnp.pad(slot, ((0, 0), (0, columns - slot.shape[1]))).reshape(-1, form.tokens)
    block, offset = parts(slot[:, None, None], block_size)

    halves, heads = stored.kv.shape[1:3]
    half, head = (jnp.arange(n, dtype=jnp.int32) for n in (halves, heads))
    half, head = half[None, :, None, None], head[None, None, :, None]
    # Rows by one index each, as the SparseCores of TPUs gather them.
    row = ((block * halves + half) * heads + head) * block_size + offset
    held = stored.kv.reshape(-1, stored.kv.shape[-1]).at[row].get(mode="clip")
    held = jnp.pad(held, [(0, 0)] * 4 + [(0, _pad_width(held.shape[-1], form) - held.shape[-1])])
    scale = None if stored.scale is None else _gather_scales(stored.scale, block, half, head, offset)
    tables = jnp.arange(slot.shape[0], dtype=jnp.int32).reshape(num_tokens, -1)
    count = slots.seen.sum(axis=1, dtype=jnp.int32)
    return stored.replace(held, scale), tables, count


def _gather_scales(scale: jax.Array, *place: jax.Array) -> jax.Array:
    """Returns scales of tokens, one by one: any other form of the pool's TPUs would lay out anew, for tokens are in
    their lanes."""
    if scale.ndim == len(place):
        return scale.at[place].get(mode="clip")
    groups = jnp.arange(scale.shape[-1], dtype=jnp.int32)
    return scale.at[(*(x[..., None] for x in place), groups)].get(mode="clip")


def describe_rows(call: Call, form: RowBlocks = PLAIN) -> Call:
    """Returns the call that `attend` gets, in shapes."""
    assert call.mask.tokens is not None
    top_k, kv, shape = call.mask.tokens.shape[-1], call.stored.kv, jax.ShapeDtypeStruct
    num_tokens = min(math.prod(call.q.shape[:-2]), _count_at_once(math.prod(call.q.shape[:-2]), top_k, kv, form))
    blocks = _count_blocks(top_k, form)

    def gathered_shape(x: Any, *minor: int) -> Any:
        return None if x is None else shape((num_tokens * blocks, *x.shape[1:3], form.tokens, *minor), x.dtype)

    row, scale = shape((num_tokens,), jnp.int32), call.stored.scale
    scale = None if scale is None else gathered_shape(scale, *scale.shape[4:])
    return call._replace(
        q=shape((num_tokens, 1, *call.q.shape[-2:]), call.q.dtype),
        stored=call.stored.replace(gathered_shape(kv, _pad_width(kv.shape[-1], form)), scale),
        batch=PagedBatch(shape((num_tokens, blocks), jnp.int32), row, row),
        mask=MaskSpec(),
    )


def _count_at_once(num_tokens: int, top_k: int, kv: Any, form: RowBlocks) -> int:
    """Returns how many queries' rows are brought together at a time: in as few turns as there must be, equally many."""
    row_bytes = math.prod(kv.shape[1:3]) * _pad_width(kv.shape[-1], form) * kv.dtype.itemsize
    most = max(1, MOST_BYTES // (_count_blocks(top_k, form) * form.tokens * row_bytes))
    return max(1, -(-num_tokens // max(1, -(-num_tokens // most))))


def _pad_width(width: int, form: RowBlocks) -> int:
    return -(-width // form.lanes) * form.lanes


def _count_blocks(chosen: int, form: RowBlocks) -> int:
    return max(1, -(-chosen // form.tokens))
