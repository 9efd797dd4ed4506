"""`Eviction` on the device: remembers the last queries of rows, and evicts tokens of rows that are due."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.plan import positions
from jaxkv._core.attention.query_capture import Queries, capture_queries
from jaxkv._core.blocks.evict import select_best, thin
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.single_row import view_row
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._engine.programs.cache_program import cache_program
from jaxkv._engine.programs.program_cache import share_programs
from jaxkv._engine.requests.eviction_policy import Eviction
from jaxkv.scores._budgets import ada


def evicting_layers(config: CacheConfig) -> list[int]:
    """Returns the layers that evict."""
    return [i for i, layer in enumerate(config.layers) if layer.evict is not None]


class Remembered(NamedTuple):
    """The last W queries of each row to remember, for each layer that evicts, or for none.

    The query at position p is in slot p % W.
    """

    shapes: tuple[tuple[tuple[int, ...], Any], ...] = ()  # [S, W, H, D], and the dtype
    asked: tuple[Queries, ...] = ()  # their scale and rotation, without the queries

    def zeros(self) -> tuple[jax.Array, ...]:
        """Returns the memory of rows without queries."""
        return tuple(jnp.zeros(*shape) for shape in self.shapes)


def make_memory(eviction: Eviction, cache: Cache, run: Callable[[Cache], Any]) -> Remembered:
    """Returns the queries that a score needs.

    Args:
      run: calls the model with a cache that has room for one token of each row; it is only traced.
    """
    config, size = cache.config, eviction.num_queries(cache.config.max_seq_len)
    if not size:
        return Remembered()
    found: dict[int, Queries] = {}

    def trace(cache: Cache) -> tuple[()]:
        with capture_queries() as noted:
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
    shapes = (((config.max_seqs, size, *query.q.shape[-2:]), query.q.dtype) for query in asked)
    if "rotate" in eviction.parameters and any(query.rotate is None for query in asked):
        raise ValueError(
            f"{eviction.name} rotates queries ahead, but how is only known of models of jaxkv.nnx.Attention with a "
            "position_fn: choose another score."
        )
    return Remembered(tuple(shapes), tuple(query._replace(q=None) for query in asked))  # type: ignore[arg-type]


def record_queries_of_step(
    memory: tuple[jax.Array, ...], cache: Cache, run: Callable[[], Any], rows: jax.Array, axes: Any
) -> Any:
    """Calls `run`, a step of a cache; returns its result and the queries remembered after it.

    Args:
      rows: i32 of the token axes `axes`: the row of each token, or one for each row of them; S: padding.
    """
    if not memory:
        return run(), memory
    with capture_queries() as found:
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
        return None, thin_rows(eviction, asked, cache, due, memory)

    return cache_program(structure, program)


def thin_rows(
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
        row_cache = view_row(cache, row)
        row_cache = row_cache.replace(config=row_cache.config.replace(max_seq_len=places))
        for j, i in enumerate(layers):
            options = _queries(eviction, row_cache, i, memory[j][row], asked[j]) if memory else {}
            score, budget = score_tokens(eviction, row_cache, i, options), tables[j][row_cache.lengths]
            if eviction.budget == "ada" and row_cache.config.layers[i].evict == "head":
                budget = ada(score, budget)
            best, _ = select_best(score, budget, row_cache.tables[config.group(i)], row_cache.config)
            heads = jnp.arange(best.shape[0], dtype=jnp.int32)
            keep[j] = keep[j].at[row + heads * config.max_seqs].set(best)
        return keep

    keep = [jnp.ones((count, places), bool) for count in lines]
    keep = jax.lax.fori_loop(0, jnp.sum(due, dtype=jnp.int32), choose, keep)
    for i, kept in zip(layers, keep, strict=True):
        cache = thin(cache, kept, layer=i)
    return cache


def score_tokens(eviction: Eviction, row_cache: Cache, layer: int, options: dict[str, Any]) -> jax.Array:
    """Returns the scores of the tokens in a cache of one row, without NaN."""
    score: Any = eviction.score
    found = score(row_cache, layer=layer, **options)
    heads, places = row_cache.config.layers[layer].num_kv_heads, row_cache.config.max_seq_len
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", np.dtype(object))
    if shape not in ((1, heads, places), (1, places)) or not jnp.issubdtype(dtype, jnp.floating):
        given = type(found).__name__ if shape is None else f"{dtype}{list(shape)}"
        raise ValueError(
            f"{eviction.name} must return floats [1, {heads}, {places}] or [1, {places}], a score for each token that "
            f"layer {layer} holds of a row, not {given}."
        )
    found = found.astype(jnp.float32)
    if found.ndim == 2 and row_cache.config.layers[layer].evict == "head":
        found = jnp.broadcast_to(found[:, None], (1, heads, places))
    return jnp.where(jnp.isnan(found), -jnp.inf, found)


def _queries(eviction: Eviction, row_cache: Cache, layer: int, line: jax.Array, asked: Queries) -> dict[str, Any]:
    """Returns a score's options with a row's last queries since its last eviction, whose slots are known."""
    tables, size = row_cache.layer(layer).tables, line.shape[0]
    assert tables.thinned is not None
    length, count = row_cache.lengths[0], jnp.minimum(jnp.min(tables.lengths - tables.thinned), size)
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
