"""Verifies draft tokens: computes them all in one step, and keeps those that the model chooses itself."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv._core.blocks.slot_allocator import drop_guesses
from jaxkv._core.blocks.speculative import keep_guesses, revert_guesses, revert_tokens
from jaxkv._engine.programs.step_rows import TokenChoice, row_of


class Drafts(NamedTuple):
    """The draft tokens of a step."""

    most: int  # of a row
    guessed: jax.Array  # i32[S]: how many of a row's tokens are drafts, its last ones
    parents: jax.Array | None = None  # i32[N], of trees: each token's parent, counted from its row's first


def verify(
    drafts: Drafts, run: Any, choice: TokenChoice, cache: Any, memory: Any, tokens: Any, counts: jax.Array
) -> tuple:
    """Computes one step of every row, whose last `guessed[s]` tokens are drafts. Accepts them up to the first that
    differs from the token chosen there, and rolls the others back. Then comes the token chosen instead of the first
    wrong one, or after all."""
    most, guessed = drafts.most, drafts.guessed
    number = jnp.arange(most + 1, dtype=jnp.int32)[:, None]
    behind = jnp.maximum(guessed[None] - number, 0)  # i32[most + 1, S]: guesses that follow each token
    places = jnp.maximum(jnp.cumsum(counts)[None] - 1 - behind, 0)
    logits, cache, memory = run(cache, memory, tokens, counts, places.ravel(), guesses=guessed > 0)
    lengths = (cache.lengths[None] - behind).ravel()
    chosen, likely = choice.choose(logits, memory, lengths)
    chosen = chosen.reshape(places.shape)
    guesses = tokens[jnp.minimum(places + 1, tokens.shape[0] - 1)]
    is_right = (number < guessed[None]) & (chosen == guesses)
    accepted = jnp.sum(jnp.cumprod(is_right.astype(jnp.int32), axis=0), axis=0, dtype=jnp.int32)
    last = jnp.take_along_axis(chosen, accepted[None], axis=0)[0]
    cache = _take_back(run, cache, memory, tokens, counts, drafts, accepted)
    if likely is not None:
        likely = jax.tree.map(lambda x: x.reshape(*places.shape, -1), likely)
    return ((jnp.where(cache.failed[None], -1, chosen), accepted + 1), likely), last, cache, memory


def _take_back(run, cache, memory, tokens, counts, drafts, accepted):
    """Drops the guesses of each row that were not accepted. A model that writes states itself computes what such rows
    keep once more, from the states before the step."""
    most, guessed = drafts.most, drafts.guessed
    if cache.state_slots is None:
        return revert_tokens(cache, guessed - accepted)
    if not cache.state_slots.guesses.written_by_hand:
        return revert_guesses(cache, guessed - accepted, most + 1)  # a row has one token that is no guess
    again = guessed > 0
    kept = jnp.where(again, counts - guessed + accepted, 0)
    row = row_of(kept, min(tokens.shape[0], kept.shape[0] * (most + 1)))
    starts, begin = (jnp.cumsum(x, dtype=jnp.int32) - x for x in (kept, counts))
    places = jnp.arange(row.shape[0], dtype=jnp.int32) + (begin - starts)[jnp.minimum(row, kept.shape[0] - 1)]
    cache = drop_guesses(revert_tokens(cache, jnp.where(again, counts, 0)))
    return run(cache, memory, tokens.at[places].get(mode="clip"), kept, jnp.zeros_like(kept), targets=None)[1]


def verify_trees(
    drafts: Drafts, run: Any, choice: TokenChoice, cache: Any, memory: Any, tokens: Any, counts: jax.Array
) -> tuple:
    """Does `verify` for trees of draft tokens: accepts the path of each row along which every token is the one chosen
    after its parent. Numbers count from the row's last given token, which is 0."""
    most, guessed, parents = drafts
    assert parents is not None
    number = jnp.arange(most + 1, dtype=jnp.int32)[:, None]
    first = jnp.maximum(jnp.cumsum(counts) - 1 - guessed, 0)[None]
    places = first + jnp.minimum(number, guessed[None])
    parent = jnp.clip(parents[places] - (counts - 1 - guessed)[None], 0, most)
    logits, cache, memory = run(cache, memory, tokens, counts, places.ravel(), tree=parents)

    def at(x, numbers):
        return jnp.take_along_axis(x, numbers, axis=0)

    def climb(i, depth):
        return depth.at[i].set(at(depth, parent[i][None])[0] + 1)

    depth = jax.lax.fori_loop(1, most + 1, climb, jnp.zeros_like(places))
    lengths = ((cache.lengths - guessed)[None] + depth).ravel()
    chosen, likely = choice.choose(logits, memory, lengths)
    chosen = chosen.reshape(places.shape)
    is_right = (number > 0) & (number <= guessed[None]) & (at(chosen, parent) == tokens[places])

    def follow(i, on_path):
        return on_path.at[i].set(is_right[i] & at(on_path, parent[i][None])[0])

    on_path = jax.lax.fori_loop(1, most + 1, follow, jnp.broadcast_to(number == 0, places.shape))
    accepted = jnp.sum(on_path, axis=0, dtype=jnp.int32) - 1
    path = jnp.sort(jnp.where(on_path, number, most + 1), axis=0)  # numbers grow along it
    there = number <= accepted[None]
    path = jnp.where(there, path, 0)
    chosen = at(chosen, path)
    last = at(chosen, accepted[None])[0]
    cache = keep_guesses(cache, jnp.where(there, path - 1, -1)[1:].T, guessed)
    if likely is not None:
        likely = jax.tree.map(lambda x: at(x.reshape(*places.shape, -1), path[..., None]), likely)
    return ((jnp.where(cache.failed[None], -1, chosen), accepted + 1), likely), last, cache, memory
