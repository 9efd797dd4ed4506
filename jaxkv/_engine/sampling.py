"""From logits to the next token, row by row, the same whatever else is in the batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """How to choose tokens: scalars, so that another temperature is not another compile."""

    temperature: jax.Array  # f32[]
    top_k: jax.Array  # i32[]: choose among this many likeliest tokens; 0: all
    top_p: jax.Array  # f32[]: choose among the likeliest tokens that together have this probability
    key: jax.Array  # a PRNG key


def greedy(logits: jax.Array) -> jax.Array:
    """The likeliest token of each row: `[S, V]` to `i32[S]`."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, sampling: Sampling, streams: jax.Array, positions: jax.Array) -> jax.Array:
    """A random token for each row: `[S, V]` to `i32[S]`.

    The draw depends on the seed, the row's stream (its prompt's number) and the token's position alone, so a sequence
    gets the same tokens in any row, beside any others, and again after it was set back.
    """

    def one_row(logits: jax.Array, stream: jax.Array, position: jax.Array) -> jax.Array:
        logits, tokens = jax.lax.top_k(logits.astype(jnp.float32) / sampling.temperature, logits.shape[-1])
        probabilities = jax.nn.softmax(logits)
        before = jnp.cumsum(probabilities) - probabilities  # of the likelier tokens: the first is always kept
        rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
        kept = (before < sampling.top_p) & ((rank < sampling.top_k) | (sampling.top_k == 0))
        key = jax.random.fold_in(jax.random.fold_in(sampling.key, stream), position)
        return tokens[jax.random.categorical(key, jnp.where(kept, logits, -jnp.inf))]

    return jax.vmap(one_row)(logits, streams, positions).astype(jnp.int32)
