"""Budgets: the number of tokens to keep in each row, layer and head. See `jaxkv.scores`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.attention_options import to_array
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import integer, read_scalar, real, show
from jaxkv._core.state.arguments import is_known, read_numbers, row_counts


def uniform(cache: Cache, keep: float, *, layer: int = 0) -> jax.Array:
    """Returns the same share of each row's tokens, or the same number, in every layer.

    Args:
      keep: a float up to 1: keeps `int(keep * tokens)` of the tokens that a row has seen; or an integer number of
        tokens.

    Returns:
      `i32[S]`.

    >>> import jaxkv
    >>> sizes = dict(num_layers=2, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.uniform(cache, 0.25).tolist(), jaxkv.scores.uniform(cache, 7).tolist()
    ([5, 1], [7, 7])
    """
    del layer  # the same in all layers
    return jnp.asarray(uniform_kept(cache.config, keep))[cache.lengths]


def uniform_kept(config: CacheConfig, keep: Any) -> np.ndarray:
    """Returns `i32[max_seq_len + 1]`: the number of tokens that `uniform` keeps, by row length."""
    lengths, keep = _all_lengths(config), read_scalar(keep)
    if isinstance(keep, int | np.integer) and not isinstance(keep, bool):
        return np.full(lengths.shape, integer("keep", keep, least=1), np.int32)
    return (lengths * _shares(keep, lengths)).astype(np.int32)


def pyramid(cache: Cache, keep: float, *, layer: int, window_size: int = 64, beta: int = 20) -> jax.Array:
    """Returns larger budgets for the first layers than for the last; the mean over layers equals `uniform`.

    Args:
      keep: as in `uniform`.
      window_size: minimum number of tokens in every layer: the queries that `snapkv` uses.
      beta: steepness: the last layer has a share of `1 / beta` beside the window. Rows for which this gives less than
        the window, or more than their tokens, have the same budget in every layer.

    Returns:
      `i32[S]`.

    From PyramidKV (https://arxiv.org/abs/2406.02069).

    >>> import jaxkv
    >>> sizes = dict(num_layers=2, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> [jaxkv.scores.pyramid(cache, 0.5, layer=i, window_size=1, beta=2).tolist() for i in range(2)]
    [[15, 4], [5, 1]]
    """
    return jnp.asarray(pyramid_kept(cache.config, keep, layer, window_size, beta))[cache.lengths]


def pyramid_kept(config: CacheConfig, keep: Any, layer: int, window_size: Any = 64, beta: Any = 20) -> np.ndarray:
    """Returns `i32[max_seq_len + 1]`: the number of tokens that `pyramid` keeps in a layer, by row length."""
    window_size, beta = integer("window_size", window_size, least=1), integer("beta", beta, least=1)
    layers, lengths = config.num_layers, _all_lengths(config)
    place = config.owner(layer)
    mean = _shares(keep, lengths) * lengths
    least, most = mean / beta, mean * 2 - mean / beta
    capped = most >= lengths - window_size
    most = np.where(capped, lengths - window_size, most)
    least = np.where(capped, mean * 2 - most, least)
    sensible = (lengths >= most) & (most >= least) & (least >= window_size)
    steps = (most - least) / max(layers - 1, 1)
    return np.where(sensible, np.round(most - place * steps), np.round(mean)).astype(np.int32)


def ada(score: jax.Array, budget: Any, *, safeguard: float = 0.2) -> jax.Array:
    """Divides one budget of a layer among its heads: the best tokens of all heads together are kept.

    Args:
      score: `f32[S, K, C]`.
      budget: mean number of tokens a head, a number or `i32[S]`.
      safeguard: share of the budget that is guaranteed to each head, at least one token unless 0.

    Returns:
      `i32[S, K]`, for a layer that evicts by heads.

    From AdaKV (https://arxiv.org/abs/2407.11550).

    >>> import jax.numpy as jnp, jaxkv
    >>> score = jnp.array([[[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 3.0, 4.0]]])
    >>> jaxkv.scores.ada(score, 2).tolist(), jaxkv.scores.ada(score, 2, safeguard=0).tolist()
    ([[3, 1]], [[4, 0]])
    """
    safeguard = real("safeguard", safeguard, least=0, most=1)
    score = to_array("score", score)
    if score.ndim != 3:
        raise ValueError(f"ada needs scores [S, K, C], of each head by itself, not of the shape {np.shape(score)}.")
    rows, heads, places = score.shape
    budget = read_numbers("budget", budget)
    if not budget.shape:
        budget = (np if is_known(budget) else jnp).broadcast_to(budget, (rows,))
    budget = row_counts("budget", budget, rows)
    certain = (budget.astype(jnp.float32) * safeguard + 1e-4).astype(jnp.int32)
    certain = jnp.maximum(certain, jnp.minimum(budget, 1)) if safeguard else certain
    rank = jnp.argsort(jnp.argsort(-score, axis=2, stable=True), axis=2)
    is_held = score > -jnp.inf
    wanted = jnp.where(is_held & (rank < certain[:, None, None]), jnp.inf, score).reshape(rows, -1)
    order = jnp.argsort(jnp.argsort(-wanted, axis=1, stable=True), axis=1)
    kept = (order < heads * budget[:, None]).reshape(rows, heads, places) & is_held
    return kept.sum(axis=2, dtype=jnp.int32)


def _all_lengths(config: CacheConfig) -> np.ndarray:
    """Returns all row lengths: budgets are computed exactly on the host, and the device looks them up."""
    return np.arange(config.max_seq_len + 1)


def _shares(keep: Any, lengths: np.ndarray) -> np.ndarray:
    """Returns `f64[n]`: the share of the tokens to keep, for each length."""
    keep = read_scalar(keep)
    if isinstance(keep, bool) or not isinstance(keep, int | float | np.integer | np.floating):
        raise ValueError(f"keep must be a share of the tokens up to 1.0, or a number of them, not {show(keep)}.")
    if isinstance(keep, int | np.integer):
        return np.minimum(integer("keep", keep, least=1) / np.maximum(lengths, 1), 1.0)
    return np.full(lengths.shape, real("keep, a share,", keep, above=0, most=1))
