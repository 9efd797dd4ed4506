"""How keys and values are stored: as they are, or as numbers of 8 or fewer bits with scales, symmetric around 0.

`FORMATS` is the one list of storage formats, for the kernels and for the cache. A token's keys (and its values) have a
scale of their own in each head, so the stored bits depend on that token and head alone, never on how steps were split.
A latent row, whose first `rank` numbers are its values, has one scale for those and one for the others. So has a packed
row, a head's values and its keys behind them, but its scales are kept as those of keys and values apart: no query meets
both. Formats of fewer than 8 bits or of 8-bit floats are stored as uint8: XLA on a CPU converts a whole pool of such a
dtype wherever it is read.

Four bits choose one of 16 levels (`levels`), and a byte holds two numbers. Of k5v3 a key chooses one of 32 and a value
one of 8: attention loses far more by its keys than by its values. Half a byte has room for neither, so the lowest bit
of a key stands above its value. Both are therefore encoded and decoded together.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.quantization.levels import FIVE_BITS, FOUR_BITS, THREE_BITS, Levels

FLOAT32 = np.dtype("float32")
TINY = 1e-8  # where the largest number is below this, it is taken for this


class Float8(NamedTuple):
    """The bits of an 8-bit float."""

    mantissa: int
    bias: int  # how much less the exponent's bias is than float32's
    not_finite: int  # the least bits, without the sign, that are NaN or infinity


@dataclasses.dataclass(frozen=True, eq=False)
class StorageFormat:
    """How the numbers of a pool are stored.

    >>> FORMATS["int4"].stored_dim(80), FORMATS["int8"].stored_dim(80), UNQUANTIZED.stored_dim(80)
    (40, 80, 80)
    """

    name: str
    storage_dtype: np.dtype  # of the pool
    largest: float | None = None  # what the largest number of a group becomes; None: stored as they are, no scales
    group_size: int | None = None  # entries of a head that share a scale; None: all of them
    numbers_per_entry: int = 1  # of the pool
    scale_dtype: np.dtype = FLOAT32  # of a cache's scales
    scale_dtypes: tuple[np.dtype, ...] = (FLOAT32, jnp.dtype("bfloat16"))  # that the scales of a pool may have
    levels: tuple[Levels, Levels] | None = None  # of keys and of values: the scale is searched, and none is 0
    rotates: bool = False  # whether a cache rotates heads before it stores them, if nothing else is said
    loss: float = 0.0  # by how many percent more SmolLM2-135M loses, measured by benchmarks/quality.py
    revision: int = 1  # of what the bits mean: files of another one are refused
    float8: Float8 | None = None
    to_bits: Callable[[jax.Array], jax.Array] = lambda x: x  # numbers within `largest` as they are stored
    from_bits: Callable[[jax.Array], jax.Array] = lambda x: x  # and back, in a dtype that holds them exactly

    @property
    def is_quantized(self) -> bool:
        """Whether numbers are multiplied by scales when they are read."""
        return self.largest is not None

    @property
    def mixes_pairs(self) -> bool:
        """Whether a number of the values and one of the keys share bits, so that only both together can be read."""
        return self.levels is not None and self.levels[0] != self.levels[1]

    @property
    def kind(self) -> str | None:
        """Returns the argument `kind` of `paged_attention`: None for what is stored as it is."""
        return self.name if self.is_quantized else None

    @property
    def declared_dtype(self) -> np.dtype | str:
        """What configs hold as `dtype`: JAX's dtype of the format's name, or the name if JAX has none."""
        try:
            return jnp.dtype(self.name)
        except TypeError:
            return self.name

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one number, scales aside."""
        return self.storage_dtype.itemsize / self.numbers_per_entry

    def stored_dim(self, head_dim: int) -> int:
        """Returns the entries that a head takes in the pool."""
        return head_dim // self.numbers_per_entry

    def scale_axes(self, head_dim: int, rank: int | None = None) -> tuple[int, ...]:
        """Returns what follows `[..., K, block_size]` in the shape of the scales."""
        if self.group_size is not None:
            return (-(-head_dim // self.group_size),)
        return () if rank is None else (2,)

    def has_entry_scales(self, head_dim: int, rank: int | None = None) -> bool:
        """Tells whether the entries of a head have more than one scale."""
        return self.scale_axes(head_dim, rank) != ()

    def scale_shape(
        self, kv_shape: tuple[int, ...], head_dim: int, rank: int | None = None, packed: bool = False
    ) -> tuple[int, ...]:
        """Returns the shape of the scales of a pool `[num_blocks + 1, 2, K, block_size, ...]`, or with 1 for 2."""
        if not packed:
            return (*kv_shape[:4], *self.scale_axes(head_dim, rank))
        blocks, _, num_kv_heads, block_size = kv_shape[:4]
        return (blocks, 2, num_kv_heads, block_size, *self.scale_axes(rank or head_dim))

    def encode(
        self, x: jax.Array, scale_dtype: np.dtype | None = None, rank: int | None = None, *, axis: int | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns numbers `[..., D]` as they are stored, and their scales `[...]`, with one more axis where a head has
        several: of `ceil(D / group_size)`, or of latent rows 2.

        A NaN or an infinity anywhere in a head makes its scale NaN, and so all that is read of that token and head.

        Args:
          axis: where keys and values are stacked, which a format that `mixes_pairs` must know.

        >>> stored, scale = FORMATS["int8"].encode(jnp.array([[-1.0, 0.25, 0.0, 0.5]]))
        >>> stored.tolist(), [f"{s:.5f}" for s in scale.tolist()]
        ([[-127, 32, 0, 64]], ['0.00787'])
        """
        if self.mixes_pairs:
            assert axis is not None and x.shape[axis] == 2 and self.levels is not None
            axis %= x.ndim
            (keys, key_scale), (values, value_scale) = (
                self._encode_levels(jnp.take(x, i, axis=axis), levels, scale_dtype)
                for i, levels in enumerate(self.levels)
            )
            both = [_pack_halves(codes) for codes in _share_bits(keys, values)]
            return jnp.stack(both, axis), jnp.stack([key_scale, value_scale], axis)
        if self.levels is not None:
            codes, scale = self._encode_levels(x, self.levels[0], scale_dtype)
            return _pack_halves(codes), scale
        if rank is not None:  # half by half, as kernels do it: else it rounds differently
            halves = [self.encode(half, scale_dtype) for half in (x[..., :rank], x[..., rank:])]
            scale = jnp.stack([scale for _, scale in halves], axis=-1)
            nan = jnp.isnan(scale).any(axis=-1, keepdims=True)
            return jnp.concatenate([stored for stored, _ in halves], axis=-1), jnp.where(nan, jnp.nan, scale)
        assert self.largest is not None, f"{self.name} has no scales"
        x, finite = _hide_not_finite(x)
        scale = jnp.maximum(jnp.abs(x).max(axis=-1, initial=0.0), TINY) / self.largest  # half a row may be empty
        scale = scale.astype(scale_dtype or self.scale_dtype)
        ratio = x / self.spread_scales(scale, x.shape[-1])
        stored = self.to_bits(jnp.clip(ratio, -self.largest, self.largest))  # a scale may have been rounded down
        return stored, jnp.where(finite, scale, jnp.asarray(jnp.nan, scale.dtype))

    def _encode_levels(self, x: jax.Array, levels: Levels, scale_dtype: np.dtype | None) -> tuple[jax.Array, jax.Array]:
        """Returns codes `i32[..., D]` and the scales of their groups."""
        x, finite = _hide_not_finite(x)
        largest = jnp.abs(self._group_entries(x)).max(axis=-1)
        scale = jnp.maximum(largest, TINY) / levels.last
        parts = levels.count_parts(jnp.abs(x), self.spread_scales(scale, x.shape[-1]))
        is_entry = self._group_entries(jnp.ones_like(parts))  # and none of those that fill the last group
        scale = scale * levels.choose_scale(self._group_entries(parts), is_entry)
        scale = scale.astype(scale_dtype or self.scale_dtype)
        codes = levels.find_codes(x / self.spread_scales(scale, x.shape[-1]))
        scale = jnp.where(largest > 0, scale, jnp.zeros((), scale.dtype))
        return codes, jnp.where(finite[..., None], scale, jnp.asarray(jnp.nan, scale.dtype))

    def encode_packed(
        self, x: jax.Array, scale_dtype: np.dtype | None, rank: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns packed rows `[..., D]` as they are stored, and the scales of their keys and of their values."""
        if self.numbers_per_entry > 1:
            numbers, scales = self.encode(jnp.stack([x[..., rank:], x[..., :rank]]), scale_dtype, axis=0)
            return pack_nibbles(*numbers), scales[0], scales[1]
        (values, value_scale), (keys, key_scale) = (self.encode(x, scale_dtype) for x in (x[..., :rank], x[..., rank:]))
        return jnp.concatenate([values, keys], axis=-1), key_scale, value_scale

    def decode(
        self, stored: jax.Array, scale: jax.Array, head_dim: int, rank: int | None = None, *, axis: int | None = None
    ) -> jax.Array:
        """Returns what is stored as float32 `[..., D]`; `axis` as in `encode`.

        Of packed rows that is what `from_bits` makes of them, and their scales are one after another.
        """
        stored = stored[..., : self.stored_dim(head_dim)]
        if self.mixes_pairs and axis is not None and stored.shape[axis] == 2:
            numbers = jnp.stack(self.read_pair(*(jnp.take(stored, i, axis=axis) for i in range(2))), axis)
        else:
            numbers = self.from_bits(stored)
        return numbers.astype(jnp.float32) * self.spread_scales(scale, head_dim, rank)

    def read_pair(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of keys and of values that are stored apart, before they are multiplied by scales."""
        if not self.mixes_pairs:
            return self.from_bits(keys), self.from_bits(values)
        assert self.levels is not None
        low, high = _share_bits_back(keys, values), _share_bits_back(keys >> 4, values >> 4)
        codes = [jnp.concatenate(halves, axis=-1) for halves in zip(low, high, strict=True)]
        return self.levels[0].read(codes[0]), self.levels[1].read(codes[1])

    def split_row(self, stored: jax.Array, scale: jax.Array, rank: int, head_dim: int) -> list[tuple[jax.Array, ...]]:
        """Returns the values and the keys of rows of `head_dim` numbers, whose first `rank` are the values, each as it
        would be stored alone, and their scales.

        Groups count from the row's start: where `rank` is no multiple of their size, the last scale of the values is
        the first of the keys.
        """
        numbers = stored[..., : self.stored_dim(head_dim)]
        if self.numbers_per_entry > 1:
            numbers = self.from_bits(numbers).astype(jnp.float32)
        values, keys = numbers[..., :rank], numbers[..., rank:]
        if self.numbers_per_entry > 1:
            values, keys = (self.to_bits(_pad_last(x, -x.shape[-1] % self.numbers_per_entry)) for x in (values, keys))
        if (size := self.group_size) is None:
            return [(values, scale[..., 0]), (keys, scale[..., 1])]
        return [(values, scale[..., : math.ceil(rank / size)]), (keys, scale[..., rank // size :])]

    def spread_scales(self, scale: jax.Array, head_dim: int, rank: int | None = None) -> jax.Array:
        """Returns the factor of each entry of a head: `[..., D]`, or `[..., 1]` where they share one."""
        scale = scale.astype(jnp.float32)
        if self.group_size is not None:
            return jnp.repeat(scale, self.group_size, axis=-1)[..., :head_dim]
        if rank is not None:
            return jnp.where(np.arange(head_dim) < rank, scale[..., :1], scale[..., 1:])
        return scale[..., None]

    def sum_by_scale(self, x: jax.Array, rank: int | None = None) -> jax.Array:
        """Returns sums over the entries `[..., D]` that share a scale: the transpose of `spread_scales`."""
        return self._group_entries(x, rank).sum(axis=-1)

    def hide_bad_scales(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns scales of keys and values such that what no query sees does nothing in a kernel, whatever they hold.

        A weight of 0 times NaN is NaN, so a value's scale that is not finite becomes 0, and the key's NaN in its stead,
        for logits are selected. Who sees such a token gets NaN in that head, in the LSE too.
        """
        assert self.largest is not None, f"{self.name} has no scales"
        most = float(jnp.finfo(jnp.float32).max) / self.largest
        finite = (values <= most) & (values >= -most)
        return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0.0)

    def _group_entries(self, x: jax.Array, rank: int | None = None) -> jax.Array:
        """`[..., D]` to `[..., groups, entries]`: those that share a scale together, and zeros behind them."""
        if self.group_size is None and rank is None:
            return x

        if self.group_size is not None:
            count = math.ceil(x.shape[-1] / self.group_size)
            return _pad_last(x, count * self.group_size - x.shape[-1]).reshape(*x.shape[:-1], count, self.group_size)
        size = max(rank or 0, x.shape[-1] - (rank or 0))
        return jnp.stack([_pad_last(part, size - part.shape[-1]) for part in (x[..., :rank], x[..., rank:])], axis=-2)


def _pad_last(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)])


def widen_int8(stored: jax.Array) -> jax.Array:
    """Returns int8 as float32.

    By way of their bits, which are put into a float of 2 ** 23: XLA for CPUs converts bytes four times slower.

    >>> widen_int8(jnp.array([-128, -1, 0, 127], jnp.int8)).tolist()
    [-128.0, -1.0, 0.0, 127.0]
    """
    bits = (stored.astype(jnp.int32) + 128) | (150 << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - (2.0**23 + 128)


def _round_to_int8(x: jax.Array) -> jax.Array:
    # By way of 32 bits, for the compiler for tpu7x knows no other.
    return jnp.round(x).astype(jnp.int32).astype(jnp.int8)


def _hide_not_finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns numbers in float32, 0 where they are not finite, and whether all of a head are."""
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x).all(axis=-1)  # asked for by itself: a maximum may drop a NaN
    return jnp.where(finite[..., None], x, 0.0), finite


def _pack_halves(codes: jax.Array) -> jax.Array:
    """Entry i of the first half of a head stands in the low bits of byte i, that of the second half above it."""
    low, high = jnp.split(codes, 2, axis=-1)
    return ((low & 15) | ((high & 15) << 4)).astype(jnp.uint8)


def _share_bits(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes of five and of three bits as four bits each: above a value's stands its key's lowest."""
    return keys >> 1, (values & 7) | ((keys & 1) << 3)


def _share_bits_back(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes, `i32`, of bytes in whose low four bits `_share_bits` put them."""
    high, low = _sign_low_bits(keys, 4), values.astype(jnp.int32) >> 3 & 1
    return 2 * high + low, _sign_low_bits(values, 3)


def _sign_low_bits(stored: jax.Array, bits: int) -> jax.Array:
    """Returns the lowest bits of bytes, the first of which is their sign, as `i32`."""
    signed = stored.astype(jnp.int8)  # the top bits of a byte are its sign
    return jnp.right_shift(jnp.left_shift(signed, jnp.int8(8 - bits)), jnp.int8(8 - bits)).astype(jnp.int32)


def pack_nibbles(keys: Any, values: Any) -> Any:
    """Returns a head's keys and values in four bits, `[..., D / 2]` each, as one row `[..., D]`: entry i of the values
    stands in the low bits of byte i, that of the keys above it. It is what the format makes of values and keys side by
    side. NumPy stays NumPy.

    >>> pack_nibbles(np.array([0x21], np.uint8), np.array([0x43], np.uint8)).tolist() == [0x13, 0x24]
    True
    """
    numpy = np if isinstance(keys, np.ndarray) else jnp
    low, high = np.uint8(0x0F), np.uint8(0xF0)
    return numpy.concatenate([(values & low) | (keys << 4), (values >> 4) | (keys & high)], axis=-1)


def unpack_nibbles(rows: Any) -> tuple[Any, Any]:
    """Returns the keys and the values that `pack_nibbles` was given."""
    numpy = np if isinstance(rows, np.ndarray) else jnp
    low, high = np.uint8(0x0F), np.uint8(0xF0)
    first, second = numpy.split(rows, 2, axis=-1)
    return (first >> 4) | (second & high), (first & low) | (second << 4)


def _pack_int4(x: jax.Array) -> jax.Array:
    return _pack_halves(FOUR_BITS.find_codes(x))


def _unpack_int4(stored: jax.Array) -> jax.Array:
    high = jnp.right_shift(stored.astype(jnp.int8), jnp.int8(4)).astype(jnp.int32)
    return FOUR_BITS.read(jnp.concatenate([_sign_low_bits(stored, 4), high], axis=-1))


def _unpack_k5v3(rows: jax.Array) -> jax.Array:
    """Returns the values and, behind them, the keys of packed rows, a byte of which has one of each."""
    keys = jnp.right_shift(rows.astype(jnp.int8), jnp.int8(3)).astype(jnp.int32)
    return jnp.concatenate([THREE_BITS.read(_sign_low_bits(rows, 3)), FIVE_BITS.read(keys)], axis=-1)


def _round_to_float8(x: jax.Array, float8: Float8) -> jax.Array:
    """Returns the bits of float32 within an 8-bit float's range, rounded to the nearest, ties to even.

    In integers, for XLA's compiler for TPUs ends the process at the conversion.
    """
    mantissa, bias, _ = float8
    cut = 23 - mantissa
    wide = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    normal = ((wide + ((1 << (cut - 1)) - 1) + ((wide >> cut) & 1)) >> cut) - (bias << mantissa)
    small = jnp.round(jnp.abs(x) * 2.0 ** (126 + mantissa - bias)).astype(jnp.int32)
    magnitude = jnp.where(jnp.abs(x) < 2.0 ** (bias - 126), small, normal)
    return jnp.where(x < 0, magnitude + 128, magnitude).astype(jnp.uint8)


def _read_float8(stored: jax.Array, float8: Float8) -> jax.Array:
    """Returns the numbers of bits of 8-bit floats. Those that are never stored, of NaN and infinity, give any."""
    mantissa, bias, _ = float8
    bits = stored.astype(jnp.int32)
    magnitude = bits & 0x7F
    # The fractions of the least normal number have no exponent: they get its, and what it stands for is taken away.
    small = magnitude < 1 << mantissa
    wide = (magnitude + (jnp.where(small, bias + 1, bias) << mantissa)) << (23 - mantissa)
    number = jax.lax.bitcast_convert_type(wide, jnp.float32) - jnp.where(small, 2.0 ** (bias - 126), 0.0)
    return jnp.where(bits >= 128, -number, number).astype(jnp.bfloat16)


def _make_float8(name: str, largest: float, float8: Float8, loss: float) -> StorageFormat:
    return StorageFormat(
        name,
        np.dtype("uint8"),
        largest,
        loss=loss,
        float8=float8,
        to_bits=functools.partial(_round_to_float8, float8=float8),
        from_bits=functools.partial(_read_float8, float8=float8),
    )


_INT4 = StorageFormat(
    "int4",
    np.dtype("uint8"),
    FOUR_BITS.last,
    group_size=32,
    numbers_per_entry=2,
    scale_dtype=jnp.dtype("bfloat16"),
    levels=(FOUR_BITS, FOUR_BITS),
    rotates=True,  # the small model's loss says so; elsewhere it does not care: see benchmarks/NOTES.md
    loss=1.88,
    revision=3,  # 1 had even steps, 2 levels that were rounded
    to_bits=_pack_int4,
    from_bits=_unpack_int4,
)

# In order of their bytes. A format that is not quantized is named after its dtype.
FORMATS = {
    format.name: format
    for format in (
        *(StorageFormat(name, jnp.dtype(name)) for name in ("bfloat16", "float16", "float32")),
        StorageFormat("int8", np.dtype("int8"), 127.0, loss=0.04, to_bits=_round_to_int8),
        _make_float8("float8_e4m3fn", 448.0, Float8(3, 120, 0x7F), loss=0.36),
        _make_float8("float8_e5m2", 57344.0, Float8(2, 112, 0x7C), loss=1.49),
        _INT4,
        dataclasses.replace(
            _INT4,
            name="k5v3",
            largest=FIVE_BITS.last,  # which is above that of values
            group_size=64,
            levels=(FIVE_BITS, THREE_BITS),
            loss=1.56,
            revision=1,
            from_bits=_unpack_k5v3,
        ),
    )
}
QUANTIZED = tuple(name for name, format in FORMATS.items() if format.is_quantized)
UNQUANTIZED = StorageFormat("as they are", FLOAT32)  # a pool in any dtype, which the pool itself says


def find_format(kind: str | None) -> StorageFormat:
    """Returns the format of a pool of this `kind`, the argument of `paged_attention`.

    Raises:
      ValueError: a kind that there is not.
    """
    if kind is None:
        return UNQUANTIZED
    if not isinstance(kind, str) or kind not in QUANTIZED:
        given = repr(kind) if isinstance(kind, str) else type(kind).__name__
        raise ValueError(f"kind must be None or one of {', '.join(QUANTIZED)}, not {given}.")
    return FORMATS[kind]
