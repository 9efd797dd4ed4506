"""The bytes of a cache, and whether a device has them."""

import math
import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.kv_packing import Apart, Nibbles, OneRow, Pairs, can_share_bytes
from jaxkv._core.config.layer_config import kind_of
from jaxkv._core.config.layer_groups import Groups
from jaxkv._core.config.validation import is_tracing
from pallas_kernels.common.quantization import FORMATS, StorageFormat
from pallas_kernels.common.rotation import rotate

LANES = 128  # of a TPU: there four bits are stored as its kernels read them


class ByteSizes(Groups):
    """Byte counts of a `CacheConfig`."""

    # Fields of `CacheConfig`, which inherits this class.
    group_blocks: tuple[int, ...]
    dtype: np.dtype
    head_dim_multiple: int
    join_kv: bool | Literal["head"]

    @property
    def kind_names(self) -> tuple[str, ...]:
        """What the shapes of a layer's pool do not tell: its storage format, and which entries of a row are values."""
        widths = ((self.kind(i).name, layer.v_head_dim) for i, layer in enumerate(self.layers))
        return tuple(name if width is None else f"{name} with values of {width} in " for name, width in widths)

    def kind(self, layer: int) -> StorageFormat:
        """Returns the storage format of a layer."""
        return kind_of(self.layer_config(self.owner(layer)).dtype or self.dtype, "dtype")

    def rotates(self, layer: int) -> bool:
        """Tells whether a layer's heads are rotated before they are stored."""
        kind, found = self.kind(layer), self.layer_config(self.owner(layer))
        if not kind.is_quantized or found.row_rank is not None:  # a row is no head: its entries must not be mixed
            return False
        return kind.rotates if found.rotate is None else found.rotate

    def form(self, layer: int) -> Apart:
        """Returns how keys and values are packed into the rows of a layer's pool; see `join_kv`."""
        found, kind = self.layer_config(layer), self.kind(layer)
        if kind.group_size is not None:
            in_bytes = self.join_kv and self.head_dim_multiple % LANES == 0 and can_share_bytes(found, kind)
            return Nibbles(found.head_dim) if in_bytes else Apart(found.row_dim)
        is_padded = self._padded(2 * found.head_dim) < 2 * self._padded(found.head_dim)
        if not self.join_kv or not is_padded or found.row_rank is not None:
            return Apart(found.row_dim)
        heads = self.stored_heads(layer)[1]
        in_pairs = self.join_kv != "head" and not kind.is_quantized and heads % 2 == 0
        return Pairs(found.head_dim) if in_pairs else OneRow(found.head_dim)

    def block_slots(self, layer: int) -> int:
        """Returns how many keys a block of a layer holds: its tokens, or entries of several of them."""
        return self.layer_config(layer).count_entries(self.block_size)

    def pairs_divide(self, layer: int, count: int) -> bool:
        """Tells whether a layer's packed heads can be divided among `count` devices like unpacked ones."""
        heads = self.layer_config(layer).num_kv_heads
        return not isinstance(self.form(layer), Pairs) or heads < count or heads // 2 % count == 0

    def pool_shape(self, layer: int) -> tuple[int, int, int, int, int]:
        """Returns `[num_blocks + 1, 2, K, block_size, D]`, D rounded up to a multiple of `head_dim_multiple`; half in
        four bits. With pairs of heads `[num_blocks + 1, 2, K / 2, block_size, 2 D]`; with a head's keys and values in
        one row `[num_blocks + 1, 1, K, block_size, 2 D]`, 2 D rounded up, or in four bits D rounded up; for a latent
        layer `[num_blocks + 1, 1, 1, block_size, D]`; with values of another width `[num_blocks + 1, 1, K, block_size,
        D]`, D being both widths together, rounded up. K is 1 in a layer that evicts by heads. With `compress_ratio` a
        block has as many slots as entries, `block_slots`."""
        return (self.group_blocks[self.group(layer)] + 1, *self._block_shape(layer))

    def stored_heads(self, layer: int) -> tuple[int, int]:
        """Returns how many arrays store a token (2: key and value, 1: both in one row), and the heads of each."""
        found = self.layer_config(layer)
        return 2 if found.row_rank is None else 1, 1 if self._evicts_by_heads(layer) else found.num_kv_heads

    def padded_head_dim(self, layer: int) -> int:
        """Returns the width of a layer's rows, rounded up to a multiple of `head_dim_multiple`."""
        return self._padded(self.layer_config(layer).row_dim)

    def scale_shape(self, layer: int) -> tuple[int, ...] | None:
        """Returns the shape of a quantized layer's scales: `[num_blocks + 1, 2, K, block_size]`; one more axis in
        four bits; for a latent layer `[num_blocks + 1, 1, 1, block_size, 2]`."""
        block = self._block_scales(layer)
        return None if block is None else (self.group_blocks[self.group(layer)] + 1, *block)

    def keeps_bounds(self, layer: int) -> bool:
        """Tells whether a layer stores bounds of each block's keys."""
        return self.layer_config(self.owner(layer)).bounds

    def bounds_shape(self, layer: int) -> tuple[int, ...] | None:
        """Returns the shape of a layer's bounds: `[num_blocks + 1, 2, K, head_dim]`."""
        found = self.layer_config(layer)
        return (self.pool_shape(layer)[0], 2, found.num_kv_heads, found.head_dim) if self.keeps_bounds(layer) else None

    def bounds_dtype(self, layer: int) -> np.dtype:
        """Returns the dtype of a layer's bounds: the dtype that its keys are read in."""
        kind = self.kind(layer)
        return jnp.dtype("float32") if kind.is_quantized else kind.storage_dtype

    def index_dim(self, layer: int) -> int | None:
        """Returns the entries of the index keys that a layer reads; None: there are none."""
        return self.layer_config(self.owner(layer)).index_dim

    def index_kind(self, layer: int) -> StorageFormat:
        """Returns the storage format of a layer's index keys: the layer's, or int8 where that has scales of groups of
        entries."""
        kind = self.kind(layer)
        return kind if kind.group_size is None else FORMATS["int8"]

    def index_shapes(self, layer: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Returns the shapes of a layer's index keys, `[num_blocks + 1, 1, 1, block_size, E]`, E rounded up as
        `head_dim` is, and of their scales."""
        if (index_dim := self.index_dim(layer)) is None:
            return None, None
        slots = (self.pool_shape(layer)[0], 1, 1, self.block_slots(layer))
        return (*slots, self._padded(index_dim)), slots if self.index_kind(layer).is_quantized else None

    def array_shapes(self, layer: int) -> tuple[tuple[int, ...] | None, ...]:
        """Returns the shapes of a layer's arrays, in the order of `Pool.arrays`; None: there is no such array."""
        shapes = (self.pool_shape(layer), self.scale_shape(layer), self.bounds_shape(layer))
        return (*shapes, *self.index_shapes(layer))

    def array_dtypes(self, layer: int) -> tuple[np.dtype, ...]:
        """Returns the dtypes of a layer's arrays, in the order of `Pool.arrays`."""
        kind, index = self.kind(layer), self.index_kind(layer)
        own = (kind.storage_dtype, kind.scale_dtype, self.bounds_dtype(layer), index.storage_dtype, index.scale_dtype)
        return tuple(map(np.dtype, own))

    def stack_shapes(self, layer: int, num_shards: int = 1) -> tuple[tuple[int, ...] | None, ...]:
        """Returns the shapes of the arrays that store a layer (`array_shapes`), over all layers of its stack. Each of
        the `num_shards` shards has a null block."""
        count = len(self.stack(layer))
        return tuple(
            None if shape is None else (count * (shape[0] + num_shards - 1), *shape[1:])
            for shape in self.array_shapes(layer)
        )

    def bytes_per_group_block(self, group: int) -> int:
        """Returns the bytes of one block over the layers of a group, scales, bounds and index keys included."""
        kinds: dict[Any, list[int]] = {}
        for layer in self.groups[group]:
            kinds.setdefault(self.layers[layer], []).append(layer)
        return sum(len(alike) * self.bytes_per_layer_block(alike[0]) for alike in kinds.values())

    def bytes_per_layer_block(self, layer: int) -> int:
        """Returns the bytes of one block of one layer, scales, bounds and index keys included."""
        arrays = zip(self.array_shapes(layer), self.array_dtypes(layer), strict=True)
        return sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in arrays if shape is not None)

    def bytes_per_block_read(self, layer: int) -> int:
        """Returns the bytes that attention reads of one block of one layer: keys, values and scales."""
        kind, scales = self.kind(layer), self._block_scales(layer)
        numbers = math.prod(self._block_shape(layer)) * kind.storage_dtype.itemsize
        return numbers + (0 if scales is None else math.prod(scales) * kind.scale_dtype.itemsize)

    def index_bytes_per_block(self, layer: int) -> int:
        """Returns the bytes that choosing tokens reads of one block of one layer: index keys and their scales."""
        arrays = zip(self.index_shapes(layer), self.array_dtypes(layer)[-2:], strict=True)
        return sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in arrays if shape is not None)

    def _block_shape(self, layer: int) -> tuple[int, int, int, int]:
        form, kind = self.form(layer), self.kind(layer)
        rows, heads, width = form.row_shape(*self.stored_heads(layer))
        # Rows that pack two are padded as they are stored: in four bits to whole bytes of lanes.
        stored = self._padded(kind.stored_dim(width)) if form.joins else kind.stored_dim(self._padded(width))
        return (rows, heads, self.block_slots(layer), stored)

    def _evicts_by_heads(self, layer: int) -> bool:
        return self.layer_config(self.owner(layer)).evict == "head"

    def _padded(self, size: int) -> int:
        return -(-size // self.head_dim_multiple) * self.head_dim_multiple

    def _block_scales(self, layer: int) -> tuple[int, ...] | None:
        if not self.kind(layer).is_quantized:
            return None
        num_arrays, heads = self.stored_heads(layer)
        return (num_arrays, heads, self.block_slots(layer), *self.scale_axes(layer))

    def scale_axes(self, layer: int) -> tuple[int, ...]:
        """Returns the axes after `[..., K, block_size]` in the shape of a quantized layer's scales."""
        found = self.layer_config(layer)
        return self.kind(layer).scale_axes(found.row_dim, found.row_rank)

    def encode(self, layer: int, kv: Any, axis: int) -> tuple[jax.Array, jax.Array | None]:
        """Encodes a layer's keys and values, stacked at `axis`, or rows of both, `[.., D]` as numbers and scales, not
        packed yet."""
        kv = rotate(kv, deterministic=True) if self.rotates(layer) else kv
        kind, kv = self.kind(layer), jnp.asarray(kv)
        if not kind.is_quantized:
            return kv.astype(kind.storage_dtype), None
        return kind.encode(kv, rank=self.layer_config(layer).row_rank, axis=axis)

    def blocks_of(self, layer: int, kv: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Encodes keys and values `[n, 2, K, block_size, D]` as a layer's blocks: numbers and scales."""
        numbers, scale = self.encode(layer, kv, axis=1)
        return self.form(layer).pack(numbers, axis=1), scale

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, of all heads."""
        return sum(self.bytes_per_group_block(g) * heads for g, heads in enumerate(self.group_heads))

    @property
    def bytes(self) -> int:
        """Bytes of all pools, null blocks and states included; the tables' few integers are not counted."""
        blocks = sum((n + 1) * self.bytes_per_group_block(g) for g, n in enumerate(self.group_blocks))
        return blocks + (self.num_state_slots + 1) * self.bytes_per_state

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one row's states over all recurrent layers; 0 without."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of a dense cache of the same rows: `max_seqs * max_seq_len` slots in every layer."""
        groups = zip(self.groups, self.group_heads, strict=True)
        block = sum(
            (self.bytes_per_block_read(i) + self.index_bytes_per_block(i)) * heads
            for layers, heads in groups
            for i in layers
        )
        return self.max_seqs * self.max_seq_len * block // self.block_size

    def check_memory(self, device: Any = None, num_shards: int = 1) -> None:
        """Raises ValueError if a cache exceeds the memory of `device`, which holds one of `num_shards` equal shards of
        its pools. Default: the device that arrays are made on now."""
        if is_tracing():  # nothing is allocated here
            return
        device = next(iter(jnp.zeros(()).devices())) if device is None else device
        memory = (device.memory_stats() or {}).get("bytes_limit")
        if device.platform == "cpu" and hasattr(os, "sysconf"):
            memory, num_shards = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 1  # all devices share it
        entries = self.max_seqs * sum(w * n for w, n in zip(self.table_widths, self.group_heads, strict=True))
        needed = self.bytes // num_shards + entries * np.dtype(np.int32).itemsize
        if memory and needed > memory:
            less = f"{self.size_argument}, max_seqs or max_seq_len, or say the memory_bytes that it may take"
            raise ValueError(
                f"The cache would take {needed} bytes, but {device} has {memory} bytes of memory: lower "
                f"{'memory_bytes' if self.size_argument == 'memory_bytes' else less}."
            )
