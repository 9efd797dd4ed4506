"""Queries and output of a tile, from tokens by heads to heads by tokens and back, in vector memory and by its words.

Nothing is transposed: words of 32 bits are loaded and stored one line in n. Two heads' numbers of 16 bits are one word
there; of a head by itself two tokens'. An odd n meets another bank of the memory with each line; with an even one each
line would be a load of its own.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.pages import LANES


def unrolled(count: int) -> int:
    """How many of a loop's turns to work on at once, that one's waiting hides behind another's work."""
    return max(n for n in range(1, 9) if count % n == 0)


class Words(NamedTuple):
    """How a tile's numbers are words."""

    packed: bool
    lines: int  # words of a token
    dtype: Any  # of queries

    @classmethod
    def of(cls, num_heads: int, dtype) -> "Words":
        packed = jnp.dtype(dtype).itemsize == 2 and num_heads % 2 == 0
        return cls(packed, num_heads // 2 if packed else num_heads, jnp.dtype(dtype))

    @property
    def numbers(self) -> int:
        """How many numbers a word has: those of two heads, or of two tokens of a head."""
        return 2 if self.packed else 1

    @property
    def num_heads(self) -> int:
        return self.lines * self.numbers

    @property
    def pitch(self) -> int:
        """Lines from one token to the next: odd."""
        return self.lines | 1

    def by_token(self, tile_tokens: int, head_dim: int) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype, of queries and of output: tokens of even places, then the others."""
        lanes = min(head_dim, LANES)
        return (2, head_dim // lanes, tile_tokens * self.pitch, lanes), jnp.uint32 if self.packed else jnp.float32

    def by_head(self, kv_heads: int, queries: int, head_dim: int) -> tuple[tuple[int, ...], Any]:
        return (kv_heads, queries // self.numbers, head_dim), jnp.uint32 if self.packed else self.dtype

    def heads_together(self, group: int) -> int:
        """As many KV heads have a whole number of words."""
        return 2 if self.packed and group % 2 else 1

    def pack(self, x):
        return pltpu.bitcast(x, jnp.uint32) if self.packed else x

    def unpack(self, x):
        return pltpu.bitcast(x, self.dtype) if self.packed else x

    def swap(self, low, high):
        """Turns words of two heads into words of two tokens, and back."""
        return (low & jnp.uint32(0xFFFF)) | (high << 16), (low >> 16) | (high & jnp.uint32(0xFFFF0000))

    @staticmethod
    def put(ref, lines, x) -> None:
        for nth in range(ref.shape[0]):  # loads and stores of every n-th line are as wide as a register
            ref[nth, lines] = x[:, nth * ref.shape[2] : (nth + 1) * ref.shape[2]]

    @staticmethod
    def take(ref, lines):
        return jnp.concatenate([ref[nth, lines] for nth in range(ref.shape[0])], axis=1)

    def every(self, line, tokens: int, odd: int | None):
        """A word of each token, or of those of even or odd places."""
        if odd is None:
            return pl.ds(line, tokens, self.pitch)
        return pl.ds(odd * (tokens // 2) * self.pitch + line, tokens // 2, self.pitch)


def to_heads(by_head, by_token, words_ref, words, group, tile_tokens, together=LANES):
    """From `[tokens, H, D]` to `[K, G * tokens, D]`, as words."""

    def store(tokens, lines):
        some = by_token[tokens]
        for nth, line in enumerate(lines):
            words.put(words_ref, line, words.pack(some[nth]) if words.packed else some[nth].astype(words_ref.dtype))

    _each_token(store, words, tile_tokens, together)
    kv_heads = words.heads_together(group)

    @pl.loop(0, by_head.shape[0] // kv_heads, unroll=unrolled(by_head.shape[0] // kv_heads))
    def _(some):
        def put(nth, x):
            size = x.shape[0]
            by_head[some * kv_heads + nth // group, pl.ds(nth % group * size, size)] = x

        if not words.packed:
            for nth in range(group):
                x = words.take(words_ref, words.every(some * group + nth, tile_tokens, None))
                put(nth, x.astype(by_head.dtype))
            return
        for nth in range(0, kv_heads * group, 2):
            line = some * (kv_heads * group // 2) + nth // 2
            even, odd = (words.take(words_ref, words.every(line, tile_tokens, which)) for which in range(2))
            for i, x in enumerate(words.swap(even, odd)):
                put(nth + i, x)


def to_tokens(by_token, sums, words_ref, words, group, tile_tokens):
    """The way back, of quotients `[K, D, G * tokens]`: `sums` gives those of a KV head."""
    together, kv_heads = words.heads_together(group), words.num_heads // group

    @pl.loop(0, kv_heads // together, unroll=unrolled(kv_heads // together))
    def _(some):
        heads = []
        for nth in range(together):
            turned = sums(some * together + nth).astype(words.dtype).T
            heads += [turned[i * tile_tokens : (i + 1) * tile_tokens] for i in range(group)]
        if not words.packed:
            for nth, x in enumerate(heads):
                words.put(words_ref, words.every(some * group + nth, tile_tokens, None), x.astype(words_ref.dtype))
            return
        for nth in range(0, len(heads), 2):
            line = some * (len(heads) // 2) + nth // 2
            for which, x in enumerate(words.swap(words.pack(heads[nth]), words.pack(heads[nth + 1]))):
                words.put(words_ref, words.every(line, tile_tokens, which), x)

    def load(tokens, lines):
        some = [words.take(words_ref, line) for line in lines]
        some = [words.unpack(x) if words.packed else x.astype(words.dtype) for x in some]
        by_token[tokens] = jnp.stack(some)

    _each_token(load, words, tile_tokens, LANES)


def _each_token(do, words, tile_tokens, together):
    """`do` for every 16 tokens and where their words are, in the order that `every` takes them. So many `together` are
    worked on without a loop."""
    together, pitch = min(together, tile_tokens), words.pitch

    @pl.loop(0, tile_tokens // together, unroll=tile_tokens == together)
    def _(i):
        for token in range(0, together, 16):
            lines = []
            for nth in range(token, token + 16):
                if words.packed:
                    first = i * (together // 2 * pitch) + (nth // 2 + nth % 2 * (tile_tokens // 2)) * pitch
                else:
                    first = i * (together * pitch) + nth * pitch
                lines.append(pl.ds(first, words.lines))
            do(pl.ds(i * together + token, 16), lines)
