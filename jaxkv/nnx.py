"""A paged cache in Flax NNX models. Import it by name: `import jaxkv.nnx`.

- `Attention`: a layer for new models: projections around `jaxkv.attention`; takes and returns the cache.
- `MultiHeadAttention`: Flax's own layer, with its arguments and parameters, over a cache: for models that use it.
- `CacheVariable`: an `nnx.Variable` around a cache, for code that updates its cache in place.

A model that computes queries, keys and values itself calls `jaxkv.attention`, or `jaxkv.dot_product_attention`, which
has the arguments of `nnx.dot_product_attention`. Either way the model's blocks take a layer of the cache and return it,
and the step donates the whole cache:

    def step(model, tokens, num_tokens, cache):
        cache = jaxkv.extend(cache, num_tokens)  # make room, once a step
        logits, layers = model(tokens, list(cache.layers))
        return logits, cache.with_layers(layers)

    step = jax.jit(step, donate_argnames="cache")

`jax.jit` with the model as an argument costs less Python time a step than `nnx.jit`. Only `nnx.jit` returns what the
model changes in itself, including a `CacheVariable`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.attention.attention import attention
from jaxkv._core.attention.plan import Step, positions
from jaxkv._core.blocks.tables import extend
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.validation import flag, integer, show
from jaxkv._drop_in import dot_product_attention
from jaxkv._layers import attend_or_dense, head_dim_of, num_kv_heads_of, own_inputs, read_dtype, token_positions
from jaxkv._products import dot_general, product, split_heads
from pallas_kernels.api.arguments import check_numbers

__all__ = ["Attention", "CacheVariable", "MultiHeadAttention"]

PositionFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Attention(nnx.Module):
    """Causal self-attention over a paged cache.

    Weights are plain parameters, `query [H, D, E]`, `key` and `value` `[K, D, E]`, `out [H, D, E]`: heads have an axis
    of their own to shard on, a TPU multiplies without transposing them, and a module of few objects is cheap to pass to
    `jax.jit` as an argument.

    Args:
      in_features: E, the width of the input and of the output.
      num_heads: H.
      num_kv_heads: K, of which H must be a multiple; default H.
      head_dim: D; default E // H.
      v_head_dim: the width of values' heads, if it is another: give the layer of the cache the same.
      use_bias: biases on the query, key and value projections.
      use_out_bias: a bias on the output projection; default `use_bias`.
      use_sinks: one learned logit per head in the softmax's denominator.
      position_fn: called as `f(q, k, positions) -> (q, k)` before attention, for RoPE or any other encoding, with an
        `i32` position for each token. May be a module. For example `jaxkv.models.Rope()`.
      scale, soft_cap, window: as for `jaxkv.attention`.
      chunk: without a cache, a token attends to its own chunk of positions only. A cache has the layer's own.
      dtype: dtype of the computation; default `param_dtype`.
      param_dtype: dtype of the parameters.
      kernel_init: the projections' initialiser.
      rngs: the source of the parameters' randomness.

    Raises:
      ValueError: `num_heads` is no multiple of `num_kv_heads`, or `in_features` no multiple of `num_heads`.

    The caller allocates once per step with `jaxkv.extend`, then calls every layer:

    >>> import jax.numpy as jnp, jaxkv, jaxkv.nnx
    >>> from flax import nnx
    >>> attn = jaxkv.nnx.Attention(32, num_heads=4, num_kv_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=16)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> cache = jaxkv.extend(cache, [5, 3])
    >>> y, cache = attn(jnp.ones((2, 5, 32)), cache=cache, layer=0)
    >>> y.shape, cache.lengths.tolist()
    ((2, 5, 32), [5, 3])
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        v_head_dim: int | None = None,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        use_sinks: bool = False,
        position_fn: PositionFn | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.lecun_normal(),  # noqa: B008 (it has no state)
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_kv_heads_of(num_heads, num_kv_heads)
        head_dim = head_dim_of(in_features, num_heads, head_dim)
        v_head_dim = head_dim if v_head_dim is None else integer("v_head_dim", v_head_dim, least=1)
        use_out_bias = use_bias if use_out_bias is None else use_out_bias
        for name, wanted in {"use_bias": use_bias, "use_out_bias": use_out_bias, "use_sinks": use_sinks}.items():
            flag(name, wanted)
        check_numbers(scale, soft_cap, window, chunk)
        param_dtype = read_dtype("param_dtype", param_dtype)
        if position_fn is not None and not callable(position_fn):
            raise ValueError(f"position_fn must be a function of q, k and positions, or None, not {show(position_fn)}.")

        def kernel(num_inputs: int, num_outputs: int) -> jax.Array:
            return kernel_init(rngs.params(), (num_inputs, num_outputs), param_dtype)

        def init_heads(heads: int, width: int) -> nnx.Param:
            return nnx.Param(kernel(in_features, heads * width).T.reshape(heads, width, in_features))

        def zeros(wanted: bool, *shape: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(shape, param_dtype)) if wanted else None

        self.query, self.key = init_heads(num_heads, head_dim), init_heads(num_kv_heads, head_dim)
        self.value = init_heads(num_kv_heads, v_head_dim)
        self.out = nnx.Param(kernel(num_heads * v_head_dim, in_features).reshape(num_heads, v_head_dim, in_features))
        self.query_bias = zeros(use_bias, num_heads, head_dim)
        self.key_bias = zeros(use_bias, num_kv_heads, head_dim)
        self.value_bias = zeros(use_bias, num_kv_heads, v_head_dim)
        self.out_bias = zeros(use_out_bias, in_features)
        self.sinks = zeros(use_sinks, num_heads)
        self.position_fn = position_fn
        self.scale, self.soft_cap, self.window, self.chunk = scale, soft_cap, window, chunk
        self.dtype = None if dtype is None else read_dtype("dtype", dtype)

    def __call__(
        self,
        x: jax.Array,
        cache: Any = None,
        *,
        layer: Any = 0,
        positions: jax.Array | None = None,
        step: Step | None = None,
        deterministic: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Computes self-attention.

        Args:
          x: `[S, T, E]` padded or `[N, E]` packed.
          cache: a cache that `jaxkv.extend` has prepared for these tokens, or one of its `layers`. None: attend to x
            alone; each row of `[S, T, E]`, or all of `[T, E]`, is one whole sequence.
          layer: index of the cache's layer to write and read.
          positions: `i32[S, T]` or `i32[N]` for `position_fn`; default: the cache's. Compute once for many layers.
          step: the result of `jaxkv.plan_step` for this step. Compute once for many layers.
          deterministic: with a cache, that of `jaxkv.attention`.

        Returns:
          `(y, cache)`; y has x's shape.

        Raises:
          ValueError: x is not as wide as the layer; and as `jaxkv.attention`.
        """
        if getattr(x, "shape", ())[-1:] != (width := self.query.shape[-1],):
            given = f"its shape is {x.shape}" if hasattr(x, "shape") else f"it is a {type(x).__name__}"
            raise ValueError(
                f"x must be [S, T, {width}] or packed [N, {width}], since this layer was made with in_features="
                f"{width}, but {given}."
            )
        if positions is None and self.position_fn is not None:
            positions = token_positions(x.shape[:-1], cache)
        y, cache = self.attend(self.inputs(x, positions), cache, layer, step, deterministic)
        return self.output(y), cache

    # The three parts of a call, for models that compile attention once for many layers: see `jaxkv.models.Decoder`.

    def inputs(self, x: jax.Array, positions: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Computes all inputs of `attend` from x: queries and keys, rotated, values, and sinks."""
        x = x.astype(self.query.dtype if self.dtype is None else self.dtype)
        q = project("...e,hde->...hd", x, self.query, self.query_bias)
        k = project("...e,kde->...kd", x, self.key, self.key_bias)
        v = project("...e,kde->...kd", x, self.value, self.value_bias)
        if self.position_fn is not None:
            q, k = self.position_fn(q, k, positions)
        return q, k, v, None if self.sinks is None else self.sinks[...].astype(jnp.float32)

    def attend(
        self, inputs: tuple, cache: Any, layer: Any, step: Step | None, deterministic: bool = False
    ) -> tuple[jax.Array, Any]:
        """Writes keys and values, and attends. Uses no parameters."""
        q, k, v, sinks = inputs
        options = dict(scale=self.scale, soft_cap=self.soft_cap, window=self.window, chunk=self.chunk, sinks=sinks)
        return attend_or_dense(q, k, v, cache, layer, step, self.position_fn, deterministic, **options)

    def output(self, y: jax.Array) -> jax.Array:
        """Projects the heads' outputs to `[..., E]`."""
        return project("...hd,hde->...e", y, self.out, self.out_bias)


def project(equation: str, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """Computes `einsum(equation, x, kernel) + bias` in x's dtype, over x's last axes and the kernel's first or last."""
    # Uses a product of matrices: with more axes, einsum, or XLA on a CPU, would transpose the kernel in every step.

    inputs, weights = equation.split("->")[0].removeprefix("...").split(",")
    count, outputs_first = len(inputs), not weights.startswith(inputs)
    front, size = x.shape[: x.ndim - count], math.prod(x.shape[x.ndim - count :])
    with jax.named_scope(equation):
        w = kernel[...].astype(x.dtype)
        outputs = w.shape[:-count] if outputs_first else w.shape[count:]
        w = w.reshape((-1, size) if outputs_first else (size, -1))
        y = product(x.reshape(*front, size), w, outputs_first=outputs_first)
        y = split_heads(y, outputs) if len(outputs) > 1 else y
    if bias is None:
        return y
    return y + jnp.expand_dims(bias[...].astype(x.dtype), tuple(range(y.ndim - bias.ndim)))


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax's `nnx.MultiHeadAttention` over a paged cache: its arguments, its parameters, and `cache=` in the call.

    A call returns `(y, cache)`. With a cache, the layer prefills and decodes, many tokens or one a row, and is causal
    whatever `is_causal` says. `decode` is ignored, `init_cache` is not needed, and checkpoints of Flax's layer load.
    Without a cache the layer is Flax's, and returns `(y, None)`.

    Raises:
      ValueError: with a cache: another `attention_fn` than Flax's, dropout that is not deterministic, `sow_weights`, or
        a mask that differs by heads; see `jaxkv.dot_product_attention`.

    >>> import jax.numpy as jnp, jaxkv, jaxkv.nnx
    >>> from flax import nnx
    >>> attn = jaxkv.nnx.MultiHeadAttention(4, 32, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
    >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [5, 3])
    >>> y, layer = attn(jnp.ones((2, 5, 32)), cache=cache.layers[0])
    >>> y.shape, cache.with_layer(0, layer).lengths.tolist()
    ((2, 5, 32), [5, 3])
    """

    def __init__(
        self, *args: Any, qkv_dot_general: Any = dot_general, out_dot_general: Any = dot_general, **options: Any
    ):
        super().__init__(*args, qkv_dot_general=qkv_dot_general, out_dot_general=out_dot_general, **options)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        cache: Any = None,
        layer: Any = None,
        step: Step | None = None,
        mask: Any = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        **others: Any,
    ) -> tuple[jax.Array, Any]:
        """Computes attention.

        Args:
          inputs_q: `[S, T, E]` padded or `[N, E]` packed. inputs_k, inputs_v: of the same tokens; default: inputs_q.
          cache: one of the `layers` of a cache that `jaxkv.extend` has prepared, or a cache, with `layer=`; or one of
            the `layers` of a `CacheVariable`, which is updated in place.
          step: the result of `jaxkv.plan_step` for this step.
          mask: as in `jaxkv.dot_product_attention`.
          deterministic, rngs, sow_weights, decode, is_causal, out_sharding, qkv_sharding, **others: Flax's.

        Returns:
          `(y, cache)`; y has inputs_q's shape, except for `out_features`.
        """
        if cache is None:
            dense = functools.partial(
                super().__call__,
                inputs_q,
                inputs_k,
                inputs_v,
                mask=mask,
                deterministic=deterministic,
                rngs=rngs,
                sow_weights=sow_weights,
                decode=decode,
                is_causal=is_causal,
                out_sharding=out_sharding,
                qkv_sharding=qkv_sharding,
            )
            return dense(**others), None
        if self.attention_fn is not nnx.dot_product_attention or others:
            what = ", ".join(others) or "attention_fn"
            raise ValueError(
                f"With a cache {what} is not called: turn queries and keys by their positions with jaxkv.nnx.Attention("
                "position_fn=...), or in a layer of your own around jaxkv.attention."
            )
        inputs_k, inputs_v = own_inputs(inputs_q, inputs_k, inputs_v)
        q = self.query(inputs_q, out_sharding=qkv_sharding)
        k = self.key(inputs_k, out_sharding=qkv_sharding)
        v = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            q, k = self.query_ln(q), self.key_ln(k)
        attend = functools.partial(
            dot_product_attention,
            q,
            k,
            v,
            mask=mask,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
            deterministic=bool(self.deterministic if deterministic is None else deterministic),
            module=self if sow_weights else None,
            step=step,
        )
        if isinstance(cache, LayerInPlace):
            place = cache
            y = place.variable.apply(lambda cache: attend(cache=cache, layer=place.layer))
        else:
            y, cache = attend(cache=cache, layer=layer)
        return self.out(y, out_sharding=out_sharding), cache


class CacheVariable(nnx.Cache[Cache]):
    """An `nnx.Variable` around a cache, for models that update their cache in place, as Flax's own layers do.

    `variable[...]` is the cache, `variable[...] = cache` replaces it, and its attributes are the cache's:
    `variable.lengths`. `nnx.Cache` selects the variable: `nnx.state(model, nnx.Cache)`.

    `nnx.jit` returns a step's changes of the variable; `nnx.jit(step, donate_argnums=0)`, with the model as the step's
    first argument, updates the pools in place. Under `jax.jit` the step must return the variable, or changes are lost.

    >>> import jax.numpy as jnp, jaxkv, jaxkv.nnx
    >>> from flax import nnx
    >>> sizes = dict(num_layers=2, num_kv_heads=2, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> class Model(nnx.Module):
    ...     def __init__(self):
    ...         self.cache = jaxkv.nnx.CacheVariable(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)))
    ...     def __call__(self, x, num_tokens):  # x [S, T, K, D]
    ...         self.cache.extend(num_tokens)
    ...         for layer in self.cache.layers:
    ...             x = layer.attention(x, x, x)
    ...         return x
    >>> model = Model()
    >>> step = nnx.jit(lambda model, x, num_tokens: model(x, num_tokens), donate_argnums=0)
    >>> x = step(model, jnp.ones((2, 3, 2, 8)), jnp.array([3, 1]))
    >>> model.cache.apply(jaxkv.truncate, [2, 0])
    >>> model.cache.lengths.tolist()
    [2, 0]
    """

    # Returns the value itself, not a copy as Flax does: the layers of a step know their tables by identity.
    def get_value(self, *, index: Any = ...) -> Cache:
        """Returns the cache."""
        self._check_index(index)
        return self.get_raw_value()

    def set_value(self, value: Cache, *, index: Any = ...) -> None:
        """Replaces the cache."""
        self._check_index(index)
        self.set_raw_value(value)

    def extend(self, num_tokens: Any) -> None:
        """Allocates blocks for a step's tokens; see `jaxkv.extend`."""
        self.set_value(extend(self.get_value(), num_tokens))

    def attention(self, q: jax.Array, k: Any, v: Any, *, layer: Any, **options: Any) -> Any:
        """Stores and attends; see `jaxkv.attention`. Returns its output alone."""
        out, cache = attention(q, k, v, self.get_value(), layer=layer, **options)
        self.set_value(cache)
        return out

    def positions(self, axes: Any) -> jax.Array:
        """Returns the positions of a step's tokens; see `jaxkv.positions`."""
        return positions(self.get_value(), axes)

    @property
    def layers(self) -> "tuple[LayerInPlace, ...]":
        """The layers, one for each block of a model to update in place: `out = layer.attention(q, k, v)`."""
        return tuple(LayerInPlace(self, layer) for layer in range(self.get_value().num_layers))

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the cache, such as `jaxkv.fork`, and keeps the returned cache.

        Returns:
          None; or `out`, if the function returns `(out, cache)`.
        """
        out, result = None, function(self.get_value(), *args, **kwargs)
        if isinstance(result, tuple):
            out, result = result
        if not isinstance(result, Cache):
            raise ValueError(
                f"apply wants a function that returns a cache, or (out, cache), not {type(result).__name__}."
            )
        self.set_value(result)
        return out

    @staticmethod
    def _check_index(index: Any) -> None:
        if index is not ...:
            raise IndexError(f"A CacheVariable is read and set as a whole, variable[...], not at {index!r}.")


class LayerInPlace(NamedTuple):
    """One layer of a `CacheVariable`, made by its `layers`: a reference into the variable, without arrays."""

    variable: CacheVariable
    layer: int

    def attention(self, q: jax.Array, k: Any, v: Any, **options: Any) -> Any:
        """Stores and attends; see `jaxkv.attention`. Returns its output alone."""
        return self.variable.attention(q, k, v, layer=self.layer, **options)

    def positions(self, axes: Any) -> jax.Array:
        """Returns the positions of a step's tokens; see `jaxkv.positions`."""
        return self.variable.positions(axes)
