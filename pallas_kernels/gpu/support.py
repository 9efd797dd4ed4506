"""What the kernels cannot do, by name and with the way out."""

import jax.numpy as jnp

from pallas_kernels.common.batch import Call, StoredKV
from pallas_kernels.common.masks import mask_refusal
from pallas_kernels.gpu import chips, tuning
from pallas_kernels.gpu.dequantize import SCALES_AT_ONCE
from pallas_kernels.gpu.work_items import MOST_ROWS
from pallas_kernels.xla.chosen.chosen_rows import describe_rows

FALLBACK = "leave implementation=None to use XLA's"
MOST_HEAD_DIM, MOST_PADDED_DIM = 512, 256
EVEN_HALVES = 16  # half of a head in four bits is whole runs of columns that have one scale
# Of latent rows: half of the values' columns are whole tiles; and what shared memory and registers hold.
RANKS, MOST_RANK, MOST_WIDTH, HEADS_AT_ONCE = 128, 512, 576, 64


def unsupported(op: str, call: Call) -> str | None:
    """Returns why the kernels cannot run `op` on a call of these shapes, and the way out; None if they can."""
    if op != "paged_attention":
        return f"The gpu backend has no kernel of its own for {op}; {FALLBACK}."
    if call.mask.tokens is not None and call.q is not None and call.stored.kv is not None:
        return unsupported("paged_attention", describe_rows(call))
    q, (kv, kv_scale, rank) = call.q, (call.stored.kv, call.stored.scale, call.stored.latent_rank)
    kind, tables = call.stored.format.kind, call.batch.block_tables
    head_dim, block_size, stored = q.shape[-1], kv.shape[3], kv.shape[4]
    if call.mask.mask is not None:
        return f"The gpu kernels take no mask besides causality and window; {FALLBACK}."
    if kv_scale is not None and kind is None:
        return f"The gpu kernels take no kv_scale without a kind; name it, or {FALLBACK}."
    if kv_scale is not None and kv_scale.dtype != (wanted := call.stored.format.scale_dtype):
        return f"The gpu kernels read scales of {wanted}, not {kv_scale.dtype}; cast them, or {FALLBACK}."
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"The gpu kernels compute in bfloat16 or float16, not {q.dtype}; cast q and the pool, or {FALLBACK}."
    if kind is None and kv.dtype != q.dtype:
        return f"The gpu kernels need q and the pool in one dtype, not {q.dtype} and {kv.dtype}; cast q, or {FALLBACK}."
    if rank is not None and (why_not := _latent_refusal(q, kv.shape[2], kind, rank)):
        return why_not
    least = 8 if kind is None else SCALES_AT_ONCE
    if block_size % least:
        return (
            f"The gpu kernels need a block_size in multiples of {least} tokens{'' if kind is None else f' in {kind}'}, "
            f"not {block_size}; {FALLBACK}."
        )
    stored *= call.stored.format.numbers_per_entry
    if call.stored.format.group_size is not None and (head_dim % EVEN_HALVES or head_dim > MOST_PADDED_DIM):
        return (
            f"The gpu kernels read head_dim in multiples of {EVEN_HALVES} up to {MOST_PADDED_DIM} in {kind}, not "
            f"{head_dim}; {FALLBACK}."
        )
    widest = MOST_HEAD_DIM if rank is None else MOST_WIDTH
    if kernel_head_dim(head_dim) > min(stored, widest):
        wider = f"store {kernel_head_dim(head_dim)} with CacheConfig(head_dim_multiple=64), or "
        return (
            f"The gpu kernels read head_dim in multiples of 64 up to {widest}, but q has {head_dim} and the pool "
            f"stores {stored}; {wider if head_dim <= widest else ''}{FALLBACK}."
        )
    if rank is None and head_dim > MOST_PADDED_DIM and head_dim % 64:
        return (
            f"The gpu kernels read heads of more than {MOST_PADDED_DIM} in multiples of 64, not {head_dim}; pad q, k "
            f"and v, or {FALLBACK}."
        )
    if tables is not None and (rows := tables.shape[0]) > MOST_ROWS:
        return f"The gpu kernels plan steps of at most {MOST_ROWS} rows, not {rows}; take fewer, or {FALLBACK}."
    why_not = find_chip_refusal() or _memory_refusal(kernel_head_dim(head_dim), call.stored)
    return why_not or mask_refusal(call)


def find_chip_refusal() -> str | None:
    """Returns why the kernels cannot run on the GPUs at hand; None if they can, or there are none."""
    chip = chips.find_chip()
    if chip.is_known:
        return None
    wanted = "The gpu kernels need a Hopper or Blackwell GPU (compute capability 9.0, or 10.0 and later)"
    if chip.capability is None:
        return (
            f"{wanted}, and {chip.name!r} is no name of one that they know; describe it by NVIDIA's, such as "
            f"'NVIDIA H100', or {FALLBACK}."
        )
    return f"{wanted}, not {chip.capability}; {FALLBACK}."


def _memory_refusal(head_dim: int, stored: StoredKV) -> str | None:
    """Returns why a thread block has no room for a tile of each of its operands, or None."""
    size = tuning.number_bytes(stored)
    if stored.latent_rank is not None:
        plans = [tuning.latent_plan(head_dim)]
    else:
        plans = [
            tuning.decode_plan(head_dim, 8, size, stored.format.group_size),
            tuning.prefill_plan(head_dim, stored.kv.shape[3], size),
        ]
    if all(plan.tile.stages > 0 for plan in plans):
        return None
    chip = chips.find_chip()
    return (
        f"The gpu kernels have no room for head_dim {head_dim} in {stored.format.kind or stored.kv.dtype} in the "
        f"{chip.shared_memory:,} bytes of shared memory of a thread block on {chip.name}; {FALLBACK}."
    )


def _latent_refusal(q, num_kv_heads: int, kind: str | None, rank: int) -> str | None:
    """Returns why the kernels do not read these latent rows, or None."""
    if num_kv_heads > 1:
        return (
            f"The gpu kernels read latent rows of one head, not of {num_kv_heads}; give the cache join_kv=False if its "
            f"keys and values are joined, and not for having different widths, or {FALLBACK}."
        )
    if kind is not None:
        return (
            f"The gpu kernels read latent rows of bfloat16 or float16, not of {kind}; give the cache join_kv=False if "
            f"its keys and values are joined, or {FALLBACK}."
        )
    if rank % RANKS or rank > MOST_RANK:
        return (
            f"The gpu kernels read latent rows with a rank in multiples of {RANKS} up to {MOST_RANK}, not {rank}; "
            f"{FALLBACK}."
        )
    heads = q.shape[-2]
    if heads > HEADS_AT_ONCE and heads % HEADS_AT_ONCE:
        return (
            f"The gpu kernels read latent rows for up to {HEADS_AT_ONCE} query heads or a multiple of them, not "
            f"{heads}; pad q to {-(-heads // HEADS_AT_ONCE) * HEADS_AT_ONCE}, or {FALLBACK}."
        )
    return None


def kernel_head_dim(head_dim: int) -> int:
    """Columns of K and V that the kernels read: whole swizzled tiles."""
    return -(-head_dim // 64) * 64
