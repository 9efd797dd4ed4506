"""A device's shard of a divided pool, inside a `shard_map`: a run of every block's tokens, the blocks of its own heads,
or more KV heads than its query heads belong to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv._core.state.sharding import enclosing_mesh
from jaxkv._core.state.state import NULL_BLOCK, Pool


class BlockRuns(NamedTuple):
    """A device's run of the tokens of every block: one of `devices` runs."""

    number: jax.Array  # i32[]
    devices: int
    axis: str

    @property
    def stripe(self) -> jax.Array:
        """The run as the kernels' argument, i32[2]."""
        return jnp.stack([self.number, jnp.int32(self.devices)])

    def own(self, block: jax.Array, offset: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Returns the device's own slots, of `size` tokens of each block; the null block for those of others."""
        offset = offset - self.number * size
        is_own = (offset >= 0) & (offset < size)
        return jnp.where(is_own, block, NULL_BLOCK), jnp.where(is_own, offset, 0)

    def together(self, x: jax.Array) -> jax.Array:
        """Shares an array that one device has, and that is 0 on the others."""
        return _sum(x, self.axis)

    def gather(self, x: jax.Array, axis: int, tiled: bool = True) -> jax.Array:
        """Gathers all devices' arrays along an axis, or along a new one."""
        x = jax.lax.all_gather(x, self.axis, axis=axis, tiled=tiled)
        # All devices have the same, but `check_vma` in a caller's `shard_map` cannot know that.
        if self.axis in jax.typeof(x).manual_axis_type.varying:
            x = jax.lax.psum(jnp.where(self.number == 0, x, jnp.zeros((), x.dtype)), self.axis)
        return x


def find_block_runs(pool: Pool) -> BlockRuns | None:
    """Returns the device's run of every block, inside a `shard_map` over the axis that tokens are divided over; None if
    the device has all tokens."""
    if pool.context is None or (mesh := enclosing_mesh(pool, pool.context)) is None:
        return None
    return BlockRuns(jax.lax.axis_index(pool.context), mesh.shape[pool.context], pool.context)


class HeadShard(NamedTuple):
    """A device's shard of a pool's blocks: those of its heads."""

    number: jax.Array  # i32[]
    devices: int
    blocks: int  # including the null block
    axis: str

    def own(self, block: jax.Array) -> jax.Array:
        """Returns indices of blocks within the shard; the null block for those of others."""
        block = block - self.number * self.blocks
        return jnp.where((block > 0) & (block < self.blocks), block, NULL_BLOCK)

    def lines(self, x: jax.Array) -> jax.Array:
        """Returns the device's head rows of `[K * S, ...]`."""
        size = x.shape[0] // self.devices
        return jax.lax.dynamic_slice_in_dim(x, self.number * size, size)

    def first(self, x: jax.Array) -> jax.Array:
        """Returns the device's head rows of values that are equal for all heads."""
        return x[: x.shape[0] // self.devices]

    def together(self, x: jax.Array) -> jax.Array:
        """Shares an array that one device has, and that is 0 on the others."""
        return _sum(x, self.axis)


def find_head_shard(pool: Pool) -> HeadShard | None:
    """Returns the device's shard of blocks, inside a `shard_map` over the axis that heads with their own blocks are
    divided over; None if the device has all blocks."""
    if pool.num_shards == 1 or pool.heads is None or enclosing_mesh(pool, pool.heads) is None:
        return None
    return HeadShard(jax.lax.axis_index(pool.heads), pool.num_shards, pool.kv.shape[0], pool.heads)


def localize_blocks(pool: Pool, block: jax.Array) -> jax.Array:
    """Returns indices of blocks within this device's shard; the null block for those of other devices."""
    shard = find_head_shard(pool)
    return block if shard is None else shard.own(block)


def localize_slots(pool: Pool, block: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns slots within this device's shard of a pool; the null block for those of other devices."""
    runs, block = find_block_runs(pool), localize_blocks(pool, block)
    return (block, offset) if runs is None else runs.own(block, offset, pool.kv.shape[3])


def read_slots(pool: Pool, block: jax.Array, offset: jax.Array) -> Pool:
    """Reads slots `i32[...]` as `[..., 2, K, ...]`, whichever device has them."""
    owner = find_block_runs(pool) or find_head_shard(pool)
    if owner is None:
        return jax.tree.map(lambda x: x[block, :, :, offset], pool.tokens)
    block, offset = localize_slots(pool, block, offset)

    def read(x: jax.Array) -> jax.Array:
        found = x[block, :, :, offset]
        there = jnp.expand_dims(block != NULL_BLOCK, range(block.ndim, found.ndim))
        return owner.together(jnp.where(there, found, jnp.zeros((), x.dtype)))

    return jax.tree.map(read, pool.tokens)


class LocalHeads(NamedTuple):
    """The KV heads of a device's query heads, where each device holds all KV heads."""

    of: jax.Array  # i32[H]: the KV head of each of the device's query heads
    num_kv_heads: int

    def spread(self, x: jax.Array, axis: int) -> jax.Array:
        """Spreads H heads at `axis`, a negative number, to K * H: each at its KV head, with zeros at the others."""
        x = jnp.expand_dims(x, axis - 1)
        at = jnp.expand_dims(self._at, range(2, 1 - axis))
        x = jnp.where(at.reshape(*(1,) * (x.ndim - at.ndim), *at.shape), x, jnp.zeros((), x.dtype))
        return x.reshape(*x.shape[: axis - 1], -1, *x.shape[x.ndim + axis + 1 :])

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Inverts `spread`."""
        end = x.ndim + axis
        x = x.reshape(*x.shape[:end], self.num_kv_heads, -1, *x.shape[end + 1 :])
        at = jnp.expand_dims(self._at, range(2, 1 - axis))
        at = at.reshape(*(1,) * (x.ndim - at.ndim), *at.shape)
        return jnp.where(at, x, jnp.zeros((), x.dtype)).sum(axis=axis - 1, dtype=x.dtype)

    @property
    def _at(self) -> jax.Array:
        return jnp.arange(self.num_kv_heads, dtype=jnp.int32)[:, None] == self.of[None]  # [K, H]


def find_local_heads(pool: Pool, num_kv_heads: int, num_heads: int) -> LocalHeads | None:
    """Returns the KV heads of a device's `num_heads` query heads, inside a `shard_map` over more devices than there are
    KV heads; None anywhere else, where a device's KV heads are those of its query heads."""
    if num_kv_heads == 1 or pool.heads is None or (mesh := enclosing_mesh(pool, pool.heads)) is None:
        return None
    count = mesh.shape[pool.heads]
    if num_kv_heads >= count:
        return None
    head = jax.lax.axis_index(pool.heads) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
    return LocalHeads(head * num_kv_heads // (num_heads * count), num_kv_heads)


def _sum(x: jax.Array, axis: str) -> jax.Array:
    if x.dtype.itemsize == 1:  # not all such dtypes can be summed: sum their bits
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return jax.lax.bitcast_convert_type(jax.lax.psum(bits, axis), x.dtype)
    return jax.lax.psum(x, axis)
