"""What the TPU kernels cannot do, and the way out, in sentences."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.tpu.pages import LANES, SMEM_ENTRIES, sublanes


def unsupported(op: str, arguments: dict[str, Any]) -> str | None:
    """Why `op` cannot run as a TPU kernel on arguments of these shapes and dtypes, or None. Reads no values."""
    kv, tables, q = (arguments.get(name) for name in ("kv", "tables", "q"))
    for name in ("kv_scale", "mask"):
        if arguments.get(name) is not None:
            return f"The TPU kernels do not take {name}: leave implementation=None, and XLA runs it."
    if kv is None:
        return None
    if kv.shape[-1] % LANES:
        return (
            f"The pool's head_dim of {kv.shape[-1]} is not a multiple of {LANES}, and a TPU would copy the whole pool: "
            f"store it padded, with CacheConfig(head_dim_multiple={LANES})."
        )
    if op == "write_kv":
        return None  # a scatter, for which the rest does not matter
    if kv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"The TPU kernels read pools of bfloat16 or float32, not {kv.dtype}: choose one of them, or XLA."
    if q is not None and q.dtype != kv.dtype:
        return f"The TPU kernels multiply like with like, but q is {q.dtype} and the pool {kv.dtype}: cast q."
    tile = sublanes(kv.dtype)
    if kv.shape[3] % tile:
        return (
            f"The block_size of {kv.shape[3]} is not a multiple of {tile}, the rows of a TPU's {kv.dtype} tile: "
            f"choose {-(-kv.shape[3] // tile) * tile}."
        )
    if tables is not None and tables.shape[0] * tables.shape[1] > SMEM_ENTRIES:
        rows, context = tables.shape[0], tables.shape[1] * kv.shape[3]
        block_size = kv.shape[3]
        while rows * -(-context // block_size) > SMEM_ENTRIES:
            block_size *= 2
        return (
            f"Block tables of {rows} x {tables.shape[1]} entries do not fit a TPU's scalar memory, which holds "
            f"{SMEM_ENTRIES}: with block_size={block_size} they would."
        )
    return None
