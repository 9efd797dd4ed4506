"""Attention for Flax NNX models: projections around `jaxkv.attention`, the cache taken and given back."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.plan import Step
from jaxkv._layers import attend_or_dense, head_dim_of, num_kv_heads_of, token_positions

PositionFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Attention(nnx.Module):
    """Causal self-attention over a paged cache.

    Weights are plain parameters, `query [E, H, D]`, `key` and `value` `[E, K, D]`, `out [H, D, E]`: heads have an axis
    of their own to shard on, and a module of few objects is cheap to pass to `jax.jit` as an argument.

    Args:
      in_features: E, the width of the input and of the output.
      num_heads: H.
      num_kv_heads: K, of which H must be a multiple; default H.
      head_dim: D; default E // H.
      use_bias: biases on the query, key and value projections.
      use_out_bias: a bias on the output projection; default `use_bias`.
      use_sinks: one learned logit per head in the softmax's denominator.
      position_fn: called as `f(q, k, positions) -> (q, k)` before attention, for RoPE or any other encoding, with an
        `i32` position for each token. It may be a module of its own. For example `jaxkv.models.Rope()`.
      scale, soft_cap, window: as for `jaxkv.attention`.
      dtype: what to compute in; default `param_dtype`.
      param_dtype: what the parameters are stored in.
      kernel_init: the projections' initialiser.
      rngs: the source of the parameters' randomness.

    Raises:
      ValueError: heads that cannot be shared, or a width that is no multiple of them.

    The caller makes room once per step with `jaxkv.extend`, then calls every layer:

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
        self, in_features: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None, *,
        use_bias: bool = False, use_out_bias: bool | None = None, use_sinks: bool = False,
        position_fn: PositionFn | None = None, scale: float | None = None, soft_cap: float | None = None,
        window: int | None = None, dtype: Any = None, param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.lecun_normal(),  # noqa: B008 (it has no state)
        rngs: nnx.Rngs,
    ):  # fmt: skip
        num_kv_heads = num_kv_heads_of(num_heads, num_kv_heads)
        head_dim = head_dim_of(in_features, num_heads, head_dim)

        def kernel(num_inputs: int, *shape: int) -> nnx.Param:
            # Initialisers take all axes but the last for inputs.
            flat = (num_inputs, math.prod(shape) // num_inputs)
            return nnx.Param(kernel_init(rngs.params(), flat, param_dtype).reshape(shape))

        def zeros(wanted: bool, *shape: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(shape, param_dtype)) if wanted else None

        self.query = kernel(in_features, in_features, num_heads, head_dim)
        self.key = kernel(in_features, in_features, num_kv_heads, head_dim)
        self.value = kernel(in_features, in_features, num_kv_heads, head_dim)
        self.out = kernel(num_heads * head_dim, num_heads, head_dim, in_features)
        self.query_bias = zeros(use_bias, num_heads, head_dim)
        self.key_bias = zeros(use_bias, num_kv_heads, head_dim)
        self.value_bias = zeros(use_bias, num_kv_heads, head_dim)
        self.out_bias = zeros(use_bias if use_out_bias is None else use_out_bias, in_features)
        self.sinks = zeros(use_sinks, num_heads)
        self.position_fn = position_fn
        self.scale, self.soft_cap, self.window = scale, soft_cap, window
        self.dtype = None if dtype is None else jnp.dtype(dtype)

    def __call__(
        self, x: jax.Array, cache: Any = None, *, layer: Any = 0, positions: jax.Array | None = None,
        step: Step | None = None,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """Attend.

        Args:
          x: `[S, T, E]` padded or `[N, E]` packed.
          cache: one that `jaxkv.extend` has made room in for these tokens, or one of its `layers`. None: attend to x
            alone, each row of `[S, T, E]`, or all of `[T, E]`, being one whole sequence.
          layer: which of the cache's layers this one writes and reads.
          positions: `i32[S, T]` or `i32[N]` for `position_fn`; default: the cache's. A model of many layers asks once.
          step: what `jaxkv.plan_step` made of this step. A model of many layers makes it once.

        Returns:
          `(y, cache)`; y has x's shape.
        """
        x = x.astype(self.query.dtype if self.dtype is None else self.dtype)
        q = project("...e,ehd->...hd", x, self.query, self.query_bias)
        k = project("...e,ekd->...kd", x, self.key, self.key_bias)
        v = project("...e,ekd->...kd", x, self.value, self.value_bias)
        if self.position_fn is not None:
            q, k = self.position_fn(q, k, token_positions(x.shape[:-1], cache) if positions is None else positions)
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        options = dict(scale=self.scale, soft_cap=self.soft_cap, window=self.window, sinks=sinks)
        y, cache = attend_or_dense(q, k, v, cache, layer, step, **options)
        return project("...hd,hde->...e", y, self.out, self.out_bias), cache


def project(equation: str, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """`einsum(equation, x, kernel) + bias`, in x's dtype."""
    y = jnp.einsum(equation, x, kernel[...].astype(x.dtype))
    if bias is None:
        return y
    return y + jnp.expand_dims(bias[...].astype(x.dtype), tuple(range(y.ndim - bias.ndim)))
