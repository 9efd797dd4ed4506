"""A chunk's tokens on their way from where a layer has them to vector memory, and its outputs on their way back.

Tokens lie by heads, `[N, H, D]`: a copy takes those of one chunk, from any of them on, for the heads of an item. So
nobody lays out chunks, of which a step of many rows may have many. Heads are read by strided loads, as in
`head_transpose`, of what stands in lines.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.channel_groups import SUBLANES
from pallas_kernels.tpu.head_transpose import Words
from pallas_kernels.tpu.pages import LANES, divide, pad
from pallas_kernels.tpu.recurrence.products import CHUNK


class ChunkTokens(NamedTuple):
    """Arrays of tokens: in HBM, as `divide_heads` has them; their buffers `[2, CHUNK, heads, D]`, of two items by
    turns; or of one item, references, and `HeadLines` of all that is read by heads."""

    q: Any  # [N, H', K]
    k: Any  # as q
    gates: Any  # f32[N, H, K], logarithms, if by channel, else None
    numbers: Any  # of `pack_numbers`
    v: Any  # [N, H, V]
    y: Any = None  # as v: the outputs


# What the first stage reads, what the last one does, and what it writes.
FIRST, LAST, OUTPUTS = ("q", "k", "gates", "numbers"), ("v",), ("y",)


def divide_heads(x: jax.Array, size: int) -> jax.Array:
    """Returns tokens `[N, H, D]` so that a copy can take so many heads: as they are where these are all of them or
    whole register tiles, else `[H / size * N, size, D]`."""
    tokens, heads, width = x.shape
    if size == heads or size % SUBLANES == 0:
        return x
    return jnp.swapaxes(x.reshape(tokens, -1, size, width), 0, 1).reshape(-1, size, width)


def join_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns tokens as they were, of this shape, before `divide_heads`."""
    if x.shape == shape:
        return x
    return jnp.swapaxes(x.reshape(-1, shape[0], *x.shape[1:]), 0, 1).reshape(shape)


def pack_numbers(numbers: list[jax.Array], size: int, rows: int) -> jax.Array:
    """Returns f32 `[H / size * N, 1, LANES]` of some numbers `[N, H]`: for each token and so many heads, `rows` lanes
    of the first number, then of the next one."""
    stacked = jnp.stack([x.astype(jnp.float32).reshape(x.shape[0], -1, size) for x in numbers], axis=2)
    lines = pad(jnp.swapaxes(stacked, 0, 1), rows)
    return pad(lines.reshape(-1, 1, len(numbers) * rows), LANES)


def lines_shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of the words of `HeadLines`, of tokens `[..., H, D]`."""
    *_, heads, width = shape
    words = Words.of(heads, dtype)
    dtype = jnp.uint32 if words.packed else jnp.float32
    return jax.ShapeDtypeStruct((-(-width // LANES), CHUNK * words.pitch, LANES), dtype)


class HeadLines(NamedTuple):
    """An item's tokens, and in memory the lines of words by which its heads are read."""

    tokens: Any  # [CHUNK, H, D]
    words_ref: Any  # of `lines_shape`

    @property
    def words(self) -> Words:
        return Words.of(self.tokens.shape[1], self.tokens.dtype)

    def spread(self) -> None:
        """Puts the tokens into lines."""
        words, tokens = self.words, self.tokens[...]
        for token in range(CHUNK):
            x = words.pack(tokens[token]) if words.packed else tokens[token].astype(jnp.float32)
            for i in range(self.words_ref.shape[0]):
                part = x[:, i * LANES : (i + 1) * LANES]
                self.words_ref[i, pl.ds(token * words.pitch, words.lines), : part.shape[1]] = part

    def head(self, head: int, places: Any = None) -> jax.Array:
        """Returns tokens of a head, f32 `[CHUNK, D]`, or of these places, a `pl.ds` of them."""
        words, places = self.words, pl.ds(0, CHUNK) if places is None else places
        first = places.start * words.pitch + head // words.numbers
        lines = pl.ds(first, places.size, places.stride * words.pitch)
        x = words.take(self.words_ref, lines)[:, : self.tokens.shape[2]]
        if not words.packed:
            return x
        return pltpu.bitcast(x & jnp.uint32(0xFFFF0000) if head % 2 else x << 16, jnp.float32)


class Transport:
    """The copies of tokens. An item is a chunk and a group of heads; buffers are those of its number, even or odd."""

    def __init__(
        self, arrays: ChunkTokens, buffers: ChunkTokens, lines: ChunkTokens, moved: Any, scalars: Any, groups: int
    ):
        self.arrays, self.buffers, self.lines, self.moved = arrays, buffers, lines, moved
        self.begins, self.counts, self.total = scalars.begins, scalars.counts, scalars.total
        self.groups, self.num_tokens = groups, arrays.numbers.shape[0] // groups

    def has(self, item: tuple[Any, Any]) -> Any:
        """Returns whether there is such a chunk."""
        return (item[0] >= 0) & (item[0] < self.total[0])

    def find(self, number: Any) -> ChunkTokens:
        """Returns what has come for an item."""
        found = [None if x is None else x.at[number & 1] for x in self.buffers]
        lines = [x if to is None else HeadLines(x, to) for x, to in zip(found, self.lines, strict=True)]
        return ChunkTokens(*lines)

    def move(self, do: str, names: tuple[str, ...], item: tuple[Any, Any], number: Any) -> None:
        """Starts or awaits the copies for an item's stage, or of its outputs, if there is such an item."""

        @pl.when(self.has(item))
        def _():
            for copy in self._copies(names, item, number, self.counts[item[0]]):
                getattr(copy, do)()

    def await_whole(self, names: tuple[str, ...], item: tuple[Any, Any], number: Any) -> None:
        """Awaits the copies of an item that is there, and whose chunk is whole: nothing is left to decide."""
        for copy in self._copies(names, item, number, CHUNK):
            copy.wait()

    def bring(self, names: tuple[str, ...], item: tuple[Any, Any], number: Any) -> None:
        """Awaits an item's tokens, and makes 0 those that its chunk has not."""
        self.move("wait", names, item, number)
        count = self.counts[jnp.clip(item[0], 0, self.total[0] - 1)]

        @pl.when(self.has(item) & (count < CHUNK))
        def _():
            def clear(token, _):
                for name in names:
                    buffer = getattr(self.buffers, name)
                    if buffer is not None:
                        buffer[number & 1, token] = jnp.zeros(buffer.shape[2:], buffer.dtype)

            lax.fori_loop(count, CHUNK, clear, None)

    def _copies(self, names: tuple[str, ...], item: tuple[Any, Any], number: Any, count: Any) -> list[Any]:
        """Returns the copies of so many tokens of an item."""
        moved = self.moved.at[(FIRST, LAST, OUTPUTS).index(names), number & 1]
        places = [self._places(x, item, number, count) for x in names if getattr(self.buffers, x) is not None]
        return [pltpu.make_async_copy(*(reversed(x) if names == OUTPUTS else x), moved) for x in places]

    def _places(self, name: str, item: tuple[Any, Any], number: Any, count: Any) -> tuple[Any, Any]:
        """Returns references to an item's tokens in HBM and in vector memory."""
        (chunk, group), array, buffer = item, getattr(self.arrays, name), getattr(self.buffers, name)
        held, is_divided = buffer.shape[2], array.shape[0] > self.num_tokens
        parts = array.shape[0] * array.shape[1] // (self.num_tokens * held)
        part = divide(group, self.groups // parts)
        begin = self.begins[chunk]
        rows = pl.ds(part * self.num_tokens + begin if is_divided else begin, count)
        near = buffer.at[number & 1, pl.ds(0, count)]
        if is_divided or parts == 1:
            return array.at[rows], near
        return array.at[rows, pl.ds(pl.multiple_of(part * held, SUBLANES), held)], near
