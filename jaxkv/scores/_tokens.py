"""Scores of the tokens that a layer holds. See `jaxkv.scores`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._core.attention.attention_options import read_scale, to_array
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.config.validation import flag, integer, real, show
from jaxkv._core.state.arguments import row_counts

TINY = 1e-12  # lower bound of a norm in a denominator


def streaming_llm(cache: Cache, *, layer: int, n_sink: int = 4) -> jax.Array:
    """Scores the first `n_sink` tokens highest, then later tokens above earlier ones.

    Returns:
      `f32[S, K, C]`, -inf where no token is held, like all scores. C is `max_seq_len`, or the capacity of all blocks if
      that is less.

    From StreamingLLM (https://arxiv.org/abs/2309.17453).

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.streaming_llm(cache, layer=0, n_sink=1)[0, 0, :4].tolist()
    [65.0, 1.0, 2.0, 3.0]
    """
    n_sink, is_held = integer("n_sink", n_sink, least=0), _mask_held(cache, layer)
    place = jax.lax.broadcasted_iota(jnp.int32, is_held.shape, 2)
    return _scores(jnp.where(place < n_sink, is_held.shape[2] + n_sink - place, place).astype(jnp.float32), is_held)


def knorm(cache: Cache, *, layer: int) -> jax.Array:
    """Scores keys with a small norm highest: they receive most attention.

    From "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (https://arxiv.org/abs/2406.11430).

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.knorm(cache, layer=0).shape
    (2, 2, 64)
    """
    keys, _, is_held = _tokens(cache, layer)
    return _scores(-jnp.linalg.norm(keys, axis=-1), is_held)


def keydiff(cache: Cache, *, layer: int) -> jax.Array:
    """Scores keys that differ most from the mean direction highest.

    From KeyDiff (https://arxiv.org/abs/2504.15364).

    >>> import jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.keydiff(cache, layer=0).shape
    (2, 2, 64)
    """
    keys, _, is_held = _tokens(cache, layer)
    directions = _directions(keys)
    mean = jnp.sum(directions, axis=2, where=is_held[..., None]) / _count(is_held)[..., None]
    return _scores(-jnp.einsum("skcd,skd->skc", directions, _directions(mean)), is_held)


def snapkv(
    cache: Cache,
    *,
    layer: int,
    q: jax.Array,
    num_tokens: Any = None,
    scale: float | None = None,
    window_size: int = 64,
    kernel_size: int = 5,
) -> jax.Array:
    """Scores tokens by the attention of the last `window_size` queries, averaged over `kernel_size` neighbours.

    The tokens of these queries are kept before all others, the latest first.

    Args:
      q: `[S, T, H, D]`, queries of each row's last tokens as `attention` takes them, padded at the end of each row.
      num_tokens: `i32[S]`, number of queries of each row; default: the tokens of the last step, which must be the last
        tokens that the layer has seen.
      scale: factor of the logits; default `head_dim ** -0.5`.

    From SnapKV (https://arxiv.org/abs/2404.14469).

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.snapkv(cache, layer=0, q=jnp.ones((2, 20, 4, 8))).shape
    (2, 2, 64)
    """
    window_size, kernel_size = (
        integer("window_size", window_size, least=1),
        integer("kernel_size", kernel_size, least=1),
    )
    weights, asked, is_held = _attention(cache, layer, q, num_tokens, scale, last=window_size)
    lengths = jnp.sum(is_held, axis=2, dtype=jnp.int32)
    place = jax.lax.broadcasted_iota(jnp.int32, is_held.shape, 2)
    own = is_held & (place >= (lengths - jnp.minimum(asked, window_size)[:, None])[..., None])
    number = jnp.maximum(jnp.minimum(asked, window_size), 1).astype(jnp.float32)
    weights = jnp.sum(weights, axis=3) / number[:, None, None, None]
    weights = jnp.where(own[:, :, None], 0.0, weights)
    pooled = jax.lax.reduce_window(
        weights,
        0.0,
        jax.lax.add,
        (1, 1, 1, kernel_size),
        (1, 1, 1, 1),
        [(0, 0)] * 3 + [(kernel_size // 2, kernel_size - 1 - kernel_size // 2)],
    )
    found = _raise_to_most(pooled.mean(axis=2) / kernel_size, is_held & ~own, own)
    # As much as the best of the others; among themselves the later count more, should a budget hold but some of them.
    nth = (1 + place - jnp.min(place, axis=2, where=own, initial=is_held.shape[2], keepdims=True)).astype(jnp.float32)
    return _scores(jnp.where(own, found * (1 + nth * 2.0**-20) + nth * TINY, found), is_held)


def tova(cache: Cache, *, layer: int, q: jax.Array, num_tokens: Any = None, scale: float | None = None) -> jax.Array:
    """Scores tokens by the last query's attention, averaged over all heads; its token is kept. Arguments: see `snapkv`.

    Raises:
      ValueError: the layer evicts by heads, and each head may hold other tokens.

    From TOVA (https://arxiv.org/abs/2401.06104).

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.tova(cache, layer=0, q=jnp.ones((2, 20, 4, 8))).shape
    (2, 2, 64)
    """
    if cache.config.group_evicts[cache.config.group(layer)] == "head":
        raise ValueError(f'tova is a mean over heads, but in layer {layer} each may hold other tokens: evict="layer".')
    weights, _, is_held = _attention(cache, layer, q, num_tokens, scale, last=1)
    own = is_held & (jnp.cumsum(is_held[..., ::-1], axis=2)[..., ::-1] == 1)
    mean = jnp.broadcast_to(weights[:, :, :, 0].mean(axis=(1, 2))[:, None], is_held.shape)
    return _scores(_raise_to_most(mean, is_held & ~own, own), is_held)


def observed_attention(
    cache: Cache, *, layer: int, q: jax.Array, num_tokens: Any = None, scale: float | None = None
) -> jax.Array:
    """Scores tokens by the mean attention of the step's queries that can see them. Arguments: see `snapkv`.

    From H2O (https://arxiv.org/abs/2306.14048), whose heavy hitters these are.

    >>> import jax.numpy as jnp, jaxkv
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.observed_attention(cache, layer=0, q=jnp.ones((2, 20, 4, 8))).shape
    (2, 2, 64)
    """
    weights, asked, is_held = _attention(cache, layer, q, num_tokens, scale)
    lengths = jnp.sum(is_held, axis=2, dtype=jnp.int32)[..., None]
    place = jax.lax.broadcasted_iota(jnp.int32, is_held.shape, 2)
    could = jnp.minimum(asked[:, None, None], lengths - place)
    return _scores(weights.sum(axis=3).mean(axis=2) / jnp.maximum(could, 1).astype(jnp.float32), is_held)


def expected_attention(
    cache: Cache,
    *,
    layer: int,
    q: jax.Array,
    rotate: Callable[[jax.Array, jax.Array], jax.Array],
    num_tokens: Any = None,
    n_future_positions: int = 512,
    n_sink: int = 4,
    use_covariance: bool = True,
    use_vnorm: bool = True,
    epsilon: float = 0.0,
) -> jax.Array:
    """Scores tokens by the expected attention of future queries, times the norm of the values.

    Future queries follow a Gaussian fitted to `q`, rotated to later positions. The first `n_sink` tokens are kept.

    Args:
      q: `[S, T, H, D]`, the queries of a prompt before rotation, padded at the end of each row.
      rotate: rotary embedding, from `(x [n, heads, D], positions i32[n])` to the same shape.
      num_tokens: `i32[S]`, number of queries of each row; default: the tokens of the last step.
      n_future_positions: number of future positions.
      use_covariance: use the covariance of the queries, not the mean alone.
      use_vnorm, epsilon: multiply by the norm of the values, after adding `epsilon` to the attention.

    From Expected Attention (https://arxiv.org/abs/2510.00636).

    >>> import jax.numpy as jnp, jaxkv
    >>> rope = lambda x, positions: x
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [20, 5])
    >>> jaxkv.scores.expected_attention(cache, layer=0, q=jnp.ones((2, 20, 4, 8)), rotate=rope).shape
    (2, 2, 64)
    """
    ahead, n_sink = integer("n_future_positions", n_future_positions, least=1), integer("n_sink", n_sink, least=0)
    epsilon = real("epsilon", epsilon, least=0)
    if not callable(rotate):
        raise ValueError(f"rotate must be a function of heads and their positions, not {show(rotate)}.")
    keys, values, is_held = _tokens(cache, layer)
    rows, heads, _, size = keys.shape
    q, asked = _queries(cache, layer, q, num_tokens)
    group = q.shape[2] // heads
    q = q.astype(jnp.float32).reshape(rows, -1, heads, group, size)
    number = jax.lax.broadcasted_iota(jnp.int32, q.shape[:2], 1)
    position = cache.lengths[:, None] - asked[:, None] + number
    counted = ((number < asked[:, None]) & (position >= n_sink))[:, :, None, None, None]
    many = jnp.maximum(jnp.sum(counted, axis=1, dtype=jnp.float32), 1)
    mean = jnp.sum(q, axis=1, where=counted) / many  # [S, K, G, D]
    apart = jnp.where(counted, q - mean[:, None], 0.0)
    spread = jnp.einsum("stkgd,stkge->skgde", apart, apart) / many[..., None]

    def mean_rotation(length: jax.Array) -> jax.Array:
        """Returns the mean rotation of the future positions, `[D, D]`; row d is the rotated d-th unit vector."""
        unit = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (ahead, size, size))
        return rotate(unit, length + jnp.arange(ahead, dtype=jnp.int32)).mean(axis=0)

    turn = jax.lax.map(mean_rotation, cache.lengths)
    mean = jnp.einsum("skgd,sde->skge", mean, turn)
    logits = jnp.einsum("skgd,skcd->skgc", mean, keys) * size**-0.5
    if flag("use_covariance", use_covariance):
        spread = jnp.einsum("sda,skgde,seb->skgab", turn, spread, turn)
        logits += jnp.einsum("skca,skgab,skcb->skgc", keys, spread, keys) / size / 2
    first = is_held & (jax.lax.broadcasted_iota(jnp.int32, is_held.shape, 2) < n_sink)
    later = is_held & ~first
    found = _softmax(logits, later[:, :, None]).mean(axis=2)
    if flag("use_vnorm", use_vnorm):
        found = (found + epsilon) * jnp.linalg.norm(values, axis=-1)
    return _scores(_raise_to_most(found, later, first), is_held)


def _mask_held(cache: Cache, layer: int) -> jax.Array:
    """Returns `bool[S, K, C]`: where a layer holds a token."""
    cache = _limit_length(cache, layer)
    found = cache.layer(layer)
    held, heads = found.held, cache.layer_config(layer).num_kv_heads
    held = held if held.ndim == 2 else jnp.broadcast_to(held[:, None], (held.shape[0], heads))
    place = jnp.arange(cache.config.max_seq_len, dtype=jnp.int32)[None, None]
    return place < held[..., None]


def _tokens(cache: Cache, layer: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a layer's keys and values, f32[S, K, C, D], and where it holds tokens, bool[S, K, C]."""
    cache = _limit_length(cache, layer)
    keys, values = (x.astype(jnp.float32) for x in cache.separate(layer))
    return keys, values, _mask_held(cache, layer)


def _limit_length(cache: Cache, layer: int) -> Cache:
    """Returns the cache with `max_seq_len` limited to the slots of a layer's block table, to read that layer."""
    check_cache(cache)
    group = cache.config.group(layer)
    if (ratio := cache.config.layer_config(layer).compress_ratio) is not None:
        raise ValueError(f"Layer {layer} stores entries of {ratio} tokens, so that no token has a score in it.")
    places = cache.config.max_seq_len if cache.config.group_slides[group] else cache.config.row_places(group)
    return cache.replace(config=cache.config.replace(max_seq_len=places))


def _scores(found: jax.Array, is_held: jax.Array) -> jax.Array:
    return jnp.where(is_held, found, -jnp.inf)


def _raise_to_most(found: jax.Array, of: jax.Array, certain: jax.Array) -> jax.Array:
    """Returns scores in which the `certain` tokens have the maximum over the other tokens of the row."""
    most = jnp.max(found, axis=(1, 2), where=of, initial=0.0, keepdims=True)
    return jnp.where(certain, most, found)


def _count(is_held: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(is_held, axis=2, dtype=jnp.float32), 1)


def _directions(x: jax.Array) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), TINY)


def _softmax(logits: jax.Array, seen: jax.Array) -> jax.Array:
    """Computes the softmax over the last axis; 0 where nothing is visible."""
    logits = jnp.where(seen, logits, -jnp.inf)
    most = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(most), most, 0.0))
    return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), TINY)


def _queries(cache: Cache, layer: int, q: jax.Array, num_tokens: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the queries, and their number in each row, `i32[S]`. Raises ValueError."""
    found = cache.layer_config(layer)
    rows, heads, q = cache.config.max_seqs, found.num_kv_heads, to_array("q", q)
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (rows, found.head_dim) or q.shape[2] % heads:
        raise ValueError(
            f"q must be [{rows}, T, H, {found.head_dim}], the queries of each row's last tokens, with H a multiple of "
            f"{heads}, but its shape is {q.shape}."
        )
    new = cache.layer(layer).tables.new[:rows]
    return q, jnp.minimum(new if num_tokens is None else row_counts("num_tokens", num_tokens, rows), q.shape[1])


def _attention(
    cache: Cache, layer: int, q: jax.Array, num_tokens: Any, scale: float | None, last: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the attention of each row's `last` queries, or of all, `f32[S, K, G, n, C]`, 0 for missing queries; the
    number of queries of each row; and where the row holds tokens."""
    keys, _, is_held = _tokens(cache, layer)
    q, asked = _queries(cache, layer, q, num_tokens)
    rows, heads, _, size = keys.shape
    last = q.shape[1] if last is None else min(last, q.shape[1])
    number = (asked - last)[:, None] + jnp.arange(last, dtype=jnp.int32)[None]  # of each row's last queries
    q = jnp.take_along_axis(q.astype(jnp.float32), jnp.maximum(number, 0)[:, :, None, None], axis=1)
    q = q.reshape(rows, last, heads, -1, size)
    logits = jnp.einsum("stkgd,skcd->skgtc", q, keys) * read_scale(scale, size)
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 4)
    own = (jnp.sum(is_held, axis=2, dtype=jnp.int32) - asked[:, None])[:, :, None] + number[:, None]  # [S, K, n]
    seen = is_held[:, :, None, None] & (place <= own[:, :, None, :, None]) & (number >= 0)[:, None, None, :, None]
    return _softmax(logits, seen), asked, is_held
