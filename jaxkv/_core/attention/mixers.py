"""Recurrent layers in a step: `read_states`, `write_states`, and the mixers that do both."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv._core.attention.layer_call import is_layer
from jaxkv._core.attention.plan import Step, check_plan, settle_cache, settle_tables
from jaxkv._core.blocks.mixer_shards import run_on_mesh
from jaxkv._core.blocks.slot_allocator import end_snapshots, snapshot_arguments
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.validation import show
from jaxkv._core.state.head_rows import row_tables
from jaxkv._core.state.state import BlockTables, Layer
from jaxkv._core.state.state_repr import describe_array
from jaxkv._core.state.state_slots import NULL_SLOT, StateLayer, StateSlots
from pallas_kernels.common.state_batch import MIXERS, expand


def read_states(cache: Any, *, layer: Any = None) -> dict[str, jax.Array]:
    """Reads the states of all rows before this step's tokens; 0 of a row that has none.

    Args:
      cache: a cache, or one of its layers, which needs no `layer`.
      layer: index of a recurrent layer.

    Returns:
      By name `[S, *shape]`, as `LayerConfig.recurrent` says.

    Raises:
      ValueError: the layer keeps no state.

    >>> import jaxkv
    >>> layers = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), jaxkv.LayerConfig.recurrent(state=((4, 2), "float32"))
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=3, max_seq_len=64, num_blocks=4))
    >>> jaxkv.read_states(cache, layer=1)["state"].shape
    (3, 4, 2)
    """
    found = find_state_layer(cache, layer)
    tables = row_tables(found.tables, found.config)
    source = found.slots.source
    has_state = (tables.lengths > tables.new) & (source != NULL_SLOT)

    states, find = found.apart()

    def read(x: jax.Array) -> jax.Array:
        own = x.at[find(source)].get(mode="clip")
        return jnp.where(expand(has_state, x.ndim), own, jnp.zeros((), x.dtype))

    return {name: read(x) for name, x in states.items()}


def write_states(cache: Any, states: Mapping[str, Any], *, layer: Any = None) -> Any:
    """Stores the states after this step's tokens, of the rows that have tokens in it.

    Args:
      cache: a cache, or one of its layers, which needs no `layer`.
      states: by name `[S, *shape]`; arrays that are left out stay as they are.
      layer: index of a recurrent layer.

    Returns:
      The cache, or the layer. States of other rows, and of rows that failed, stay as they are, whatever is given.

    Raises:
      ValueError: the layer keeps no state, or none of such a name, shape or dtype.

    >>> import jaxkv
    >>> layers = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), jaxkv.LayerConfig.recurrent(state=((2,), "float32"))
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=2, max_seq_len=64, num_blocks=4))
    >>> cache = jaxkv.write_states(jaxkv.extend(cache, [1, 0]), {"state": jnp.ones((2, 2))}, layer=1)
    >>> jaxkv.read_states(jaxkv.extend(cache, [1, 1]), layer=1)["state"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    found = find_state_layer(cache, layer)
    if not isinstance(states, Mapping):
        raise ValueError(f"states must be a dict of arrays by name, as read_states returns, not {show(states)}.")
    arrays = {array.name: array for array in found.layer_config.states or ()}
    for name, x in states.items():
        if name not in arrays:
            raise ValueError(f"Layer {found.number} keeps no {show(name)}, only {', '.join(arrays)}.")
        wanted = (found.rows, *arrays[name].shape)
        if getattr(x, "shape", None) != wanted or str(getattr(x, "dtype", None)) != arrays[name].dtype:
            given = describe_array(x) if hasattr(x, "shape") and hasattr(x, "dtype") else show(x)
            raise ValueError(
                f"The state {name!r} of layer {found.number} must be {arrays[name].dtype}{list(wanted)}, one of each "
                f"row, not {given}."
            )
    tables = row_tables(found.tables, found.config)

    slots, ends = end_snapshots(found.slots, tables, found.config)
    writes = (tables.new > 0) & ~_guessing(slots)
    for name in states:
        slots = record_inputs(found, slots, name, "write_states", {})
    apart, find = found.apart()

    def write(x: jax.Array, new: Any) -> jax.Array:
        for target in (found.slots.slots, *ends):
            at = jnp.where(writes & (target != NULL_SLOT), find(target), x.shape[0])
            x = x.at[at].set(jnp.asarray(new), mode="drop")
        return x

    written = {name: write(x, states[name]) if name in states else x for name, x in apart.items()}
    written = found.with_apart(written)
    return put_state_layer(cache, dataclasses.replace(found, states=written, slots=slots))


def causal_conv(
    x: Any,
    weight: Any,
    cache: Any,
    layer: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
    name: str = "conv",
    step: Step | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Computes a causal convolution of this step's tokens, behind the last inputs of their rows, and keeps the last.

    Args:
      x: `[S, T, C]` padded or `[N, C]` packed.
      weight, bias, activation, implementation: as for [`pallas_kernels.causal_conv`][].
      cache, layer: a cache and the index of a recurrent layer, or the layer alone.
      name: the state's array, `(C, width - 1)`, or `(C // n, width - 1, n)` with channels in groups of n. A TPU's
        kernel takes groups of 128.
      step: the plan of the step.

    Returns:
      `(y, cache)`: the output like x, 0 for padding and rows that failed, and the cache, or the layer.

    Raises:
      ValueError: shapes or dtypes that do not fit together or the layer; the layer keeps no such state.

    >>> import jaxkv
    >>> layers = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), jaxkv.LayerConfig.recurrent(conv=((4, 1), "float32"))
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=1, max_seq_len=64, num_blocks=4))
    >>> x, weight = jnp.ones((1, 1, 4)), jnp.ones((4, 2))
    >>> y, cache = jaxkv.causal_conv(x, weight, jaxkv.extend(cache, [1]), layer=1)
    >>> y, cache = jaxkv.causal_conv(x, weight, jaxkv.extend(cache, [1]), layer=1)
    >>> y.tolist()
    [[[2.0, 2.0, 2.0, 2.0]]]
    """
    run = _open(pallas_kernels.causal_conv, {"x": x}, cache, layer, step, name)
    return run({"weight": weight, "bias": bias, "activation": activation, "implementation": implementation})


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    cache: Any,
    layer: Any = None,
    *,
    scale: Any = None,
    name: str = "state",
    step: Step | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Computes the gated delta rule of this step's tokens from the states of their rows, and keeps the next.

    Args:
      q, k, v, g, beta, scale, implementation: as for [`pallas_kernels.gated_delta_rule`][].
      cache, layer, step: as for `causal_conv`.
      name: the state's array, `(heads, key_dim, value_dim)`.

    Returns:
      `(y, cache)`, as `causal_conv`.

    Raises:
      ValueError: as `causal_conv`.

    >>> import jaxkv
    >>> state = jaxkv.LayerConfig.recurrent(state=((1, 1, 1), "float32"))
    >>> layers = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), state
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=1, max_seq_len=64, num_blocks=4))
    >>> one, half = jnp.ones((1, 1, 1, 1)), jnp.full((1, 1, 1), 0.5)
    >>> y, cache = jaxkv.gated_delta_rule(one, one, one, 0 * half, half, jaxkv.extend(cache, [1]), layer=1)
    >>> y, cache = jaxkv.gated_delta_rule(one, one, one, 0 * half, half, jaxkv.extend(cache, [1]), layer=1)
    >>> y.ravel().tolist()
    [0.75]
    """
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    run = _open(pallas_kernels.gated_delta_rule, tokens, cache, layer, step, name)
    return run({"scale": scale, "implementation": implementation})


def state_space(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    cache: Any,
    layer: Any = None,
    *,
    D: Any = None,
    name: str = "state",
    step: Step | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Computes a selective state space (Mamba 2) of this step's tokens from the states of their rows, and keeps the
    next.

    Args:
      x, dt, A, B, C, D, implementation: as for [`pallas_kernels.state_space`][].
      cache, layer, step: as for `causal_conv`.
      name: the state's array, `(heads, head_dim, state_dim)`.

    Returns:
      `(y, cache)`, as `causal_conv`.

    Raises:
      ValueError: as `causal_conv`.

    >>> import jaxkv
    >>> state = jaxkv.LayerConfig.recurrent(state=((1, 1, 1), "float32"))
    >>> layers = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), state
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=layers, max_seqs=1, max_seq_len=64, num_blocks=4))
    >>> one, A = jnp.ones((1, 1, 1, 1)), -jnp.ones(1)
    >>> y, cache = jaxkv.state_space(one, one[0], A, one, one, jaxkv.extend(cache, [1]), layer=1)
    >>> y.ravel().tolist()
    [1.0]
    """
    run = _open(pallas_kernels.state_space, {"x": x, "dt": dt, "B": B, "C": C}, cache, layer, step, name)
    return run({"A": A, "D": D, "implementation": implementation})


def record_inputs(
    layer: StateLayer, slots: StateSlots, name: str, mixer: str, tokens: dict[str, Any], **fixed: Any
) -> StateSlots:
    """Returns slots that know what a layer's mixer took, in a step of guesses."""
    if slots.guesses is not None and isinstance(layer.place, jax.core.Tracer) and layer.config.period > 1:
        raise ValueError(
            "A step of guesses takes recurrent layers one by one, layer=0, 1 and so on, not in a scan: keep needs to "
            "know what each of them was given."
        )
    return slots.record(layer.number, name, mixer, tokens, **fixed)


def find_state_layer(cache: Any, layer: Any) -> StateLayer:
    """Returns the recurrent layer that a cache and an index name, or the layer that was given itself."""
    if isinstance(cache, Layer):
        cache, layer = _layers_of(cache), cache.number
    return cache if is_layer(cache, layer, StateLayer) else cache.state_layer(layer)


def _layers_of(layer: Layer) -> Cache:
    """Returns a cache of no arrays with a layer's config, which says what the layer is."""
    return Cache(tables=(), pools=(), config=layer.config)


def _guessing(slots: StateSlots) -> jax.Array:
    """Returns `bool[S]`: the rows that do not write their states in this step."""
    return jnp.zeros(slots.slots.shape, bool) if slots.guesses is None else slots.guesses.rows


def put_state_layer(cache: Any, layer: StateLayer) -> Any:
    """Returns a cache with a recurrent layer put back, or the layer, if that was given."""
    return layer if isinstance(cache, StateLayer) else cache.with_layer(layer.number, layer)


Run = Callable[[dict[str, Any]], tuple[jax.Array, Any]]


def _open(
    door: Callable[..., Any], tokens: dict[str, Any], cache: Any, layer: Any, step: Step | None, name: str
) -> Run:
    """Returns a function that runs a mixer on a layer's rows, given the mixer's other arguments.

    Args:
      door: the mixer, one of `MIXERS`.
      tokens: the arrays with token axes, by their names.
      name: the state's array.
    """
    found = find_state_layer(cache, layer)
    if name not in found.states:
        raise ValueError(f"Layer {found.number} keeps no {show(name)}, only {', '.join(found.states)}: give its name=.")
    for label, array in tokens.items():
        if not isinstance(array, jax.Array | np.ndarray):
            raise ValueError(f"{label} must be an array, not {type(array).__name__}: convert it with jnp.asarray.")
    form = MIXERS[door.__name__]
    x = tokens[form.shown]
    token_axes = tuple(x.shape[: x.ndim - form.inner])
    if len(token_axes) not in (1, 2) or (len(token_axes) == 2 and token_axes[0] != found.rows):
        raise ValueError(
            f"{form.shown} must be padded to all rows of the cache, [{found.rows}, T, ...], or packed "
            f"[N, ...], but its shape is {list(x.shape)}."
        )
    check_plan(step, found.config, form.shown, token_axes)
    if isinstance(cache, Cache):
        cache = settle_cache(cache, token_axes, step)
        found = dataclasses.replace(cache.state_layer(found.number), place=found.place)
    else:
        found = dataclasses.replace(found, tables=settle_tables(found.tables, 0, token_axes, step))

    def run(options: dict[str, Any]) -> tuple[jax.Array, Any]:
        tables = row_tables(found.tables, found.config)
        packed = _Packed(tables, token_axes) if step is not None and step.decode and len(token_axes) == 1 else None
        arrays = tokens if packed is None else {label: packed.pad(array) for label, array in tokens.items()}
        slots, (apart, find) = found.slots, found.apart()
        target = jnp.where((slots.slots == NULL_SLOT) | _guessing(slots), -1, slots.slots)  # -1: not written
        longest = 1 if packed is not None else token_axes[-1]
        fixed = {label: options[label] for label in form.fixed}
        recorded = record_inputs(found, slots, name, door.__name__, tokens, **fixed)
        y, states = run_on_mesh(door, apart[name], found.heads)(
            **arrays,
            **options,
            states=apart[name],
            slots=find(slots.source),
            to_slots=find(target),
            **snapshot_arguments(slots, tables, found.config, longest, find),
            lengths=tables.lengths,
            new=tables.new,
            offsets=tables.offsets if packed is None and len(token_axes) == 1 else None,
        )
        y = y if packed is None else packed.unpad(y)
        changed = dataclasses.replace(found, states=found.with_apart(apart | {name: states}), slots=recorded)
        return y, put_state_layer(cache, changed)

    return run


class _Packed(NamedTuple):
    """Packed tokens of which no row has more than one, as padded ones and back."""

    tables: BlockTables
    token_axes: tuple[int, ...]

    def pad(self, x: Any) -> jax.Array:
        """Returns `[S, 1, ...]`, each row's token."""
        return jnp.asarray(x).at[self.tables.offsets].get(mode="clip")[:, None]

    def unpad(self, y: jax.Array) -> jax.Array:
        """Returns `[N, ...]`, 0 for padding."""
        tables = self.tables
        token = pallas_kernels.locate(self.token_axes, tables.lengths, tables.new, tables.offsets)
        return jnp.where(expand(token.valid, y.ndim - 1), y[token.row, 0], jnp.zeros((), y.dtype))
