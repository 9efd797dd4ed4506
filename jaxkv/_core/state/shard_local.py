"""What a device has at hand of pools that are divided, inside a `shard_map`: a run of every block's tokens, the blocks
of its own heads, or more KV heads than its query heads belong to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv._core.state.sharding import inside
from jaxkv._core.state.state import NULL_BLOCK, Pool


class Runs(NamedTuple):
    """The run that a device has of the tokens of every block: one of as many as there are devices."""

    number: jax.Array  # i32[]
    devices: int
    axis: str

    @property
    def stripe(self) -> jax.Array:
        """As kernels want it."""
        return jnp.stack([self.number, jnp.int32(self.devices)])

    def own(self, block: jax.Array, offset: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Places in blocks, where the device has `size` tokens of each; the null block where another has it."""
        offset = offset - self.number * size
        is_own = (offset >= 0) & (offset < size)
        return jnp.where(is_own, block, NULL_BLOCK), jnp.where(is_own, offset, 0)

    def together(self, x: jax.Array) -> jax.Array:
        """What one of the devices has, and the others 0 for."""
        return _sum(x, self.axis)

    def gathered(self, x: jax.Array, axis: int, tiled: bool = True) -> jax.Array:
        """What all have, one after another along an axis, or along a new one."""
        x = jax.lax.all_gather(x, self.axis, axis=axis, tiled=tiled)
        # All have the same, but `check_vma` in a caller's `shard_map` cannot know.
        if self.axis in jax.typeof(x).manual_axis_type.varying:
            x = jax.lax.psum(jnp.where(self.number == 0, x, jnp.zeros((), x.dtype)), self.axis)
        return x


def runs_of(pool: Pool) -> Runs | None:
    """Which tokens of every block a device has, inside a `shard_map` over the axis that they are divided over; None
    where it has all."""
    if pool.context is None or (mesh := inside(pool, pool.context)) is None:
        return None
    return Runs(jax.lax.axis_index(pool.context), mesh.shape[pool.context], pool.context)


class Part(NamedTuple):
    """The part that a device has of a pool's blocks, those of its heads."""

    number: jax.Array  # i32[]
    devices: int
    blocks: int  # the null block counted
    axis: str

    def own(self, block: jax.Array) -> jax.Array:
        """Blocks as the part has them; the null block for those of others."""
        block = block - self.number * self.blocks
        return jnp.where((block > 0) & (block < self.blocks), block, NULL_BLOCK)

    def lines(self, x: jax.Array) -> jax.Array:
        """Of what there is for each line `[K * S, ...]`, that of the device's."""
        size = x.shape[0] // self.devices
        return jax.lax.dynamic_slice_in_dim(x, self.number * size, size)

    def first(self, x: jax.Array) -> jax.Array:
        """The same of what is alike for all heads."""
        return x[: x.shape[0] // self.devices]

    def together(self, x: jax.Array) -> jax.Array:
        """What one of the devices has, and the others 0 for."""
        return _sum(x, self.axis)


def part_of(pool: Pool) -> Part | None:
    """Which blocks a device has, inside a `shard_map` over the axis that heads with blocks of their own are divided
    over; None where it has all."""
    if pool.parts == 1 or pool.heads is None or inside(pool, pool.heads) is None:
        return None
    return Part(jax.lax.axis_index(pool.heads), pool.parts, pool.kv.shape[0], pool.heads)


def own_blocks(pool: Pool, block: jax.Array) -> jax.Array:
    """Blocks as the part of a pool at hand has them; the null block for those of other devices."""
    part = part_of(pool)
    return block if part is None else part.own(block)


def own_places(pool: Pool, block: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places in blocks as the part of a pool at hand has them; the null block for those of other devices."""
    runs, block = runs_of(pool), own_blocks(pool, block)
    return (block, offset) if runs is None else runs.own(block, offset, pool.kv.shape[3])


def at_places(pool: Pool, block: jax.Array, offset: jax.Array) -> Pool:
    """What lies at places `i32[...]` in blocks, `[..., 2, K, ...]`, whichever device has it."""
    owner = runs_of(pool) or part_of(pool)
    if owner is None:
        return jax.tree.map(lambda x: x[block, :, :, offset], pool.tokens)
    block, offset = own_places(pool, block, offset)

    def read(x: jax.Array) -> jax.Array:
        found = x[block, :, :, offset]
        there = jnp.expand_dims(block != NULL_BLOCK, range(block.ndim, found.ndim))
        return owner.together(jnp.where(there, found, jnp.zeros((), x.dtype)))

    return jax.tree.map(read, pool.tokens)


class OwnHeads(NamedTuple):
    """A device's query heads, where it holds all KV heads and needs the few that belong to them."""

    of: jax.Array  # i32[H]: the KV head of each of the device's query heads
    num_kv_heads: int

    def spread(self, x: jax.Array, axis: int) -> jax.Array:
        """H heads at `axis`, counted from the end, to K * H: each stands at its KV head, and zeros at the others."""
        x = jnp.expand_dims(x, axis - 1)
        at = jnp.expand_dims(self._at, range(2, 1 - axis))
        x = jnp.where(at.reshape(*(1,) * (x.ndim - at.ndim), *at.shape), x, jnp.zeros((), x.dtype))
        return x.reshape(*x.shape[: axis - 1], -1, *x.shape[x.ndim + axis + 1 :])

    def gathered(self, x: jax.Array, axis: int) -> jax.Array:
        """The opposite of `spread`."""
        end = x.ndim + axis
        x = x.reshape(*x.shape[:end], self.num_kv_heads, -1, *x.shape[end + 1 :])
        at = jnp.expand_dims(self._at, range(2, 1 - axis))
        at = at.reshape(*(1,) * (x.ndim - at.ndim), *at.shape)
        return jnp.where(at, x, jnp.zeros((), x.dtype)).sum(axis=axis - 1, dtype=x.dtype)

    @property
    def _at(self) -> jax.Array:
        return jnp.arange(self.num_kv_heads, dtype=jnp.int32)[:, None] == self.of[None]  # [K, H]


def own_heads(pool: Pool, num_kv_heads: int, num_heads: int) -> OwnHeads | None:
    """Which KV heads a device's `num_heads` query heads belong to, inside a `shard_map` over an axis of more devices
    than there are KV heads; None anywhere else, where what lies at hand is what is meant."""
    if num_kv_heads == 1 or pool.heads is None or (mesh := inside(pool, pool.heads)) is None:
        return None
    count = mesh.shape[pool.heads]
    if num_kv_heads >= count:
        return None
    head = jax.lax.axis_index(pool.heads) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
    return OwnHeads(head * num_kv_heads // (num_heads * count), num_kv_heads)


def _sum(x: jax.Array, axis: str) -> jax.Array:
    if x.dtype.itemsize == 1:  # no sums of all such numbers: of their bits
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return jax.lax.bitcast_convert_type(jax.lax.psum(bits, axis), x.dtype)
    return jax.lax.psum(x, axis)
