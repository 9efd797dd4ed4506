"""With what other sizes of a cache the kernels of a platform would run, where XLA runs because of those that it has."""

import warnings
from typing import Any

import jax

from pallas_kernels.api.backends import IMPLEMENTATIONS, current_platform, unsupported
from pallas_kernels.common.batch import Call, bundle_call  # noqa: F401 (the doctest's)

BLOCK_SIZES = tuple(8 << i for i in range(13))
ROUNDED = 128  # tokens: all kernels read blocks of multiples of them
HEAD_DIM_MULTIPLES = (64, 128)
_WARNED: set[tuple[str, str]] = set()  # implementations, and the sizes that they would run with


def warn_of_sizes(op: str, reason: str, call: Call) -> None:
    """Warn, once for each sizes that would help, if kernels of the platform at hand would run with other sizes."""
    name = next((name for name, home in IMPLEMENTATIONS.items() if home == current_platform()), None)
    if name is not None and op == "paged_attention" and (sizes := find_sizes(name, op, call)) is not None:
        if (name, sizes) in _WARNED:
            return
        _WARNED.add((name, sizes))
        whole = " (if contiguous, max_seq_len says it)" * (_is_one_block(call) and "block_size" in sizes)
        warnings.warn(
            f"XLA computes this attention, and the {name} kernels would with CacheConfig({sizes}){whole}: {reason} "
            'Name implementation="xla" to choose it without this warning.',
            stacklevel=2,
        )


def find_sizes(name: str, op: str, call: Call) -> str | None:
    """Return the sizes of a cache with which an implementation takes arguments that it refuses, as Python writes them.

    None: no size would help, or none is needed.

    >>> shape = jax.ShapeDtypeStruct
    >>> q, kv = shape((2, 1, 4, 128), "bfloat16"), shape((9, 2, 2, 16, 128), "int8")
    >>> tables, scale = shape((2, 4), "int32"), shape((9, 2, 2, 16), "float32")
    >>> call = bundle_call(q=q, kv=kv, tables=tables, kv_scale=scale, kind="int8")
    >>> find_sizes("tpu", "paged_attention", call)
    'block_size=128'
    """
    (kv, scale), tables = (call.stored.kv, call.stored.scale), call.batch.block_tables
    stored, size = kv.shape[4], kv.shape[3]
    if unsupported(name, op, call) is None:
        return None
    tokens = tables.shape[1] * size
    sizes = [size, *(n for n in BLOCK_SIZES if n > size)]
    if _is_one_block(call):  # as long as a row, and a row of twice the length takes twice the memory
        sizes[1:1] = (-(-size // n) * n for n in BLOCK_SIZES if n <= ROUNDED)
    widths = {-(-stored // m) * m: f"head_dim_multiple={m}" for m in HEAD_DIM_MULTIPLES} | {stored: ""}
    for width, said in sorted(widths.items()):
        for block_size in dict.fromkeys(sizes):
            sized = call.stored.replace(
                _resize(kv, {3: block_size, 4: width}), None if scale is None else _resize(scale, {3: block_size})
            )
            batch = call.batch._replace(block_tables=_resize(tables, {1: -(-tokens // block_size)}))
            if unsupported(name, op, call._replace(stored=sized, batch=batch)) is None:
                sizes = [f"block_size={block_size}"] if block_size != size else []
                return ", ".join(sizes + [said] * bool(said))
    return None


def _is_one_block(call: Call) -> bool:
    """Tells whether a row is one block, as it is in the contiguous layout."""
    return call.batch.block_tables.shape[1] == 1


def _resize(x: Any, sizes: dict[int, int]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(sizes.get(i, n) for i, n in enumerate(x.shape)), x.dtype)
