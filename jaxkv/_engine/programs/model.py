"""What an engine asks of a model: the protocol, and the check of its shapes before anything compiles."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import is_tracing, show
from jaxkv._core.state.state_repr import describe_array

PAGE = "See docs/your_model.md."
MOST_SHOWN = 600  # characters of an error that a model raised
# What is said of a counter that a call changes: it would be as before in the next step.
LOST = (
    "which a compiled step forgets: dropout is on, or something else that draws at random. Call model.eval() first, or "
    "leave that state out of the model."
)
ADAPTERS_ARGUMENT = "adapters"  # the argument by which a model is given those of its rows


class Model(Protocol):
    """What `Engine`, `generate` and `beam_search` ask of a model. Any class with these three members will do.

    1. `layer_configs`: one `LayerConfig` for each attention layer, in the order of `layer=`.
    2. `dtype`: the dtype in which keys and values are stored, unless the engine is told `cache_dtype=`.
    3. `model(tokens, cache=cache)` returns `(logits, cache)`:

       - `tokens` are packed, `i32[N]`, the tokens of all rows one after another, or padded, `i32[S, T]`, with T = 1 in
         an engine. Write with `x[..., None, :]` and `axis=-1`, and one function takes both.
       - Positions are `jaxkv.positions(cache, tokens.shape)`, never an `arange`: a row may be anywhere in its text.
       - Each layer calls `out, cache = jaxkv.attention(q, k, v, cache, layer=i)`, with q `[.., H, D]` and k, v
         `[.., K, D]`, and hands the returned cache to the next layer. The last one is returned.
       - The engine has called `jaxkv.extend`: the model does not. In your own loop you call it, once before each step.
       - `logits` are `f32[N, V]` or `f32[S, T, V]`, one axis more than the tokens.

    4. The model is a pytree whose leaves are arrays, as Flax NNX modules are: its parameters are arguments of compiled
       programs. Make a class one by `jax.tree_util.register_dataclass`; a Linen module by `jaxkv.linen.model`.

    The call may also have these arguments, and is given them if it has them:

    - `logits_at`: `i32[M]` for packed tokens, indices of those whose logits are wanted: return `f32[M, V]`. For padded
      tokens `i32[S]`, one place in each row: return `f32[S, V]`. It saves the logits of all of a prompt's other tokens.
    - `step`: the `Step` of `jaxkv.plan_step`, for `attention(..., step=step)`; a tree of draft tokens comes with one,
      and then positions are `step.positions`.
    - `deterministic`, for `attention(..., deterministic=...)`, and `adapters`, `i32[S]`, the adapter of each row;
      that of each token is `adapters[jaxkv.plan_step(cache, tokens.shape).token.row]`.

    `cache=None` asks for dense attention over `tokens` `[S, T]`; only `Engine.recompute` does. `config.vocab_size`,
    `config.max_seq_len` and `config.eos_ids` are read where a model has them. `scan = True` says that it scans over its
    layers, with a traced `layer=`: its cache is then made with `CacheConfig(stacked=True)`.

    An `Engine` checks shapes when it is made. `jaxkv.testing.check_model(model)` finds what shapes cannot tell.

    >>> import dataclasses, jax, jax.numpy as jnp, jaxkv
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class Tiny:
    ...     embed: jax.Array  # f32[V, D]
    ...     layer_configs = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=8),)
    ...     dtype = jnp.float32
    ...     def __call__(self, tokens, *, cache):
    ...         x = self.embed[tokens] + jnp.sin(jaxkv.positions(cache, tokens.shape))[..., None]
    ...         heads = x[..., None, :]  # one head
    ...         out, cache = jaxkv.attention(heads, heads, heads, cache, layer=0)
    ...         return (x + out[..., 0, :]) @ self.embed.T, cache
    >>> model: jaxkv.Model = Tiny(jax.random.normal(jax.random.key(0), (16, 8)))
    >>> [len(tokens) for tokens in jaxkv.generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
    [5, 5]
    """

    @property
    def layer_configs(self) -> Sequence[LayerConfig]:
        """The config of each attention layer."""

    @property
    def dtype(self) -> Any:
        """The dtype of stored keys and values."""

    def __call__(self, tokens: jax.Array, *, cache: Cache) -> tuple[jax.Array, Cache]:
        """Computes the logits after each token; returns them and the cache."""


def takes(model: Any, name: str) -> bool:
    """Tells whether a model's call has an argument of this name."""
    return name in inspect.signature(model.__call__).parameters


def no_adapters(model: Any, cache: Cache) -> dict[str, jax.Array]:
    """Returns the argument `adapters` of rows without any, for a model that takes it."""
    return {ADAPTERS_ARGUMENT: jnp.zeros_like(cache.lengths)} if takes(model, ADAPTERS_ARGUMENT) else {}


def check_form(model: Any, *, needs_dtype: bool = True) -> None:
    """Raises ValueError unless a model has the members of `Model`, takes a cache, and is a pytree of arrays."""
    name = type(model).__name__
    if is_tracing():
        raise ValueError(
            "An engine chooses each step on the host, so it cannot be part of jit: call it outside, where it compiles "
            f"its own steps. {PAGE}"
        )
    if isinstance(model, type) or not callable(model):
        raise ValueError(f"model must be an object to call, model(tokens, cache=cache), not {show(model)}. {PAGE}")
    for member in ("layer_configs", "dtype") if needs_dtype else ("layer_configs",):
        if not hasattr(model, member):
            raise ValueError(
                "model must have layer_configs, a LayerConfig for each layer, and dtype, by which its cache is made, "
                f"but this {name} has no {member}{': wrap it in jaxkv.linen.model' * _is_linen(model)}. {PAGE}"
            )
    parameters = inspect.signature(model.__call__).parameters
    if "cache" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"A model is called as model(tokens, cache=cache), but the call of {name} takes no cache: give it an "
            f"argument of that name, and return (logits, cache). {PAGE}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float):
            where = f"{name}{jax.tree_util.keystr(path)} is {show(leaf)}" if path else f"{name} is none"
            raise ValueError(
                f"A model must be a pytree of arrays, arguments of compiled programs, but {where}: register the "
                "class, as with jax.tree_util.register_dataclass, make it an nnx.Module, or wrap a Linen module in "
                f"jaxkv.linen.model. {PAGE}"
            )


def _is_linen(model: Any) -> bool:
    """Tells whether it is a Linen module, without an import of Linen."""
    return any(cls.__module__.startswith("flax.linen.") for cls in type(model).__mro__)


def check_shapes(model: Any, config: CacheConfig, *, is_divided: bool = False) -> int | None:
    """Traces a model on packed and on padded tokens, without computing, checks what it returns, and returns the size of
    its vocabulary, or None if that is not known.

    Args:
      is_divided: the model lies on a mesh. It may fail where it is traced without one, and is not refused for that.

    Raises:
      ValueError: the model fails, or returns what an engine cannot use; one sentence, and the page to read.
    """
    if vars(type(model)).get("IS_CHECKED", False):
        return model.config.vocab_size
    leaves, structure = jax.tree.flatten(model)
    leaves = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in leaves]
    rows = config.max_seqs
    vocab = [
        _check_call(structure, leaves, config, tokens, places, is_divided)
        for tokens, places in (((rows + 3,), (rows,)), ((rows, 1), (rows,)))
    ]
    if None not in vocab and vocab[0] != vocab[1]:
        raise ValueError(
            f"The model gives {vocab[0]} logits to a packed token and {vocab[1]} to a padded one: both must be the "
            f"size of its vocabulary. {PAGE}"
        )
    return vocab[0]


def _check_call(
    structure: Any,
    leaves: list[Any],
    config: CacheConfig,
    tokens: tuple[int, ...],
    places: tuple[int, ...],
    is_divided: bool,
) -> int | None:
    """Checks one call, and returns the size of the vocabulary; None if a model on a mesh could not be traced."""
    layout = "packed" if len(tokens) == 1 else "padded"
    problem: list[str] = []

    def call(leaves: Any, cache: Cache, ids: Any, at: Any) -> Any:
        model = jax.tree.unflatten(structure, leaves)
        wants_places, given = takes(model, "logits_at"), name_leaves(type(model).__name__, model)
        result = model(ids, cache=cache, **({"logits_at": at} if wants_places else {}), **no_adapters(model, cache))
        wanted = places if wants_places else tokens
        asked = f"logits_at i32{list(at.shape)} of " if wants_places else ""
        problem.extend(_find_problems(result, cache, wanted, f"{asked}{layout} tokens i32{list(tokens)}"))
        problem.extend(f"The model's call changes {name}, {LOST}" for name in _find_changed(given, model))
        return () if problem else result[0]

    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (tokens, places)]
    cache = jax.eval_shape(functools.partial(init, config))
    try:
        logits = jax.eval_shape(call, leaves, cache, *integers)
    except Exception as error:
        if is_divided:
            return None
        raise ValueError(
            f"The model fails on {layout} tokens i32{list(tokens)} ({describe_error(error)}). "
            f"An engine calls it with i32[N], the tokens of all rows one after another, and with i32[S, 1]. {PAGE}"
        ) from error
    if problem:
        raise ValueError(f"{problem[0]} {PAGE}")
    return logits.shape[-1]


def _find_problems(result: Any, cache: Cache, wanted: tuple[int, ...], given: str) -> list[str]:
    """Returns what is wrong with the result of a call, the first thing first."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        return [f"A model must return the pair (logits, cache), but for {given} it returns {_describe(result)}."]
    logits, after = result
    if not isinstance(after, Cache):
        return [f"A model must return (logits, cache), a whole jaxkv.Cache, but its second part is {_describe(after)}."]
    shape = getattr(logits, "shape", None)
    if shape is None or len(shape) != len(wanted) + 1 or shape[:-1] != wanted:
        axes = ", ".join(map(str, wanted))
        return [f"A model must return logits [{axes}, vocabulary] for {given}, not {_describe(logits)}."]
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        return [f"A model must return logits, floating point numbers, for {given}, not {_describe(logits)}."]
    if after.config != cache.config:
        return ["A model must return the cache that it was given, updated, but it returns one of another config."]
    stale = [i for i, pool in enumerate(cache.pools) if pool is not None and after.pools[i].kv is pool.kv]  # type: ignore[union-attr]
    if len(stale) == sum(pool is not None for pool in cache.pools):
        return [
            "The model returns the cache that it was given, without this step's keys and values: return the one "
            "that jaxkv.attention returned, out, cache = jaxkv.attention(q, k, v, cache, layer=i)."
        ]
    if stale:
        return [
            f"The model writes nothing to layer {stale[0]} of its {cache.num_layers}: give each layer's attention "
            "its own layer=, and hand the cache that it returns to the next one."
        ]
    return []


def name_leaves(name: str, model: Any) -> dict[str, Any]:
    """Returns the leaves of a model by their names, which begin with its own."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {f"{name}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def _find_changed(given: dict[str, Any], model: Any) -> list[str]:
    """Returns the names of the counters that a call has changed, as those of random numbers; nothing if it has given
    back other numbers too, for `nnx.jit` gives back all that it was given. What `sow` adds is no change."""
    after = name_leaves(type(model).__name__, model)
    changed = {name: leaf for name, leaf in after.items() if name in given and leaf is not given[name]}
    counts = all(jnp.issubdtype(jnp.result_type(leaf), jnp.integer) for leaf in changed.values())
    return list(changed) if counts else []


def describe_error(error: Exception) -> str:
    """Returns the type and first line of an error, whole where it is a refusal of this library: its end is the way
    out."""
    first = str(error).strip().partition("\n")[0].removesuffix(".")
    return f"{type(error).__name__}: {first if len(first) <= MOST_SHOWN else f'{first[: MOST_SHOWN - 1]}…'}"


def _describe(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return describe_array(x)
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return f"a {type(x).__name__}"
