"""For writers of kernels: which of its row's keys each token sees, without a mask of them all.

A window or a chunk is a `WindowMask`, a function of a token's position. What goes by the token is a `TokenMask`: a run
of keys, as long as its chunk or its span, and among the tokens of a tree a bit for each that stands above it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.batch import Call, MaskSpec, PagedBatch
from pallas_kernels.common.ragged_layout import Tokens, default_offsets
from pallas_kernels.common.tree_attention import climb

TREE_TOKENS = 64  # of a row, at most, for kernels: two words of bits
WORD = 32
FAR = 2**30


class WindowMask(NamedTuple):
    """How far back a token sees: the last `window` positions, its own included, or those of its `chunk`, or all. Beside
    a window it may see the first `sink_tokens` of its row.

    >>> int(WindowMask(window=4).first(jnp.int32(9))), int(WindowMask(chunk=4).first(jnp.int32(11)))
    (6, 8)
    """

    window: int | None = None
    chunk: int | None = None
    sink_tokens: int = 0

    @property
    def ends(self) -> bool:
        return self.window is not None or self.chunk is not None

    def first(self, position: jax.Array) -> jax.Array:
        """The first position that a token at `position` sees; that of a window may be negative."""
        if self.window is not None:
            return position - (self.window - 1)
        if self.chunk is None:
            return jnp.zeros_like(position)
        if self.chunk & (self.chunk - 1) == 0:  # scalar units have no division
            return position & -self.chunk
        return position - lax.rem(position, jnp.int32(self.chunk))

    @classmethod
    def from_spec(cls, mask: MaskSpec, capacity: int) -> "WindowMask":
        """Returns that of rows of at most so many tokens."""
        return cls(mask.window, mask.chunk, min(mask.sink_tokens or 0, capacity))

    def covers(self, key: jax.Array, first: jax.Array) -> jax.Array:
        """Is the key seen, if not for causality, by who sees those from `first` on?"""
        return (key >= first) | (key < self.sink_tokens) if self.sink_tokens else key >= first

    def most(self, tokens: int) -> int | None:
        """Returns the most keys that `tokens` consecutive tokens see together; None: all."""
        size = self.window if self.chunk is None else self.chunk
        return None if size is None else size + tokens - 1 + self.sink_tokens


ALL = WindowMask()


def find_last_key(position: jax.Array, compress_ratio: int | None) -> jax.Array:
    """Returns the last key that a token sees by causality: its own, or of keys that are entries of `compress_ratio`
    tokens each the last whose tokens it sees all; -1: none.

    >>> find_last_key(jnp.arange(-1, 6), 3).tolist()
    [-1, -1, -1, 0, 0, 0, 1]
    """
    return position if compress_ratio is None else (position + 1) // compress_ratio - 1


class TokenMask(NamedTuple):
    """One entry per token place, flat: it sees the keys from `first` to `last` and those whose bit is set."""

    own: jax.Array  # i32[N]: the token's own place in its row
    first: jax.Array  # i32[N], at least 0
    last: jax.Array  # i32[N]
    before: jax.Array  # i32[N]: the place of the row's first token of this step, which bits are counted from
    words: jax.Array | None  # i32[N, W]: of trees, 32 tokens a word


class MaskTiles(NamedTuple):
    """Masks of tiles of tokens, as kernels read them, and what the tokens of each see together, i32[tiles]."""

    tokens: jax.Array  # i32[tiles, 3 + W, tile]: first, last, before and words; of no token 0, -1, 0 and 0
    start: jax.Array  # keys that some token sees: from here on
    stop: jax.Array  # and before here
    sure_start: jax.Array  # keys that all tokens see
    sure_stop: jax.Array


def find_token_mask(
    token: Tokens,
    before: jax.Array,
    start: jax.Array,
    longest: int,
    window_mask: WindowMask,
    tree: jax.Array | None = None,
    spans: jax.Array | None = None,
) -> TokenMask:
    """Returns what the tokens of a step see.

    Args:
      token: where they lie, flat.
      before, start: `i32[S]`: the position of each row's first token of this step, and its index among the tokens.
      longest: at least the tokens of any row.
      tree: their parents, flat; see `tree_attention.climb`.
      spans: flat; the tokens of each stand one after another, see `are_runs`. Not with a tree.
    """
    base = before[token.row]
    if tree is None:
        own = token.position
        first, last = window_mask.first(own), own
        if spans is not None:
            back, ahead = _run_around(token, spans)
            first, last = jnp.minimum(first, own - back), own + ahead
        return TokenMask(own, jnp.maximum(first, 0), last, base, None)
    found = climb(tree, token, before, start, longest)
    first, seen = window_mask.first(base + found.depth), found.ancestors
    if window_mask.ends:  # an ancestor stands where its depth says
        nth = jnp.arange(longest, dtype=jnp.int32)[None]
        theirs = found.depth.at[start[token.row][:, None] + nth].get(mode="clip")
        seen &= window_mask.covers(base[:, None] + theirs, first[:, None])
        if window_mask.sink_tokens:  # there all of the context is seen, and of what follows what the bits say
            first = jnp.where(base < window_mask.sink_tokens, 0, first)
    return TokenMask(token.position, jnp.maximum(first, 0), base - 1, base, pack(seen))


def drop_empty_rows(batch: PagedBatch) -> PagedBatch:
    """Returns the batch without the queries of rows that hold nothing, which see nothing; packed ones lie still."""
    starts = default_offsets(batch.query_lens) if batch.query_starts is None else batch.query_starts
    return batch._replace(query_lens=jnp.where(batch.kv_lens > 0, batch.query_lens, 0), query_starts=starts)


def full_masks(lengths: jax.Array, there: jax.Array) -> MaskTiles:
    """Returns the masks of tiles of tokens that see all of a row, whatever it holds.

    Args:
      lengths: `i32[tiles]`: the length of each tile's row.
      there: `bool[tiles, tile]`: which tokens there are.
    """
    last = jnp.where(there, lengths[:, None] - 1, -1)
    stop = jnp.where(there.any(axis=1), lengths, 0)
    nothing = jnp.zeros_like(last)
    return MaskTiles(
        jnp.stack([nothing, last, nothing], axis=1), jnp.zeros_like(stop), stop, jnp.zeros_like(stop), stop
    )


def _run_around(token: Tokens, spans: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts the tokens of the same span directly before each token, and directly after it."""
    place = jnp.arange(spans.shape[0], dtype=jnp.int32)
    inside = token.valid & (spans != 0)
    joined = inside[1:] & inside[:-1] & (token.row[1:] == token.row[:-1]) & (spans[1:] == spans[:-1])
    begin = lax.cummax(jnp.where(jnp.pad(joined, (1, 0)), 0, place))
    end = lax.cummin(jnp.where(jnp.pad(joined, (0, 1)), spans.shape[0], place), reverse=True)
    return place - begin, end - place


def are_runs(token: Tokens, spans: jax.Array) -> jax.Array:
    """`bool[]`: do the tokens of each row and span stand one after another? Arguments are flat."""
    number = jnp.where(token.valid, spans, 0)
    place = jnp.arange(spans.shape[0], dtype=jnp.int32)
    row, number, place = lax.sort((token.row, number, place), num_keys=2)
    same = (row[1:] == row[:-1]) & (number[1:] == number[:-1]) & (number[1:] != 0)
    return jnp.all(~same | (place[1:] == place[:-1] + 1))


def mask_refusal(call: Call) -> str | None:
    """Returns why kernels do not take the tree or the spans of a call, or None."""
    tree = call.mask.tree
    if call.options.deterministic and call.mask.spans is not None:
        return (
            "With deterministic the kernels take no spans, for whether they can depends on those of all rows: leave "
            "implementation=None to use XLA's."
        )
    if tree is None or tree.shape[-1] <= TREE_TOKENS:
        return None
    each = "in all where they are packed" if tree.ndim == 1 else "a row"
    return (
        f"The kernels take a tree in steps of at most {TREE_TOKENS} tokens {each}, not {tree.shape[-1]}: leave "
        "implementation=None to use XLA's."
    )


def pack(bits: jax.Array) -> jax.Array:
    """`bool[N, longest]` as `i32[N, W]`."""
    count, longest = bits.shape
    words = -(-longest // WORD)
    bits = jnp.pad(bits, ((0, 0), (0, words * WORD - longest))).reshape(count, words, WORD)
    return jnp.sum(jnp.where(bits, jnp.int32(1) << jnp.arange(WORD, dtype=jnp.int32), 0), axis=2, dtype=jnp.int32)


def tile_masks(token_mask: TokenMask, at: jax.Array, there: jax.Array) -> MaskTiles:
    """Returns the masks of tiles: `at` is `i32[tiles, tile]`, the tokens of each, `there` which of them there are."""
    at = jnp.clip(at, 0, token_mask.own.shape[0] - 1)
    own, first, last, before = (x[at] for x in token_mask[:4])
    lines = [jnp.where(there, x, nothing) for x, nothing in ((first, 0), (last, -1), (before, 0))]
    if token_mask.words is not None:
        lines += [jnp.where(there, token_mask.words[at, w], 0) for w in range(token_mask.words.shape[1])]
    some = there.any(axis=1)
    ranges = (
        jnp.min(jnp.where(there, first, FAR), axis=1),
        jnp.max(jnp.where(there, jnp.maximum(last, own), -1), axis=1) + 1,
        jnp.max(jnp.where(there, first, 0), axis=1),
        jnp.min(jnp.where(there, last, FAR), axis=1) + 1,
    )
    start, stop, *sure = (jnp.where(some, x, 0) for x in ranges)
    return MaskTiles(jnp.stack(lines, axis=1), start, jnp.where(some, jnp.maximum(stop, 1), 0), *sure)


def is_visible(
    key: jax.Array,
    first: jax.Array,
    last: jax.Array,
    before: jax.Array,
    words: list[jax.Array],
    window_mask: WindowMask = ALL,
) -> jax.Array:
    """Tells in a kernel whether a token with this mask sees the key. Arrays of one shape, or that broadcast.
    `window_mask`: that of the tokens, which may see first ones."""
    seen = window_mask.covers(key, first) & (key <= last)
    if not words:
        return seen
    nth = key - before
    word = jnp.zeros_like(nth)
    for i, bits in enumerate(words):
        word = jnp.where(nth >> 5 == i, bits, word)
    return seen | (((word >> (nth & (WORD - 1))) & 1) == 1)
