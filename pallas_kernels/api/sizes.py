"""With what other sizes of a cache the kernels of a platform would run, where XLA runs because of those that it has."""

import warnings
from typing import Any

import jax

from pallas_kernels.api.backends import IMPLEMENTATIONS, platform_now, unsupported

BLOCK_SIZES = tuple(8 << i for i in range(13))
HEAD_DIM_MULTIPLES = (64, 128)
_WARNED: set[tuple[str, str]] = set()  # implementations, and the sizes that they would run with


def warn_of_sizes(op: str, reason: str, arguments: dict[str, Any]) -> None:
    """Warn, once for each sizes that would help, if kernels of the platform at hand would run with other sizes."""
    name = next((name for name, home in IMPLEMENTATIONS.items() if home == platform_now()), None)
    if name is not None and op == "paged_attention" and (sizes := find_sizes(name, op, arguments)) is not None:
        if (name, sizes) in _WARNED:
            return
        _WARNED.add((name, sizes))
        warnings.warn(
            f"XLA computes this attention, and the {name} kernels would with CacheConfig({sizes}): {reason} "
            'Name implementation="xla" to choose it without this warning.',
            stacklevel=2,
        )


def find_sizes(name: str, op: str, arguments: dict[str, Any]) -> str | None:
    """Return the sizes of a cache with which an implementation takes arguments that it refuses, as Python writes them.

    None: no size would help, or none is needed.

    >>> shape = jax.ShapeDtypeStruct
    >>> q, kv = shape((2, 1, 4, 128), "bfloat16"), shape((9, 2, 2, 16, 128), "int8")
    >>> tables, scale = shape((2, 4), "int32"), shape((9, 2, 2, 16), "float32")
    >>> find_sizes("tpu", "paged_attention", dict(q=q, kv=kv, tables=tables, kv_scale=scale, kind="int8"))
    'block_size=128'
    """
    kv, tables = arguments["kv"], arguments["tables"]
    stored, size = kv.shape[4], kv.shape[3]
    if unsupported(name, op, arguments) is None:
        return None
    tokens = tables.shape[1] * size
    widths = {-(-stored // m) * m: f"head_dim_multiple={m}" for m in HEAD_DIM_MULTIPLES} | {stored: ""}
    for width, said in sorted(widths.items()):
        for block_size in dict.fromkeys((size, *(n for n in BLOCK_SIZES if n > size))):
            changed = arguments | {
                "kv": _resized(kv, {3: block_size, 4: width}),
                "tables": _resized(tables, {1: -(-tokens // block_size)}),
            }
            if arguments.get("kv_scale") is not None:
                changed["kv_scale"] = _resized(arguments["kv_scale"], {3: block_size})
            if unsupported(name, op, changed) is None:
                sizes = [f"block_size={block_size}"] if block_size != size else []
                return ", ".join(sizes + [said] * bool(said))
    return None


def _resized(x: Any, sizes: dict[int, int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(sizes.get(i, n) for i, n in enumerate(x.shape)), x.dtype)
