"""The definition of scores by index keys, and of the tokens that queries choose, in plain `jnp` and float32.

Written to be checked by eye, as `reference` is: every token gets its own dense copy of its row's keys.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.ragged_layout import locate


def score_tokens(q, weights, keys, tables, lengths, new, *, offsets=None) -> jax.Array:
    """Computes the score of every token of a query's row, `f32[.., C]`; -inf of those that it does not see.

    Args:
      q: `[S, T, heads, E]` padded or `[N, heads, E]` packed; weights: `[S, T, heads]` or `[N, heads]`.
      keys: `[num_blocks + 1, 1, 1, block_size, E]`, numbers as they are.
      tables, lengths, new, offsets: as for [`pallas_kernels.paged_attention`][].
    """
    token = locate(q.shape[:-2], lengths, new, offsets)
    rows = keys[tables][:, :, 0, 0].astype(jnp.float32)  # [S, M, block_size, E]
    rows = rows.reshape(rows.shape[0], -1, keys.shape[-1])[..., : q.shape[-1]]
    products = jnp.einsum("...he,...ce->...hc", q.astype(jnp.float32), rows[token.row], precision="highest")
    score = jnp.sum(weights.astype(jnp.float32)[..., None] * jnp.maximum(products, 0.0), axis=-2)
    context = jnp.arange(rows.shape[1], dtype=jnp.int32).reshape(*[1] * token.row.ndim, -1)
    seen = (context <= token.position[..., None]) & token.valid[..., None]
    return jnp.where(seen, score, -jnp.inf)


def choose_tokens(score: jax.Array, top_k: int) -> jax.Array:
    """Returns the positions of the best `top_k` scores, `i32[.., top_k]`: the earlier of equal ones, -1 behind."""
    order = jnp.argsort(-score, axis=-1, stable=True)[..., :top_k].astype(jnp.int32)
    best = jnp.where(jnp.isneginf(jnp.take_along_axis(score, order, axis=-1)), -1, order)
    return jnp.pad(best, [*[(0, 0)] * (best.ndim - 1), (0, top_k - best.shape[-1])], constant_values=-1)
