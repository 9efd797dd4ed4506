"""How the kernels walk the blocks of a row: in pages, a step of pages at a time, two steps in flight.

A page is what one DMA brings: a block, or a part of one where blocks are larger than a step. A step is what the matrix
unit works on at once: pages of some hundred tokens, in one of some buffers, while the next step's pages fly.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.masks import WindowMask

SMEM_ENTRIES = 250_000  # i32 that fit the 1 MiB of scalar memory, with some room for the rest
PAGE_BUFFER_BYTES = 16 * 2**20  # of vector memory, for the two buffers of a prefill
VMEM_BYTES = 48 * 2**20  # what a kernel may use in all: v5p and tpu7x have 64 MiB, of which XLA wants its part
SPILL_BYTES = 6 * 2**20  # for registers that a kernel has no room for; in bfloat16 up to 4 MiB were seen
LANES = 128
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # a logit not seen; finite, so that MASKED - MASKED is not NaN


def sublanes(dtype) -> int:
    """Rows of a register tile: slices of a block must be multiples of it."""
    return 32 // jnp.dtype(dtype).itemsize


def page_tile(dtype) -> int:
    """Tokens that blocks and pages must be multiples of: a register tile's rows, or with scales its lanes."""
    return LANES if jnp.dtype(dtype).itemsize == 1 else sublanes(dtype)


def vector_bytes(shape: tuple[int, ...], dtype) -> int:
    """Returns the bytes of an array in vector memory, where the last two axes come in whole register tiles."""
    *outer, rows, lanes = shape
    tile = sublanes(dtype)
    return math.prod(outer) * -(-rows // tile) * tile * -(-lanes // LANES) * LANES * jnp.dtype(dtype).itemsize


def divide(x: jax.Array, by: int) -> jax.Array:
    """`x // by` for `x >= 0`: a shift where it can be, for the scalar unit has no division."""
    if by & (by - 1) == 0:
        return lax.shift_right_logical(x, jnp.int32(by.bit_length() - 1))
    return lax.div(x, jnp.int32(by))


def compiler_params(vmem_bytes: int) -> pltpu.CompilerParams:
    """A kernel's steps come one after another, for copies go on from one to the next. Nothing is checked while it runs:
    every block id was clamped by the caller, and the interpreter's tests have every wait with its start. Of vector
    memory it gets what it may need, for the rest is where XLA brings what comes next while a kernel runs."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",),
        disable_bounds_checks=True,
        disable_semaphore_checks=True,
        vmem_limit_bytes=vmem_bytes,
    )


def output(shape: tuple[int, ...], dtype, *arrays: jax.Array) -> jax.ShapeDtypeStruct:
    """What a kernel returns that is computed from some arrays: inside a `shard_map` JAX is told that it differs among
    the devices where any of those does."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))


def await_pages(buffers, slot, count) -> None:
    """Wait once for each buffer's pages in a slot: `count` are coming, wherever they lie."""
    for buffer, arrived in buffers:
        these = buffer.at[slot, pl.ds(0, count)]
        pl.when(count > 0)(pltpu.make_async_copy(these, these, arrived.at[slot]).wait)


def keep_in_hbm(x: jax.Array, interpret) -> jax.Array:
    """An argument of a kernel that stays where it is, and what is made of it in its place. XLA would bring into vector
    memory all of what is small enough, the scales of a large pool too, and back: once a layer."""
    return x if interpret else _keep_in_hbm(x)


@jax.custom_batching.custom_vmap
def _keep_in_hbm(x: jax.Array) -> jax.Array:
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


@_keep_in_hbm.def_vmap
def _anywhere(_, in_batched, x):
    return x, in_batched[0]  # what takes the arrays of a batch apart knows no memories


def output_in_hbm(x: jax.ShapeDtypeStruct, interpret):
    """Returns an output that stays in HBM, as an argument does by `keep_in_hbm`; `x`: of `output`."""
    if interpret:
        return x
    room, varying = lax.empty(x.shape, x.dtype), getattr(x.manual_axis_type, "varying", ())
    return pltpu.HBM.like(lax.pcast(room, tuple(varying), to="varying") if varying else room)


def pad(x: jax.Array, size: int, axis: int = -1) -> jax.Array:
    """Zeros at the end of an axis, to make it `size` long."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


@dataclasses.dataclass(frozen=True)
class Pages:
    """The walk over one pool's blocks: sizes in tokens, all static."""

    block_size: int
    page_size: int
    pages_per_step: int
    blocks_per_row: int
    window_mask: WindowMask

    @classmethod
    def plan(cls, kv, tables, window_mask: WindowMask, step_tokens: int, deterministic: bool = False) -> "Pages":
        """Steps of about `step_tokens` tokens, fewer where vector memory is short, or the table: if not
        `deterministic`, for what is summed together must not depend on what else the table has room for."""
        _, parts, num_heads, block_size, head_dim = kv.shape
        token_bytes = parts * num_heads * head_dim * kv.dtype.itemsize
        step_tokens = min(step_tokens, PAGE_BUFFER_BYTES // (2 * token_bytes))
        if not deterministic:
            step_tokens = min(step_tokens, tables.shape[1] * block_size)
        tile = page_tile(kv.dtype)
        fits = (n for n in range(block_size, 0, -tile) if block_size % n == 0 and n <= max(step_tokens, tile))
        page_size = next(fits, tile)
        return cls(block_size, page_size, max(1, step_tokens // page_size), tables.shape[1], window_mask)

    @property
    def step_tokens(self) -> int:
        return self.page_size * self.pages_per_step

    @property
    def sink_pages(self) -> int:
        """Those of the row's first tokens, where a window leaves them to be seen."""
        return -(-self.window_mask.sink_tokens // self.page_size)

    def first(self, oldest: jax.Array) -> jax.Array:
        """The page of the first key that a query at position `oldest` sees. Pages of the row's first tokens are walked
        as if they stood right before its window's: what lies between is no part of the walk."""
        if not self.window_mask.ends:
            return jnp.int32(0)
        page = divide(jnp.maximum(self.window_mask.first(oldest), 0), self.page_size)
        return jnp.maximum(page - self.sink_pages, 0) if self.sink_pages else page

    def page(self, at: jax.Array, oldest: jax.Array) -> jax.Array:
        """Which page stands at a place of the walk."""
        return self._moved(at, oldest, 1)

    def position(self, at: jax.Array, oldest: jax.Array) -> jax.Array:
        """The position of the token that stands at a place of the walk, counted in tokens."""
        return self._moved(at, oldest, self.page_size)

    def _moved(self, at, oldest, size: int):
        if not self.sink_pages:
            return at
        nth = at - self.first(oldest) * size
        return jnp.where(nth < self.sink_pages * size, nth, at)

    def stop(self, limit: jax.Array) -> jax.Array:
        """One past the page of the last of `limit` keys."""
        return divide(limit + (self.page_size - 1), self.page_size)

    def steps(self, oldest: jax.Array, limit: jax.Array) -> jax.Array:
        """How many steps a walk takes; none where the limit lies before the oldest key."""
        held = jnp.maximum(self.stop(limit) - self.first(oldest), 0)  # for the division shifts, and logically
        return divide(held + (self.pages_per_step - 1), self.pages_per_step)

    def held(self, oldest: jax.Array, limit: jax.Array, step: jax.Array) -> jax.Array:
        """How many pages there are from a step's first on."""
        return self.stop(limit) - (self.first(oldest) + step * self.pages_per_step)

    def start_held(self, streams, tables, row, oldest, limit, step) -> None:
        """Start the copies of one step's pages, of those that there are.

        A stream is where they come from, `[num_blocks + 1, 2, K, block_size, ...]`, where they go, `[pages, 2, K,
        page_size, ...]`, and their semaphore: keys and values, and their scales if they have any.
        """
        begin = self.first(oldest) + step * self.pages_per_step
        held = self.held(oldest, limit, step)

        def page(i, _=None):
            block, part = self._split(self.page(begin + i, oldest))
            where = tables[row * self.blocks_per_row + block]
            for hbm, buffer, semaphore in streams:
                source = hbm.at[where]
                if self.page_size < self.block_size:
                    start = pl.multiple_of(part * self.page_size, self.page_size)
                    source = source.at[:, :, pl.ds(start, self.page_size)]
                pltpu.make_async_copy(source, buffer.at[i], semaphore).start()

        @pl.when(held >= self.pages_per_step)
        def _():  # nearly every step: without a loop's overhead
            for i in range(self.pages_per_step):
                page(i)

        @pl.when(held < self.pages_per_step)
        def _():
            lax.fori_loop(0, held, page, None)

    def start(self, streams, tables, row, oldest, limit, step, count) -> None:
        """Start the copies of a step's first `count` pages, without a branch: the others' are of no blocks at all."""
        begin, last = self.first(oldest) + step * self.pages_per_step, jnp.maximum(self.stop(limit) - 1, 0)
        for i in range(self.pages_per_step):
            block, part = self._split(self.page(jnp.minimum(begin + i, last), oldest))
            size = jnp.where(i < count, 1, 0)
            where = size * tables[row * self.blocks_per_row + block]
            for hbm, buffer, semaphore in streams:
                source = hbm.at[pl.ds(where, size)]
                if self.page_size < self.block_size:
                    start = pl.multiple_of(part * self.page_size, self.page_size)
                    source = hbm.at[pl.ds(where, size), :, :, pl.ds(start, self.page_size)]
                pltpu.make_async_copy(source, buffer.at[pl.ds(i, size)], semaphore).start()

    def _split(self, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = self.block_size // self.page_size
        block = divide(page, parts)
        return block, page - block * parts

    def hide_values(self, buffer, oldest, limit, step, steps, multiple: int | None = None) -> None:
        """Zero the values of a step that no query sees: they may be NaN, and 0 * NaN is NaN. (Logits are selected.) Of
        latent rows that is all of them. What is worked on is a `multiple` of so many pages; None: all of a step."""
        values_at = buffer.shape[1] - 1
        begin = self.first(oldest) + step * self.pages_per_step

        def keep(page, is_seen):
            values = buffer[page, values_at].astype(jnp.float32)  # [K, page_size, D]; selects want 32 bits
            place = (begin + page) * self.page_size + lax.broadcasted_iota(jnp.int32, values.shape, 1)
            position = self.position(place, oldest)
            buffer[page, values_at] = jnp.where(is_seen(position), values, 0.0).astype(buffer.dtype)

        def keep_seen(page):
            keep(page, lambda position: self.window_mask.covers(position, self.window_mask.first(oldest)))

        if self.window_mask.ends:  # the window begins in the page behind the first tokens', or in the last of theirs
            partly = [self.sink_pages] + [self.sink_pages - 1] * (self.window_mask.sink_tokens % self.page_size > 0)
            for nth in partly:
                in_step, page = divmod(nth, self.pages_per_step)
                pl.when(step == in_step)(functools.partial(keep_seen, page))

        held = self.stop(limit) - begin
        full = limit == (begin + self.pages_per_step) * self.page_size

        @pl.when((step + 1 == steps) & ~full)
        def _():
            keep(held - 1, lambda position: position < limit)

            def clear(page, _):
                buffer[page, values_at] = jnp.zeros(buffer.shape[2:], buffer.dtype)

            unit = multiple or self.pages_per_step
            lax.fori_loop(held, divide(held + (unit - 1), unit) * unit, clear, None)
