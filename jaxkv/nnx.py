"""Attention for Flax NNX models: projections around `jaxkv.attention`, the cache taken and given back."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv._dense import dense_attention

PositionFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Attention(nnx.Module):
    """Causal self-attention over a paged cache.

    The caller makes room once per step with `jaxkv.extend`, then calls every layer:

    >>> import jax.numpy as jnp, jaxkv, jaxkv.nnx
    >>> from flax import nnx
    >>> attn = jaxkv.nnx.Attention(32, num_heads=4, num_kv_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=16)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=8))
    >>> cache = jaxkv.extend(cache, jnp.array([5, 3]))
    >>> y, cache = attn(jnp.ones((2, 5, 32)), cache=cache, layer=0)
    >>> y.shape
    (2, 5, 32)

    Weights are plain parameters, `query [E, H, D]`, `key` and `value` `[E, K, D]`, `out [H, D, E]`: heads have an axis of
    their own to shard on, and a module with few objects is cheap to pass to `jax.jit` as an argument.

    Args:
      in_features: E, the width of the input and of the output.
      num_heads: H.
      num_kv_heads: K, of which H must be a multiple; default H.
      head_dim: D; default E // H.
      use_bias: biases on the query, key and value projections.
      use_out_bias: a bias on the output projection; default `use_bias`.
      use_sinks: one learned logit per head in the softmax's denominator.
      position_fn: called as `f(q, k, positions) -> (q, k)` before attention, for RoPE or any other encoding; it may
        be a module of its own. positions are `i32`, one for each token.
      scale, soft_cap, window: as for `jaxkv.attention`.
      dtype: what to compute in; default `param_dtype`.
      param_dtype: what the parameters are stored in.
      kernel_init: the projections' initialiser.
      rngs: the source of the parameters' randomness.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        use_sinks: bool = False,
        position_fn: PositionFn | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),  # noqa: B008 (stateless)
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None:
            if in_features % num_heads:
                raise ValueError(f"in_features {in_features} is not a multiple of {num_heads} heads: give head_dim.")
            head_dim = in_features // num_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads cannot be shared among {num_kv_heads} KV heads: "
                "num_heads must be a multiple of num_kv_heads."
            )

        def kernel(fan_in: int, *shape: int) -> nnx.Param:
            fan_out = 1
            for size in shape:
                fan_out *= size
            fan_out //= fan_in
            return nnx.Param(kernel_init(rngs.params(), (fan_in, fan_out), param_dtype).reshape(shape))

        def bias(wanted: bool, *shape: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(shape, param_dtype)) if wanted else None

        self.query = kernel(in_features, in_features, num_heads, head_dim)
        self.key = kernel(in_features, in_features, num_kv_heads, head_dim)
        self.value = kernel(in_features, in_features, num_kv_heads, head_dim)
        self.out = kernel(num_heads * head_dim, num_heads, head_dim, in_features)
        self.query_bias = bias(use_bias, num_heads, head_dim)
        self.key_bias = bias(use_bias, num_kv_heads, head_dim)
        self.value_bias = bias(use_bias, num_kv_heads, head_dim)
        self.out_bias = bias(use_bias if use_out_bias is None else use_out_bias, in_features)
        self.sinks = bias(use_sinks, num_heads)
        self.position_fn = position_fn
        self.scale, self.soft_cap, self.window = scale, soft_cap, window
        self.dtype = jnp.dtype(dtype or param_dtype)

    def __call__(self, x: jax.Array, cache=None, *, layer: int = 0, positions: jax.Array | None = None):
        """Attend.

        Args:
          x: `[S, T, E]` padded or `[N, E]` packed.
          cache: a `jaxkv.Cache` that `jaxkv.extend` has made room in for these tokens; None attends to x alone, each row
            of `[S, T, E]` (or all of `[T, E]`) being one whole sequence.
          layer: which of the cache's layers is this one's.
          positions: `i32[S, T]` or `i32[N]`; default: the cache's.

        Returns:
          `(y, cache)`, y in x's shape.
        """
        x = x.astype(self.dtype)
        if positions is None:
            positions = token_positions(x.shape[:-1], cache)
        q = project("...e,ehd->...hd", x, self.query, self.query_bias)
        k = project("...e,ekd->...kd", x, self.key, self.key_bias)
        v = project("...e,ekd->...kd", x, self.value, self.value_bias)
        if self.position_fn is not None:
            q, k = self.position_fn(q, k, positions)
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        options = dict(scale=self.scale, soft_cap=self.soft_cap, window=self.window, sinks=sinks)
        if cache is None:
            y = dense_attention(q, k, v, **options)
        else:
            y, cache = jaxkv.attention(q, k, v, cache, layer=layer, **options)
        return project("...hd,hde->...e", y, self.out, self.out_bias), cache


def token_positions(shape: tuple[int, ...], cache) -> jax.Array:
    """`i32` of `shape`: the cache's positions, or without one 0, 1, 2 ... along the last axis."""
    if cache is None:
        return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return jaxkv.positions(cache, shape)


def project(equation: str, x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """`einsum(equation, x, kernel) + bias` in x's dtype."""
    y = jnp.einsum(equation, x, kernel[...].astype(x.dtype))
    if bias is None:
        return y
    return y + jnp.expand_dims(bias[...].astype(x.dtype), tuple(range(y.ndim - bias.ndim)))
