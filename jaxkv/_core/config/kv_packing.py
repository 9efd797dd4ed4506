"""Packing of a token's keys and values into the rows of a layer's pool.

A TPU stores rows of 128 lanes: with a head_dim of 64 half of every row would be padding. Two such rows are packed into
one instead: the keys, or the values, of two heads (`Pairs`), or the values and keys of one head (`OneRow`). Four bits
would leave half of every row empty with a head_dim of 128, too: a byte holds a number of a head's values and one of its
keys (`Nibbles`). Kernels know none of them. They read `Pairs` as a pool with half the heads, twice as wide, and queries
that are 0 at the other head's entries; and the others as a pool of latent rows, whose first entries are the values.
`CacheConfig.form` chooses.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.quantization import pack_nibbles, unpack_nibbles
from pallas_kernels.common.xla_cpu import side_by_side


def stack_kv(k: Any, v: Any, axis: int) -> jax.Array:
    """Stacks keys and values as `[.., 2, ..]`, 2 at `axis`; 1 for rows: latent ones, whose v is None, or with values of
    another width than the keys before these."""
    if v is not None and k.shape[-1] != v.shape[-1]:
        return jnp.expand_dims(jnp.concatenate([jnp.asarray(v), jnp.asarray(k)], axis=-1), axis)
    return jnp.stack([jnp.asarray(x) for x in (k, v) if x is not None], axis)


class Apart:
    """No packing: keys and values in rows of their own, or a latent row, as wide as the padded head_dim."""

    joins = False  # whether a row packs two rows that would be padded

    def __init__(self, head_dim: int):
        self.head_dim = head_dim

    @property
    def rank(self) -> int | None:
        """Number of a row's leading entries that are values, if keys follow in the same row; else None."""
        return None

    @property
    def description(self) -> str:
        """What one row packs, in words; "" without packing."""
        return ""

    def row_shape(self, num_arrays: int, heads: int) -> tuple[int, int, int]:
        """Returns the rows of a token, the heads of each and the width, for `num_arrays` arrays of `heads` heads."""
        return num_arrays, heads, self.head_dim

    def heads(self, num_heads: int) -> int:
        """Returns the number of heads of a pool whose rows have `num_heads` packed heads."""
        return num_heads

    def pack(self, kv: Any, axis: int) -> Any:
        """Packs keys and values `[.., 2, K, .., D]`, 2 at `axis`, as in a pool. NumPy stays NumPy."""
        return kv

    def unpack(self, kv: Any, axis: int) -> Any:
        """Inverts `pack`, for rows that may be padded; without packing they stay padded."""
        return kv

    def pack_head(self, kv: Any) -> Any:
        """Packs the key and value of one head of one token, `[2, D]`, as in a row of a pool."""
        return kv

    def locate_head(self, head: int) -> tuple[int, int]:
        """Returns the packed head whose rows hold a head, and the offset of the head's entries in them."""
        return head, 0

    def pack_kv(self, k: jax.Array, v: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Packs a step's keys and values `[.., K, D]` as kernels take them."""
        return k, v

    def pack_queries(self, q: jax.Array, num_kv_heads: int) -> jax.Array:
        """Packs a step's queries `[.., H, D]` as kernels take them, for this device's `num_kv_heads` packed heads."""
        return q

    def unpack_outputs(self, out: jax.Array, num_kv_heads: int) -> jax.Array:
        """Unpacks the kernels' outputs for `pack_queries` to `[.., H, D]`."""
        return out


class OneRow(Apart):
    """`[v | k]`, a head's values and keys in one row. Scales of a quantized pool stay apart for keys and values,
    `[num_blocks + 1, 2, K, block_size]`."""

    joins = True

    @property
    def rank(self) -> int | None:
        return self.head_dim

    @property
    def description(self) -> str:
        return f"Keys and values of {self.head_dim}"

    def row_shape(self, num_arrays: int, heads: int) -> tuple[int, int, int]:
        return 1, heads, 2 * self.head_dim

    def pack(self, kv: Any, axis: int) -> Any:
        numpy = np if isinstance(kv, np.ndarray) else jnp
        k, v = numpy.split(kv, 2, axis=axis)
        return numpy.concatenate([v, k], axis=-1)

    def unpack(self, kv: Any, axis: int) -> Any:
        numpy = np if isinstance(kv, np.ndarray) else jnp
        v, k = kv[..., : self.head_dim], kv[..., self.head_dim : 2 * self.head_dim]
        return numpy.concatenate([k, v], axis=axis)

    def pack_head(self, kv: Any) -> Any:
        return self.pack(kv, axis=0)

    def pack_kv(self, k: jax.Array, v: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        assert v is not None
        return side_by_side(v, k), None

    def pack_queries(self, q: jax.Array, num_kv_heads: int) -> jax.Array:
        return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(q.shape[-1], 0)])


def can_hold(layer: Any, format: Any) -> bool:
    """Tells whether a format can store a layer: where keys and values share bits, it has no rows that hold both."""
    return layer.row_rank is None or not format.mixes_pairs


def can_share_bytes(layer: Any, format: Any) -> bool:
    """Tells whether a number of a layer's values and one of its keys can share a byte: not those of latent rows or of
    values of another width, and only where scales of groups divide a head."""
    return format.group_size is not None and layer.row_rank is None and layer.head_dim % format.group_size == 0


class Nibbles(OneRow):
    """A head's values and keys in one row as its format makes it of both side by side: in the low and the high bits of
    the same bytes. Both are of numbers as they are stored. Scales stay apart, `[.., 2, K, block_size, G]`."""

    @property
    def description(self) -> str:
        return f"Keys and values of {self.head_dim} in four bits"

    def pack(self, kv: Any, axis: int) -> Any:
        numpy = np if isinstance(kv, np.ndarray) else jnp
        return pack_nibbles(*numpy.split(kv, 2, axis=axis))

    def unpack(self, kv: Any, axis: int) -> Any:
        numpy = np if isinstance(kv, np.ndarray) else jnp
        return numpy.concatenate(unpack_nibbles(kv[..., : self.head_dim]), axis=axis)


class Pairs(Apart):
    """`[k1 | k2]` and `[v1 | v2]`, the keys and the values of two heads in one row each."""

    joins = True

    @property
    def description(self) -> str:
        return f"Two heads of {self.head_dim}"

    def row_shape(self, num_arrays: int, heads: int) -> tuple[int, int, int]:
        return num_arrays, heads // 2, 2 * self.head_dim

    def heads(self, num_heads: int) -> int:
        return 2 * num_heads

    def pack(self, kv: Any, axis: int) -> Any:
        numpy = np if isinstance(kv, np.ndarray) else jnp
        heads = axis % kv.ndim + 1
        kv = kv.reshape(*kv.shape[:heads], kv.shape[heads] // 2, 2, *kv.shape[heads + 1 :])
        kv = numpy.moveaxis(kv, heads + 1, -2)
        return kv.reshape(*kv.shape[:-2], 2 * self.head_dim)

    def unpack(self, kv: Any, axis: int) -> Any:
        numpy = np if isinstance(kv, np.ndarray) else jnp
        heads = axis % kv.ndim + 1
        kv = kv[..., : 2 * self.head_dim].reshape(*kv.shape[:-1], 2, self.head_dim)
        kv = numpy.moveaxis(kv, -2, heads + 1)
        return kv.reshape(*kv.shape[:heads], 2 * kv.shape[heads], *kv.shape[heads + 2 :])

    def locate_head(self, head: int) -> tuple[int, int]:
        return head // 2, head % 2 * self.head_dim

    def pack_kv(self, k: jax.Array, v: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        assert v is not None
        k, v = (x.reshape(*x.shape[:-2], x.shape[-2] // 2, 2 * x.shape[-1]) for x in (k, v))
        return k, v

    def pack_queries(self, q: jax.Array, num_kv_heads: int) -> jax.Array:
        in_second = np.arange(2 * self.head_dim) >= self.head_dim
        own = in_second == self._is_second(q, num_kv_heads)
        return jnp.where(own, side_by_side(q, q), jnp.zeros((), q.dtype))

    def unpack_outputs(self, out: jax.Array, num_kv_heads: int) -> jax.Array:
        first, second = out[..., : self.head_dim], out[..., self.head_dim :]
        return jnp.where(self._is_second(out, num_kv_heads), second, first)

    @staticmethod
    def _is_second(q: jax.Array, num_pairs: int) -> np.ndarray:
        """Returns `bool[H, 1]`, the query heads of the second head of a pair."""
        heads = np.arange(q.shape[-2])
        return (heads // (q.shape[-2] // (2 * num_pairs)) % 2 == 1)[:, None]
