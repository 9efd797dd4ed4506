"""What the TPU kernels cannot do, and the way out, in sentences."""

import math

import jax.numpy as jnp

from pallas_kernels.common.batch import Call, MaskSpec, StoredKV
from pallas_kernels.common.masks import mask_refusal
from pallas_kernels.tpu import nibbles
from pallas_kernels.tpu.decode import BLOCK_ROWS, decode_bytes
from pallas_kernels.tpu.pages import LANES, SMEM_ENTRIES, VMEM_BYTES, page_tile
from pallas_kernels.tpu.prefill import max_tiles, prefill_bytes
from pallas_kernels.tpu.step import tile_tokens
from pallas_kernels.xla.chosen.chosen_rows import RowBlocks, describe_rows

CHOSEN_ROWS = RowBlocks(tokens=LANES, lanes=LANES)


def unsupported(op: str, call: Call) -> str | None:
    """Returns why `op` cannot run as a TPU kernel on a call of these shapes and dtypes, or None. Reads no values."""
    if call.mask.tokens is not None and call.q is not None and call.stored.kv is not None:
        writes = unsupported("write_kv", call._replace(mask=MaskSpec())) if op == "write_and_attend" else None
        return writes or unsupported("paged_attention", describe_rows(call, CHOSEN_ROWS))
    stored, q, tables = call.stored, call.q, call.batch.block_tables
    kv, quantized = stored.kv, stored.format.is_quantized
    refused = {"mask": call.mask.mask, "kv_scale without a kind": None if quantized else stored.scale}
    for name, x in refused.items():
        if x is not None:
            return f"The TPU kernels do not take {name}: leave implementation=None, and XLA runs it."
    if kv is None:
        return None
    if stored.format.group_size is not None and not stored.is_packed:
        return (
            f"The TPU kernels read {stored.format.name} where a head's keys and values share their bytes: give the "
            f"cache join_kv=True, head_dim_multiple={LANES} and a head_dim in multiples of {stored.format.group_size}, "
            f"not latent rows, nor values of another width, or choose XLA."
        )
    if kv.shape[-1] % LANES:
        return (
            f"The pool's head_dim of {kv.shape[-1]} is not a multiple of {LANES}, and a TPU would copy the whole pool: "
            f"store it padded, with CacheConfig(head_dim_multiple={LANES})."
        )
    if op == "write_kv":
        return None  # what the kernel does not take, a scatter does
    if quantized:
        if stored.half_rank is not None and kv.shape[2] > 1:
            return f"The TPU kernels read quantized latent rows of one head, not of {kv.shape[2]}: leave it to XLA."
        if why_not := _quantized_refusal(q, stored):
            return why_not
    elif kv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"The TPU kernels read pools of bfloat16 or float32, not {kv.dtype}: choose one of them, or XLA."
    elif q is not None and q.dtype != kv.dtype:
        return f"The TPU kernels multiply like with like, but q is {q.dtype} and the pool {kv.dtype}: cast q."
    if why_not := mask_refusal(call):
        return why_not
    tile = page_tile(kv.dtype)
    if kv.shape[3] % tile:
        what = f"the rows of a TPU's {kv.dtype} tile"
        if quantized:
            what = "the lanes that a block's scales lie along"
        return (
            f"The block_size of {kv.shape[3]} is not a multiple of {tile}, {what}: choose "
            f"{-(-kv.shape[3] // tile) * tile}."
        )
    if tables is None:
        return None
    deterministic = bool(call.options.deterministic)
    groups = nibbles.count_groups(stored)
    need = vector_memory(q, kv, tables, deterministic, groups)
    if need > VMEM_BYTES:
        return (
            f"{kv.shape[2]} KV heads of {kv.shape[-1]} in {kv.dtype} and what a kernel does with them take "
            f"{need / 2**20:.1f} MiB of a TPU's vector memory, more than the {VMEM_BYTES / 2**20:.0f} MiB that they "
            f"may: shard the heads, or use bfloat16."
        )
    rows, blocks_per_row = tables.shape
    entries = scalar_entries(q, kv, tables, call.mask.by_token or not call.mask.causal, deterministic, groups)
    if entries + rows * blocks_per_row > SMEM_ENTRIES:
        block_size, context = kv.shape[3], blocks_per_row * kv.shape[3]
        if entries + rows > SMEM_ENTRIES:
            return f"The work list of a step of {q.shape[:-2]} tokens does not fit a TPU's scalar memory: send fewer."
        while entries + rows * -(-context // block_size) > SMEM_ENTRIES:
            block_size *= 2
        return (
            f"Block tables of {rows} x {blocks_per_row} entries and a work list of {entries} do not fit a TPU's scalar "
            f"memory, which holds {SMEM_ENTRIES}: with block_size={block_size} they would."
        )
    return None


def _quantized_refusal(q, stored: StoredKV) -> str | None:
    if stored.scale is not None and stored.scale.dtype != stored.format.scale_dtype:
        return (
            f"The TPU kernels read {stored.format.name}'s scales in {stored.format.scale_dtype}, not "
            f"{stored.scale.dtype}: cast them, or choose XLA."
        )
    if q is not None and q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"The TPU kernels multiply {stored.format.name} with q in bfloat16 or float32, not {q.dtype}: cast q."
    return None


def vector_memory(q, kv, tables, deterministic: bool = False, groups: int = 1) -> int:
    """Bytes that the kernels of a step with queries like these need at once; what is not known is left out."""
    if q is None:
        return 0
    *tokens, heads, _ = q.shape
    decodes = decode_bytes(tables.shape[0], heads, kv, tables, q.dtype, deterministic=deterministic, groups=groups)
    if _is_decode(tokens):
        return decodes
    tile = tile_tokens(tokens[-1], heads, kv, tables, q.dtype, deterministic, groups)
    return max(decodes, prefill_bytes(tile, heads, kv, tables, q.dtype, deterministic=deterministic, groups=groups))


def scalar_entries(q, kv, tables, has_masks: bool = False, deterministic: bool = False, groups: int = 1) -> int:
    """Integers that the kernels want in scalar memory at once, block tables aside."""
    if q is None:
        return 0
    *tokens, heads, _ = q.shape
    rows = tables.shape[0]
    decodes = 4 * (rows + BLOCK_ROWS)
    if _is_decode(tokens):
        return decodes
    size = tile_tokens(tokens[-1], heads, kv, tables, q.dtype, deterministic, groups)
    tiles = max_tiles(rows, math.prod(tokens), size)
    return max(decodes, (8 if has_masks else 4) * tiles)


def _is_decode(tokens) -> bool:
    return len(tokens) == 2 and tokens[1] == 1
