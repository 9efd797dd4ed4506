"""Scores the tokens of a cache by several methods after a step of a model, and evicts all but the best."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv import scores
from jaxkv._core.attention.query_capture import Queries, capture_queries

Scores = dict[str, dict[int, jax.Array]]  # by method and layer


def evicting(layers: tuple[jaxkv.LayerConfig, ...], how: str) -> tuple[jaxkv.LayerConfig, ...]:
    """Returns the layers, of which those without a window evict."""
    return tuple(layer if layer.window else dataclasses.replace(layer, evict=how) for layer in layers)


def score_step(
    model: Any, cache: jaxkv.Cache, tokens: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jaxkv.Cache, Scores]:
    """Runs a step of tokens i32[S, T], of which rows have `counts`, and scores what each evicting layer then holds.

    Returns:
      The logits after each row's last token, the cache, and the scores `f32[S, K, C]`.
    """
    with capture_queries() as found:
        cache = jaxkv.extend(cache, counts)
        logits, cache = model(tokens, cache=cache, logits_at=jnp.maximum(counts - 1, 0))
    worth: Scores = {}
    for i, layer in enumerate(cache.config.layers):
        if layer.evict is not None:
            for name, score in score_layer(cache, i, found[i]).items():
                worth.setdefault(name, {})[i] = score
    return logits, cache, worth


def score_layer(cache: jaxkv.Cache, layer: int, asked: Queries) -> dict[str, jax.Array]:
    """Returns the scores of one layer's tokens, by method. The mean over heads, TOVA's, is left out by heads."""
    q, scale, rotate = asked
    where, heads = {"cache": cache, "layer": layer}, cache.config.layers[layer].evict == "head"
    assert rotate is not None
    plain = rotate(q.reshape(-1, *q.shape[2:]), -jaxkv.positions(cache, q.shape[:2]).reshape(-1)).reshape(q.shape)
    found = {
        "streaming_llm": scores.streaming_llm(**where),
        "knorm": scores.knorm(**where),
        "keydiff": scores.keydiff(**where),
        "snapkv": scores.snapkv(**where, q=q, scale=scale),
        "snapkv by 4 queries": scores.snapkv(**where, q=q, scale=scale, window_size=4),  # the question alone
        "expected_attention": scores.expected_attention(**where, q=plain, rotate=rotate),
    }
    return found if heads else found | {"tova": scores.tova(**where, q=q, scale=scale)}


@jax.jit
def thin(cache: jaxkv.Cache, worth: dict[int, jax.Array], budget: jax.Array) -> jaxkv.Cache:
    """Keeps the `budget` best tokens of each row, or of each of its heads."""
    for i, score in worth.items():
        cache = jaxkv.evict(cache, scores=score, budget=budget, layer=i)
    return cache
