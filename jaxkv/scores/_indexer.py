"""Chooses the tokens to read: those that a small indexer scores highest."""

from typing import Any

from jaxkv._core.attention.index import choose_tokens
from jaxkv._core.attention.plan import Step
from jaxkv._core.config.validation import flag, integer


def indexer(
    cache: Any,
    *,
    layer: Any = None,
    q: Any,
    weights: Any,
    top_k: int,
    step: Step | None = None,
    return_scores: bool = False,
) -> Any:
    """Chooses the earlier tokens that each of the step's queries attends to, for `attend(tokens=)`. Pure and jittable.

    A token's score is the sum over heads h of `weights[h] * relu(q[h] . k)`, k being the index key that `write_index`
    stored, in float32. A query chooses among the tokens up to its own, within the layer's window or chunk. The scores
    are streamed over the context with the best so far: no array of tokens times context is made.

    Args:
      cache: a cache, or one of its `layers`, after `write_index` of this step.
      layer: the layer's index, for a cache.
      q: `[S, T, heads, index_dim]` padded or `[N, heads, index_dim]` packed.
      weights: floats `[S, T, heads]` or `[N, heads]`.
      top_k: number of tokens a query, n; a Python integer, since it sets a shape.
      step: the plan of this step.
      return_scores: whether to return the scores of the chosen tokens too, `f32[.., n]`, -inf where there is none.

    Returns:
      `i32[S, T, n]` or `i32[N, n]`: positions, the best first, of equal ones the earlier first, and -1 behind them. A
      query with fewer than `top_k` tokens gets all of them; padding, and rows that failed, get none. In a layer with
      `compress_ratio` they are entries, the first of a row being 0.

    Raises:
      ValueError, IndexError: the layer keeps no index keys, or evicts; arrays that do not fit the step or the layer.

    The indexer is that of DeepSeek sparse attention (https://arxiv.org/abs/2512.02556).

    >>> import jax.numpy as jnp, jaxkv, jaxkv.scores
    >>> layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, index_dim=2)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=1, max_seq_len=64, num_blocks=4))
    >>> keys = jnp.array([[[1.0, 0], [0, 1], [2, 0], [0, 3]]])
    >>> cache = jaxkv.write_index(jaxkv.extend(cache, [4]), keys, layer=0)
    >>> q, weights = jnp.ones((1, 4, 1, 2)) * jnp.array([1.0, 0]), jnp.ones((1, 4, 1))
    >>> jaxkv.scores.indexer(cache, layer=0, q=q, weights=weights, top_k=2).tolist()
    [[[0, -1], [0, 1], [2, 0], [2, 0]]]
    """
    top_k = integer("top_k", top_k, least=1)
    position, score = choose_tokens(cache, layer=layer, q=q, weights=weights, top_k=top_k, step=step)
    return (position, score) if flag("return_scores", return_scores) else position
