"""Attention over chosen tokens: XLA brings each query's rows together in blocks of its own, which the kernels read.

Blocks of the pool hold mostly what nobody chose, and a bulk copy of a single row does not window_mask the matrix unit's
layout of eight. So of each chosen row three times its bytes are moved, whatever the context: read where it lies,
written, and read again by the kernel. Each query is a row of one new token there.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.batch import Call, MaskSpec, PagedBatch, SoftmaxOptions, StoredKV
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.xla.tokens import TokenQueries, find_slots
from pallas_kernels.xla.work_list import parts

TOKENS = 64  # of a block that chosen rows are brought together in
MOST_BYTES = 1 << 29  # of such blocks in one step


def attend_tokens(
    attend: Callable[..., Any],
    q: jax.Array,
    stored: StoredKV,
    batch: PagedBatch,
    mask: MaskSpec,
    options: SoftmaxOptions,
) -> Any:
    """Returns what [`pallas_kernels.paged_attention`][] does with `tokens`, by `attend`, which has none."""
    axes, num_tokens = q.shape[:-2], math.prod(q.shape[:-2])
    held, tables, count = gather_chosen(q, stored, batch, mask)
    rows = PagedBatch(tables, count, (count > 0).astype(jnp.int32))
    q = q.reshape(num_tokens, 1, *q.shape[-2:])
    found = attend(q, held, rows, MaskSpec(), dataclasses.replace(options, shared=None))
    return jax.tree.map(lambda x: x.reshape(*axes, *x.shape[2:]), found)


def gather_chosen(
    q: jax.Array, stored: StoredKV, batch: PagedBatch, mask: MaskSpec
) -> tuple[StoredKV, jax.Array, jax.Array]:
    """Returns a pool of the rows that queries chose, the blocks of each query, and how many tokens it sees, i32[N]."""
    axes, num_tokens = q.shape[:-2], math.prod(q.shape[:-2])
    assert mask.tokens is not None
    chosen = mask.tokens.reshape(num_tokens, -1) if mask.tokens.size else jnp.full((num_tokens, 1), -1, jnp.int32)
    token = jax.tree.map(jnp.ravel, locate(axes, *batch[1:4]))
    queries = TokenQueries(q.reshape(num_tokens, *q.shape[-2:]), token, chosen)
    block_size = stored.kv.shape[3]
    slots = find_slots(queries, batch, mask, block_size)
    seen = slots.seen.astype(jnp.int32)
    # Those that are seen move to the front, in order of their positions: the kernels take a row's first tokens.
    columns = _count_blocks(chosen.shape[1]) * TOKENS
    row = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    at = row, jnp.where(slots.seen, jnp.cumsum(seen, axis=1, dtype=jnp.int32) - 1, columns)

    slot = slots.block * block_size + slots.offset
    slot = jnp.zeros((num_tokens, columns), jnp.int32).at[at].set(slot, mode="drop", unique_indices=True)
    block, offset = parts(slot.reshape(-1, 1, 1, TOKENS), block_size)

    def gather(x: jax.Array) -> jax.Array:
        part, head = (jnp.arange(n, dtype=jnp.int32) for n in x.shape[1:3])
        return x.at[block, part[None, :, None, None], head[None, None, :, None], offset].get(mode="clip")

    held = stored.replace(gather(stored.kv), None if stored.scale is None else gather(stored.scale))
    tables = jnp.arange(num_tokens * columns // TOKENS, dtype=jnp.int32).reshape(num_tokens, -1)
    return held, tables, seen.sum(axis=1, dtype=jnp.int32)


def describe_rows(call: Call) -> Call:
    """Returns the call that `attend` gets, in shapes."""
    axes, shape = call.q.shape[:-2], jax.ShapeDtypeStruct
    num_tokens, blocks = math.prod(axes), _count_blocks(call.mask.tokens.shape[-1])

    def gathered(x: Any) -> Any:
        return None if x is None else shape((num_tokens * blocks, *x.shape[1:3], TOKENS, *x.shape[4:]), x.dtype)

    row = shape((num_tokens,), jnp.int32)
    return call._replace(
        q=shape((num_tokens, 1, *call.q.shape[-2:]), call.q.dtype),
        stored=call.stored.replace(gathered(call.stored.kv), gathered(call.stored.scale)),
        batch=PagedBatch(shape((num_tokens, blocks), jnp.int32), row, row),
        mask=MaskSpec(),
    )


def count_bytes(call: Call) -> int:
    """Returns how many bytes of rows a call brings together."""
    kv = describe_rows(call).stored.kv
    return math.prod(kv.shape) * kv.dtype.itemsize


def _count_blocks(chosen: int) -> int:
    return max(1, -(-chosen // TOKENS))
