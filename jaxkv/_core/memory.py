"""What a cache takes, and whether a device has it."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.groups import Groups
from jaxkv._core.layer import Kind, kind_of


class Memory(Groups):
    """The part of `CacheConfig` that counts bytes."""

    # Of `CacheConfig`, which is built on this class.
    group_blocks: tuple[int, ...]
    dtype: np.dtype
    head_dim_multiple: int

    def kind(self, layer: int) -> Kind:
        """How a layer's elements are stored."""
        return kind_of(self.layer_config(self.owner(layer)).dtype or self.dtype, "dtype")

    def pool_shape(self, layer: int) -> tuple[int, int, int, int, int]:
        """`[num_blocks + 1, 2, K, block_size, D]`, D rounded up to a multiple of `head_dim_multiple`."""
        return (self.group_blocks[self.group(layer)] + 1, *self._block_shape(layer))

    def _block_shape(self, layer: int) -> tuple[int, int, int, int]:
        config = self.layer_config(layer)
        head_dim = -(-config.head_dim // self.head_dim_multiple) * self.head_dim_multiple
        return (2, config.num_kv_heads, self.block_size, head_dim)

    def stack_shape(self, layer: int) -> tuple[int, int, int, int, int]:
        """The shape of the pool that a layer lies in: `pool_shape`, as many times as there are layers in it."""
        num_blocks, *block = self.pool_shape(layer)
        return (len(self.stack(layer)) * num_blocks, *block)  # type: ignore[return-value]

    def bytes_per_group_block(self, group: int) -> int:
        """Bytes of one block over the layers of a group."""
        return sum(math.prod(self._block_shape(i)) * self.kind(i).bytes_per_element for i in self.groups[group])

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return sum(map(self.bytes_per_group_block, range(len(self.groups))))

    @property
    def bytes(self) -> int:
        """Bytes of all pools, the null blocks included; the tables' few integers are not counted."""
        return sum((n + 1) * self.bytes_per_group_block(g) for g, n in enumerate(self.group_blocks))

    @property
    def dense_bytes(self) -> int:
        """What a dense cache of the same rows would take: `max_seqs * max_seq_len` places in every layer."""
        return self.max_seqs * self.max_seq_len * self.bytes_per_block // self.block_size

    def check_memory(self) -> None:
        """Raise ValueError if a cache takes more than the memory of the device that arrays are made on now."""
        probe = jnp.zeros(())
        if isinstance(probe, jax.core.Tracer):  # nothing is allocated here
            return
        device = next(iter(probe.devices()))
        memory = (device.memory_stats() or {}).get("bytes_limit")
        if device.platform == "cpu" and hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        entries = len(self.group_blocks) * self.max_seqs * self.max_blocks_per_seq
        needed = self.bytes + entries * np.dtype(np.int32).itemsize
        if memory and needed > memory:
            raise ValueError(
                f"The cache would take {needed} bytes, but {device} has {memory} bytes of memory: give it fewer "
                "num_blocks, a smaller max_seqs or max_seq_len, or say memory_bytes and have them chosen."
            )
