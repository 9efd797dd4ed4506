"""Attention for Flax Linen models: projections around `jaxkv.attention`, the cache taken and given back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxkv._core.plan import Step
from jaxkv._layers import attend_or_dense, head_dim_of, num_kv_heads_of, token_positions


class Attention(linen.Module):
    """Causal self-attention over a paged cache.

    The cache is an argument and a result: there is no `mutable=` collection. Parameters have Flax's own names, `query`,
    `key`, `value` and `out`, each with a `kernel` and perhaps a `bias`.

    Attributes:
      num_heads: H.
      num_kv_heads: K, of which H must be a multiple; default H.
      head_dim: D; default E // H.
      use_bias: biases on the query, key and value projections.
      use_out_bias: a bias on the output projection; default `use_bias`.
      use_sinks: one learned logit per head in the softmax's denominator.
      position_fn: called as `f(q, k, positions) -> (q, k)` before attention, for RoPE or any other encoding, with an
        `i32` position for each token. It may be a module. For example `jaxkv.models.Rope()`.
      scale, soft_cap, window: as for `jaxkv.attention`.
      dtype: what to compute in; default: what inputs and parameters promote to.
      param_dtype: what the parameters are stored in.
      kernel_init: the projections' initialiser.

    Raises:
      ValueError: heads that cannot be shared, or a width that is no multiple of them.

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

    @linen.compact
    def __call__(
        self, x: jax.Array, cache: Any = None, *, layer: Any = 0, positions: jax.Array | None = None,
        step: Step | None = None,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """Attend. Arguments and results are those of [`jaxkv.nnx.Attention`][]."""
        num_kv_heads = num_kv_heads_of(self.num_heads, self.num_kv_heads)
        head_dim = head_dim_of(x.shape[-1], self.num_heads, self.head_dim)

        def dense(name: str, features: Any, axis: Any, use_bias: bool) -> linen.DenseGeneral:
            return linen.DenseGeneral(
                features, axis=axis, use_bias=use_bias, dtype=self.dtype, param_dtype=self.param_dtype,
                kernel_init=self.kernel_init, name=name,
            )  # fmt: skip

        q = dense("query", (self.num_heads, head_dim), -1, self.use_bias)(x)
        k = dense("key", (num_kv_heads, head_dim), -1, self.use_bias)(x)
        v = dense("value", (num_kv_heads, head_dim), -1, self.use_bias)(x)
        if self.position_fn is not None:
            q, k = self.position_fn(q, k, token_positions(x.shape[:-1], cache) if positions is None else positions)
        sinks = None
        if self.use_sinks:
            sinks = self.param("sinks", linen.initializers.zeros, (self.num_heads,), self.param_dtype).astype(
                jnp.float32
            )
        options = dict(scale=self.scale, soft_cap=self.soft_cap, window=self.window, sinks=sinks)
        y, cache = attend_or_dense(q, k, v, cache, layer, step, **options)
        use_out_bias = self.use_bias if self.use_out_bias is None else self.use_out_bias
        return dense("out", x.shape[-1], (-2, -1), use_out_bias)(y), cache
