"""Beam search over a cache: beams share the blocks of their common prefix."""

import functools
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from jaxkv._core.attention.attention_options import to_array
from jaxkv._core.blocks.sharing import reorder
from jaxkv._core.blocks.tables import extend
from jaxkv._core.cache.cache import Cache, check_cache
from jaxkv._core.config.validation import integer, show
from jaxkv._core.state.arguments import row_counts
from jaxkv._core.state.state_repr import describe_array
from jaxkv._engine.programs.model import ADAPTERS_ARGUMENT, Model, takes
from jaxkv._engine.programs.step import logits_at
from jaxkv._engine.requests.submission import read_eos


@functools.partial(jax.export.register_namedtuple_serialization, serialized_name="jaxkv.Beams")
class Beams(NamedTuple):
    """The likeliest continuations of P prompts, B of each, the best first. Made by `beam_search`.

    >>> import jax.numpy as jnp
    >>> beams = Beams(tokens=jnp.array([[[5, 2], [7, -1]]]), scores=jnp.array([[-0.5, -1.0]]))
    >>> [token for token in beams.tokens[0, 1].tolist() if token >= 0]
    [7]
    """

    tokens: jax.Array  # i32[P, B, n]; -1 after the stop token, and everywhere in a missing beam
    scores: jax.Array  # f32[P, B]: the sum of the tokens' log-probabilities; -inf where there are fewer continuations


def beam_search(
    model: Model,
    cache: Cache,
    logits: jax.Array,
    *,
    beams: int,
    max_new_tokens: int,
    eos: Any = None,
    adapters: Any = None,
) -> tuple[Beams, Cache]:
    """Searches the likeliest continuations with beams. Pure, and one program: call it within `jit`.

    Beams share the full blocks of the prompt and of their common prefix, and copy the last, partial one when they part.
    Blocks that no beam holds any more are freed.

    Args:
      model: called as `logits, cache = model(tokens, cache=cache)` with `i32[S, 1]`.
      cache: a cache of `S = P * beams` rows. Row `p * beams` holds prompt p; the rows behind it are emptied.
      logits: `f32[S, V]`, the model's after the last token of each row; only rows with a prompt are read.
      beams: the number of continuations of a prompt.
      max_new_tokens: the length of the continuations.
      eos: a stop token, or several. The score of an ended continuation stays unchanged.
      adapters: `i32[S]`, the adapter with which each prompt was computed, for a model whose call has an argument
        `adapters`; only those of rows with a prompt are read. Default: 0, none.

    Returns:
      `(beams, cache)`. Row `p * beams + b` holds prompt p and the tokens of its b-th beam, -1 not counted. If blocks
      ran out, rows are marked in `cache.failed`, and the beams are invalid: see `check`.

    Raises:
      ValueError: a number of rows that is not a multiple of `beams`, logits or adapters of another number, or adapters
        for a model that takes none.

    Reordering rows instead of their keys and values is how vLLM does it (https://arxiv.org/abs/2309.06180).

    >>> import jax, jax.numpy as jnp, jaxkv
    >>> model = jaxkv.models.small()
    >>> config = jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=32)
    >>> prompt = list(b"import ")
    >>> cache = jaxkv.extend(jaxkv.init(config), [len(prompt), 0])
    >>> logits, cache = model(jnp.array([prompt] * 2), cache=cache, logits_at=jnp.array([len(prompt) - 1] * 2))
    >>> found, cache = jaxkv.beam_search(model, cache, logits, beams=2, max_new_tokens=3)
    >>> found.tokens.shape, cache.lengths.tolist()
    ((1, 2, 3), [10, 10])
    """
    beams = integer("beams", beams, least=1)
    count = integer("max_new_tokens", max_new_tokens, least=1)
    check_cache(cache)
    if not callable(model):
        raise ValueError(f"model must be an object to call, model(tokens, cache=cache), not {show(model)}.")
    rows, logits = cache.lengths.shape[0], to_array("logits", logits)
    if rows % beams:
        raise ValueError(f"The cache must have {beams} rows for each prompt, but it has {rows}.")
    if logits.ndim != 2 or logits.shape[0] != rows or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits must be f32[{rows}, V], those after each row's last token, not {describe_array(logits)}."
        )
    vocab, prompts = logits.shape[1], rows // beams
    stops = jnp.array(sorted(read_eos(eos)), jnp.int32)
    first = jnp.arange(rows, dtype=jnp.int32) // beams * beams
    own = None if adapters is None else _read_adapters(adapters, model, rows)[first]

    def step(carry: tuple, _: None) -> tuple[tuple, tuple]:
        cache, logits, scores, ended = carry
        gains = jax.nn.log_softmax(logits, axis=-1)
        stays = jnp.where(jnp.arange(vocab) == 0, 0.0, -jnp.inf)  # an ended beam has one continuation
        gains = jnp.where(ended[:, None], stays[None], gains)
        totals = jnp.where(jnp.isneginf(scores)[:, None], -jnp.inf, scores[:, None] + gains)
        scores, at = (x.reshape(rows) for x in jax.lax.top_k(totals.reshape(prompts, beams * vocab), beams))
        source, token = first + at // vocab, at % vocab
        is_new = ~ended[source] & ~jnp.isneginf(scores)
        ended = ~is_new | (token[:, None] == stops[None]).any(axis=1)
        cache = extend(reorder(cache, source), is_new.astype(jnp.int32))
        token = jnp.where(is_new, token, 0)
        logits, cache = logits_at(model, token[:, None], cache, jnp.zeros_like(token), cascade=True, adapters=own)
        if logits.shape[1] != vocab:
            raise ValueError(f"logits must be f32[{rows}, {logits.shape[1]}], as the model makes them, not of {vocab}.")
        return (cache, logits.astype(jnp.float32), scores, ended), (source, jnp.where(is_new, token, -1))

    scores = jnp.where(first == jnp.arange(rows), 0.0, -jnp.inf)
    (cache, _, scores, _), chosen = jax.lax.scan(
        step, (cache, logits.astype(jnp.float32), scores, scores < 0), length=count
    )

    def trace_back(row: jax.Array, chosen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        source, token = chosen
        return source[row], token[row]

    _, tokens = jax.lax.scan(trace_back, jnp.arange(rows, dtype=jnp.int32), chosen, reverse=True)
    return Beams(tokens.T.reshape(prompts, beams, count), scores.reshape(prompts, beams)), cache


def _read_adapters(adapters: Any, model: Any, rows: int) -> jax.Array:
    """Returns the adapters of all rows. Raises ValueError."""
    if not takes(model, ADAPTERS_ARGUMENT):
        raise ValueError(
            f"adapters= are for a model whose call has an argument adapters, and {type(model).__name__} has none: "
            "leave them out."
        )
    return row_counts("adapters", adapters, rows)
