"""A paged cache in Flax Linen models. Import it by name: `import jaxkv.linen`.

- `Attention`: a layer for new models: projections around `jaxkv.attention`.
- `MultiHeadDotProductAttention`: Flax's own layer, with its arguments and parameters, over a cache: for models that use
  it.
- `model(module, variables, layer_configs=..., dtype=...)`: a module and its variables as a `jaxkv.Model`, for `Engine`.

The cache is an argument and a result, not a variable: there is no `mutable=` collection, and a checkpoint of the model
does not contain the cache. A model that computes queries, keys and values itself calls `jaxkv.attention`, or
`jaxkv.dot_product_attention`, which has the arguments of `linen.dot_product_attention`. Either way the model's blocks
take a layer of the cache and return it, and the step donates the whole cache:

    def step(variables, tokens, num_tokens, cache):
        cache = jaxkv.extend(cache, num_tokens)  # make room, once a step
        logits, layers = model.apply(variables, tokens, list(cache.layers))
        return logits, cache.with_layers(layers)

    step = jax.jit(step, donate_argnames="cache")
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxkv._core.attention.plan import Step
from jaxkv._core.cache.cache import Cache
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._core.config.validation import flag, integer
from jaxkv._drop_in import dot_product_attention
from jaxkv._layers import attend_or_dense, head_dim_of, num_kv_heads_of, own_inputs, token_positions
from jaxkv._products import dot_general

__all__ = ["Attention", "MultiHeadDotProductAttention", "model"]


class Attention(linen.Module):
    """Causal self-attention over a paged cache.

    The cache is an argument and a result: there is no `mutable=` collection. Parameters have Flax's own names, `query`,
    `key`, `value` and `out`, each with a `kernel` and optionally a `bias`.

    Attributes:
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
      dtype: dtype of the computation; default: the promoted dtype of inputs and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: the projections' initialiser.

    Raises:
      ValueError: `num_heads` is no multiple of `num_kv_heads`, or E no multiple of `num_heads`.

    >>> import jax, jax.numpy as jnp, jaxkv, jaxkv.linen
    >>> attn = jaxkv.linen.Attention(num_heads=4, num_kv_heads=2, head_dim=16)
    >>> variables = attn.init(jax.random.key(0), jnp.ones((2, 5, 32)))
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=16)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> cache = jaxkv.extend(cache, [5, 3])
    >>> y, cache = attn.apply(variables, jnp.ones((2, 5, 32)), cache=cache, layer=0)
    >>> y.shape, cache.lengths.tolist()
    ((2, 5, 32), [5, 3])
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    use_bias: bool = False
    use_out_bias: bool | None = None
    use_sinks: bool = False
    position_fn: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    window: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = linen.initializers.lecun_normal()
    v_head_dim: int | None = None

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        cache: Any = None,
        *,
        layer: Any = 0,
        positions: jax.Array | None = None,
        step: Step | None = None,
    ) -> tuple[jax.Array, Any]:
        """Computes self-attention. Arguments and results are those of [`jaxkv.nnx.Attention`][]."""
        num_kv_heads = num_kv_heads_of(self.num_heads, self.num_kv_heads)
        head_dim = head_dim_of(x.shape[-1], self.num_heads, self.head_dim)
        v_head_dim = head_dim if self.v_head_dim is None else integer("v_head_dim", self.v_head_dim, least=1)

        def dense(name: str, features: Any, axis: Any, use_bias: bool) -> linen.DenseGeneral:
            return linen.DenseGeneral(
                features,
                axis=axis,
                use_bias=use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                dot_general=dot_general,
                name=name,
            )

        q = dense("query", (self.num_heads, head_dim), -1, self.use_bias)(x)
        k = dense("key", (num_kv_heads, head_dim), -1, self.use_bias)(x)
        v = dense("value", (num_kv_heads, v_head_dim), -1, self.use_bias)(x)
        if self.position_fn is not None:
            q, k = self.position_fn(q, k, token_positions(x.shape[:-1], cache) if positions is None else positions)
        sinks = None
        if self.use_sinks:
            sinks = self.param("sinks", linen.initializers.zeros, (self.num_heads,), self.param_dtype).astype(
                jnp.float32
            )
        options: dict[str, Any] = dict(scale=self.scale, soft_cap=self.soft_cap, window=self.window, sinks=sinks)
        y, cache = attend_or_dense(q, k, v, cache, layer, step, self.position_fn, **options)
        use_out_bias = self.use_bias if self.use_out_bias is None else self.use_out_bias
        return dense("out", x.shape[-1], (-2, -1), use_out_bias)(y), cache


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """Flax's `linen.MultiHeadDotProductAttention` over a paged cache: its attributes, its parameters, and `cache=` in
    the call.

    A call returns `(y, cache)`. With a cache, the layer prefills and decodes, many tokens or one a row, and is causal.
    `decode` is ignored, no collection "cache" is read, and checkpoints of Flax's layer load. Without a cache the layer
    is Flax's, and returns `(y, None)`.

    Raises:
      ValueError: with a cache: another `attention_fn` than Flax's, dropout that is not deterministic, `sow_weights`, or
        a mask that differs by heads; see `jaxkv.dot_product_attention`.

    >>> import jax, jax.numpy as jnp, jaxkv, jaxkv.linen
    >>> attn = jaxkv.linen.MultiHeadDotProductAttention(num_heads=4)
    >>> variables = attn.init(jax.random.key(0), jnp.ones((2, 5, 32)))
    >>> sizes = dict(num_layers=1, num_kv_heads=4, head_dim=8, max_seqs=2, max_seq_len=64)
    >>> cache = jaxkv.extend(jaxkv.init(jaxkv.CacheConfig.uniform(**sizes)), [5, 3])
    >>> y, layer = attn.apply(variables, jnp.ones((2, 5, 32)), cache=cache.layers[0])
    >>> y.shape, cache.with_layer(0, layer).lengths.tolist()
    ((2, 5, 32), [5, 3])
    """

    @linen.compact
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
        dropout_rng: Any = None,
        sow_weights: bool = False,
        **others: Any,
    ) -> tuple[jax.Array, Any]:
        """Computes attention.

        Args:
          inputs_q: `[S, T, E]` padded or `[N, E]` packed. inputs_k, inputs_v: of the same tokens; default: inputs_q.
          cache: one of the `layers` of a cache that `jaxkv.extend` has prepared, or a cache, with `layer=`.
          step: the result of `jaxkv.plan_step` for this step.
          mask: as in `jaxkv.dot_product_attention`.
          deterministic, dropout_rng, sow_weights, **others: Flax's.

        Returns:
          `(y, cache)`; y has inputs_q's shape, except for `out_features`.
        """
        if cache is None:
            y = super().__call__(
                inputs_q,
                inputs_k,
                inputs_v,
                mask=mask,
                deterministic=deterministic,
                dropout_rng=dropout_rng,
                sow_weights=sow_weights,
                **others,
            )
            return y, None
        if self.attention_fn is not linen.dot_product_attention or others:
            raise ValueError(
                f"With a cache {', '.join(others) or 'attention_fn'} has no meaning: leave it out, or call "
                "jaxkv.attention in a layer of your own."
            )
        inputs_k, inputs_v = own_inputs(inputs_q, inputs_k, inputs_v)
        qkv_features = self.qkv_features or inputs_q.shape[-1]
        head_dim = head_dim_of(qkv_features, self.num_heads, None)
        dense = functools.partial(
            linen.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        project = functools.partial(
            dense,
            (self.num_heads, head_dim),
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general or dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        norm = functools.partial(linen.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
        q, k, v = project(name="query")(inputs_q), project(name="key")(inputs_k), project(name="value")(inputs_v)
        if self.normalize_qk:
            q, k = norm(name="query_ln")(q), norm(name="key_ln")(k)
        y, cache = dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype,
            module=self if sow_weights else None,
            deterministic=bool(self.deterministic if deterministic is None else deterministic),
            cache=cache,
            layer=layer,
            step=step,
        )
        out = dense(
            self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general or dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )
        return out(y), cache


def model(
    module: linen.Module,
    variables: Any,
    *,
    layer_configs: Sequence[LayerConfig],
    dtype: Any = "bfloat16",
    scan: bool = False,
    **call: Any,
) -> "LinenModel":
    """Returns a Linen module and its variables as one `jaxkv.Model`, for `Engine`, `generate` and `beam_search`.

    Args:
      module: its call takes `tokens`, packed `i32[N]` or padded `i32[S, T]`, and `cache`; it returns
        `(logits, cache)`. If it has an argument `positions`, it is given those of the tokens; if it has `logits_at`,
        `step`, `deterministic` or `adapters`, an engine gives it these. See `jaxkv.Model`.
      variables: what `module.init` returned, or a checkpoint of it.
      layer_configs: one `LayerConfig` for each attention layer.
      dtype: the dtype in which keys and values are stored.
      scan: whether the module scans over its layers, with `linen.scan` and a traced `layer=`: an engine then makes its
        cache with `stacked=True`.
      **call: other arguments of every call, hashable: `train=False`, `attn_mask=None`.

    Raises:
      ValueError: the module's call has no argument `cache`.

    >>> import jax, jax.numpy as jnp, jaxkv, jaxkv.linen
    >>> from flax import linen
    >>> class Tiny(linen.Module):
    ...     @linen.compact
    ...     def __call__(self, tokens, cache=None):
    ...         x = linen.Embed(16, 32)(tokens)
    ...         y, cache = jaxkv.linen.Attention(num_heads=2, position_fn=jaxkv.models.Rope())(x, cache, layer=0)
    ...         return linen.Dense(16)(x + y), cache
    >>> variables = Tiny().init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    >>> layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),)
    >>> model = jaxkv.linen.model(Tiny(), variables, layer_configs=layers, dtype="float32")
    >>> [len(tokens) for tokens in jaxkv.generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
    [5, 5]
    """
    names = inspect.signature(type(module).__call__).parameters
    if "cache" not in names:
        raise ValueError(
            f"{type(module).__name__}'s call must take cache, as one of {', '.join(list(names)[1:])}: give it that "
            "argument, hand it to jaxkv.attention, and return (logits, cache). See docs/your_model.md."
        )
    is_scanned = flag("scan", scan)
    return LinenModel(variables, module, tuple(layer_configs), dtype, is_scanned, tuple(sorted(call.items())))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LinenModel:
    """A Linen module and its variables, a pytree. Made by `model`."""

    variables: Any
    module: linen.Module = dataclasses.field(metadata={"static": True})
    layer_configs: tuple[LayerConfig, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    scan: bool = dataclasses.field(metadata={"static": True})
    call: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})

    @property
    def __call__(self) -> Callable[..., tuple[jax.Array, Cache]]:
        """The module's call with these variables. It has the module's signature, which says what it takes."""
        signature = inspect.signature(self.module.__call__)

        def call(tokens: jax.Array, *, cache: Cache | None = None, **options: Any) -> tuple[jax.Array, Cache]:
            if "positions" in signature.parameters and "positions" not in options:
                options["positions"] = token_positions(tokens.shape, cache)
            result: Any = self.module.apply(self.variables, tokens, cache=cache, **dict(self.call), **options)
            return result

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call
