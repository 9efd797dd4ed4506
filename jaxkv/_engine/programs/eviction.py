"""`Eviction` on the device: remembers the last queries of rows, and evicts tokens of rows that are due."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.plan import positions
from jaxkv._core.attention.query_capture import Queries, queries_noted
from jaxkv._core.blocks.evict import best_of, thin
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.single_row import alone
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._engine.programs.cache_program import cache_program
from jaxkv._engine.programs.program_cache import share_programs
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv.scores._budgets import ada


def evicting_layers(config: CacheConfig) -> list[int]:
    """Returns the layers that evict."""
    return [i for i, layer in enumerate(config.layers) if layer.evict is not None]


# The last W queries of each row in each layer that evicts; that at position p is in slot p % W.


class Remembered(NamedTuple):
    """The queries to remember: for each layer that evicts, or for none."""

    shapes: tuple[tuple[tuple[int, ...], Any], ...] = ()  # [S, W, H, D], and the dtype
    asked: tuple[Queries, ...] = ()  # their scale and rotation, without the queries

    def zeros(self) -> tuple[jax.Array, ...]:
        """Returns the memory of rows without queries."""
        return tuple(jnp.zeros(*one) for one in self.shapes)


def remembered(eviction: Eviction, cache: Cache, run: Callable[[Cache], Any]) -> Remembered:
    """Returns the queries that a score needs.

    Args:
      run: calls the model with a cache that has room for one token of each row; it is only traced.
    """
    config, size = cache.config, eviction.num_queries(cache.config.max_seq_len)
    if not size:
        return Remembered()
    found: dict[int, Queries] = {}

    def trace(cache: Cache) -> tuple[()]:
        with queries_noted() as noted:
            run(cache)
        found.update(noted)
        return ()

    jax.eval_shape(trace, cache)
    if missing := [i for i in evicting_layers(config) if i not in found]:
        raise ValueError(
            f"{eviction.name} chooses by queries, but the model does not call jaxkv.attention or jaxkv.attend for "
            f"layer {missing[0]}: choose a score of keys alone, such as keydiff."
        )
    asked = [found[i] for i in evicting_layers(config)]
    shapes = (((config.max_seqs, size, *one.q.shape[-2:]), one.q.dtype) for one in asked)
    if "rotate" in eviction.parameters and any(one.rotate is None for one in asked):
        raise ValueError(
            f"{eviction.name} rotates queries ahead, but how is only known of models of jaxkv.nnx.Attention with a "
            "position_fn: choose another score."
        )
    return Remembered(tuple(shapes), tuple(one._replace(q=None) for one in asked))  # type: ignore[arg-type]


def noting(memory: tuple[jax.Array, ...], cache: Cache, run: Callable[[], Any], rows: jax.Array, axes: Any) -> Any:
    """Calls `run`, a step of a cache; returns its result and the queries remembered after it.

    Args:
      rows: i32 of the token axes `axes`: the row of each token, or one for each row of them; S: padding.
    """
    if not memory:
        return run(), memory
    with queries_noted() as found:
        out = run()
    place, size = positions(cache, axes), memory[0].shape[1]
    length = jnp.append(cache.lengths, 0)[rows]
    place = jnp.where(place >= length - size, place % size, size)  # of too many, the last
    layers = evicting_layers(cache.config)
    try:
        queries = [x.at[rows, place].set(found[i].q, mode="drop") for i, x in zip(layers, memory, strict=True)]
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "A score chooses by queries, but the model calls jaxkv.attention within a jax.jit, scan or checkpoint of "
            "its own, out of which they do not come: choose a score of keys alone, such as keydiff."
        ) from error
    return out, tuple(queries)


@share_programs
def thin_program(structure: Any, eviction: Eviction, asked: tuple[Queries, ...]) -> Any:
    """Compiles the eviction in a cache of this structure: a `cache_program` with the arguments `due` bool[S], the rows
    that evict, and the remembered queries."""

    def program(cache: Cache, due: jax.Array, memory: tuple[jax.Array, ...]) -> tuple[None, Cache]:
        return None, thinned(eviction, asked, cache, due, memory)

    return cache_program(structure, program)


def thinned(
    eviction: Eviction, asked: tuple[Queries, ...], cache: Cache, due: jax.Array, memory: tuple[jax.Array, ...]
) -> Cache:
    """Returns a cache in which the rows under `due` have evicted tokens."""
    config, layers = cache.config, evicting_layers(cache.config)
    lines = [cache.layer(i).tables.lengths.shape[0] for i in layers]
    tables = [jnp.asarray(eviction.kept(config, i)) for i in layers]
    rows = jnp.argsort(~due, stable=True)
    # At most the capacity of the tables, at any row length.
    places = max((config.row_places(config.group(i)) for i in layers), default=config.max_seq_len)

    # Scores are computed row by row: only the keys and queries of one row at a time are in float32.
    def choose(n: jax.Array, keep: list[jax.Array]) -> list[jax.Array]:
        row = rows[n]
        one = alone(cache, row)
        one = one.replace(config=one.config.replace(max_seq_len=places))
        for j, i in enumerate(layers):
            options = _queries(eviction, one, i, memory[j][row], asked[j]) if memory else {}
            score, budget = scored(eviction, one, i, options), tables[j][one.lengths]
            if eviction.budget == "ada" and one.config.layers[i].evict == "head":
                budget = ada(score, budget)
            best, _ = best_of(score, budget, one.tables[config.group(i)], one.config)
            heads = jnp.arange(best.shape[0], dtype=jnp.int32)
            keep[j] = keep[j].at[row + heads * config.max_seqs].set(best)
        return keep

    keep = [jnp.ones((count, places), bool) for count in lines]
    keep = jax.lax.fori_loop(0, jnp.sum(due, dtype=jnp.int32), choose, keep)
    for i, kept in zip(layers, keep, strict=True):
        cache = thin(cache, kept, layer=i)
    return cache


def scored(eviction: Eviction, one: Cache, layer: int, options: dict[str, Any]) -> jax.Array:
    """Returns the scores of the tokens in a cache of one row, without NaN."""
    score: Any = eviction.score
    found = score(one, layer=layer, **options)
    heads, places = one.config.layers[layer].num_kv_heads, one.config.max_seq_len
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", np.dtype(object))
    if shape not in ((1, heads, places), (1, places)) or not jnp.issubdtype(dtype, jnp.floating):
        given = type(found).__name__ if shape is None else f"{dtype}{list(shape)}"
        raise ValueError(
            f"{eviction.name} must return floats [1, {heads}, {places}] or [1, {places}], what each token that layer "
            f"{layer} holds of a row is worth, not {given}."
        )
    found = found.astype(jnp.float32)
    if found.ndim == 2 and one.config.layers[layer].evict == "head":
        found = jnp.broadcast_to(found[:, None], (1, heads, places))
    return jnp.where(jnp.isnan(found), -jnp.inf, found)


def _queries(eviction: Eviction, one: Cache, layer: int, line: jax.Array, asked: Queries) -> dict[str, Any]:
    """Returns a score's options with a row's last queries since its last eviction, whose slots are known."""
    t, size = one.layer(layer).tables, line.shape[0]
    assert t.thinned is not None
    length, count = one.lengths[0], jnp.minimum(jnp.min(t.lengths - t.thinned), size)
    options: dict[str, Any]
    number = jnp.arange(size, dtype=jnp.int32)
    q, options = line[(length - count + number) % size], {}
    if asked.scale is not None and "scale" in eviction.parameters:
        options["scale"] = asked.scale
    if asked.rotate is not None and "rotate" in eviction.parameters:
        options["rotate"] = asked.rotate
        factor = asked.rotate(jnp.ones((1, *q.shape[1:]), jnp.float32), jnp.zeros(1, jnp.int32))  # of YaRN, say
        q = asked.rotate(q.astype(jnp.float32), count - length - number) / jnp.square(factor)  # rotated back
    return options | {"q": q[None], "num_tokens": count[None]}
