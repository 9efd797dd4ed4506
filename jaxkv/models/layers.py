"""Layers of a decoder's blocks besides attention and experts: the gated MLP and norms."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.config.layer_config import LayerConfig
from jaxkv.models.blocks.norms import normalize
from jaxkv.models.config import DecoderConfig
from jaxkv.models.rope import Rope
from jaxkv.nnx import Attention, project

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer, 2020: https://arxiv.org/abs/2002.05202), `mlp_dim` wide; in models
    without gates `down(activation(up(x)))`.

    Weights are `[outputs, inputs]`, as in checkpoints. The activation "xielu" has two learned numbers. With a
    `sparsity`, of a token's gates those are 0 that lie below that quantile of a normal distribution of their mean and
    deviation, and the others count from there (Spark Transformer: https://arxiv.org/abs/2506.06644). With a `limit`,
    gates are clipped from above, and `up` on both sides.
    """

    limit: float | None = None  # no attribute of most: each costs a step, which flattens the module, a call

    def __init__(
        self,
        config: DecoderConfig,
        mlp_dim: int,
        dtype: Any,
        rngs: nnx.Rngs,
        sparsity: float = 0.0,
        limit: float | None = None,
    ):
        def weight(num_outputs: int, num_inputs: int) -> nnx.Param:
            init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
            return nnx.Param(init(rngs.params(), (num_outputs, num_inputs), dtype))

        def bias(size: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros((size,), dtype)) if config.mlp_bias else None

        gated = config.gated_mlp
        self.gate = weight(mlp_dim, config.embed_dim) if gated else None
        self.gate_bias = bias(mlp_dim) if gated else None
        self.up, self.up_bias = weight(mlp_dim, config.embed_dim), bias(mlp_dim)
        self.down, self.down_bias = weight(config.embed_dim, mlp_dim), bias(config.embed_dim)
        self.activation, self.scales = config.activation, config.mlp_scales
        learns = config.activation == "xielu"
        self.alpha_p, self.alpha_n = (nnx.Param(jnp.zeros((1,), dtype)) if learns else None for _ in range(2))
        if limit is not None:
            self.limit = limit
        self.deviations = statistics.NormalDist().inv_cdf(sparsity) if sparsity else None

    def __call__(self, x: jax.Array) -> jax.Array:
        up = project("...e,fe->...f", x, self.up, self.up_bias)
        if self.gate is None:
            return project("...f,ef->...e", self._activate(up), self.down, self.down_bias)
        gate = scale(project("...e,fe->...f", x, self.gate, self.gate_bias), self.scales[0])
        if self.deviations is not None:
            mean, deviation = gate.mean(axis=-1, keepdims=True), gate.std(axis=-1, keepdims=True)
            gate = jax.nn.relu(gate - (mean + deviation * jnp.asarray(self.deviations, gate.dtype)))
        gate, up = clip_gated(gate, up, self.limit)
        y = project("...f,ef->...e", self._activate(gate) * up, self.down, self.down_bias)
        return scale(y, self.scales[1])

    def _activate(self, x: jax.Array) -> jax.Array:
        if self.alpha_p is None or self.alpha_n is None:
            return ACTIVATIONS[self.activation](x)
        return xielu(x, self.alpha_p[...][0], self.alpha_n[...][0])


def clip_gated(gate: jax.Array, up: jax.Array, limit: float | None) -> tuple[jax.Array, jax.Array]:
    """Clips gates from above, and what they multiply on both sides; a limit of None leaves both as they are."""
    return (gate, up) if limit is None else (jnp.minimum(gate, limit), jnp.clip(up, -limit, limit))


def xielu(x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array) -> jax.Array:
    """Computes xIELU (https://arxiv.org/abs/2411.13010) of two learned numbers, in float32."""
    y = x.astype(jnp.float32)
    above, below = jax.nn.softplus(alpha_p.astype(jnp.float32)), 0.5 + jax.nn.softplus(alpha_n.astype(jnp.float32))
    curve = jnp.where(y > 0, above * y * y, below * (jnp.expm1(jnp.minimum(y, -1e-6)) - y))
    return (curve + 0.5 * y).astype(x.dtype)


def scale(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times a number, in x's dtype."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}


class GatedAttention(Attention):
    """Attention whose output is multiplied by a function of a projection of the token, `gate [H, D, E]`; or
    `head_gate [H, E]`, where a head's entries have one gate."""

    def __init__(self, *args: Any, by: str, activation: str, **options: Any):
        super().__init__(*args, **options)
        heads, head_dim, width = self.out.shape
        self.gate = self._init_gate(options["rngs"], heads, head_dim, width) if by == "entry" else None
        self.head_gate = self._init_gate(options["rngs"], heads, width) if by == "head" else None
        self.gate_activation = activation

    def _init_gate(self, rngs: nnx.Rngs, *shape: int) -> nnx.Param:
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=range(-len(shape), -1))
        return nnx.Param(init(rngs.params(), shape, self.out.dtype))

    def inputs(self, x: jax.Array, positions: Any) -> Any:
        inputs = super().inputs(x, positions)
        if self.gate is None:
            assert self.head_gate is not None
            return inputs, project("...e,he->...h", x, self.head_gate)[..., None]
        return inputs, project("...e,hde->...hd", x, self.gate)

    def attend(self, inputs: tuple, *args: Any) -> tuple[Any, Any]:
        inputs, gate = inputs
        y, cache = super().attend(inputs, *args)
        return (y, gate), cache

    def output(self, y: Any) -> jax.Array:
        y, gate = y
        return super().output(y * GATES[self.gate_activation](gate))


class NormedRope(nnx.Module):
    """A rotation of queries and keys that are RMS-normed too: what, and whether first, `qk_norm_over` tells.

    Weights are `[D]`, or `[H, D]` for queries and `[K, D]` for keys where all heads are normalised together.
    """

    def __init__(self, config: DecoderConfig, num_heads: int, layer: LayerConfig, rope: Rope, dtype: Any):
        def weight(heads: int) -> nnx.Param:
            front = (heads,) if config.qk_norm_over == "all_heads" else ()
            return norm_weight(config, (*front, layer.head_dim), dtype)

        self.config, self.rope = config, rope
        self.query_norm = weight(num_heads)
        self.key_norm = weight(layer.num_kv_heads) if layer.shares_with is None else None  # it reads another's keys

    def __call__(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_last = self.config.qk_norm_over == "rotated_head"
        q, k = self.rope(q, k, positions) if is_last else (q, k)
        q = rms_norm(q, self.query_norm, self.config)
        k = k if self.key_norm is None else rms_norm(k, self.key_norm, self.config)
        return (q, k) if is_last else self.rope(q, k, positions)


def rms_norm(x: jax.Array, weight: nnx.Param, config: DecoderConfig, eps: float | None = None) -> jax.Array:
    """Computes the RMS norm over the weight's axes, with a config's epsilon and offset."""
    return normalize(x, weight[...], eps=config.norm_eps if eps is None else eps, offset=config.norm_offset)


def norm_weight(config: DecoderConfig, shape: int | tuple[int, ...], dtype: Any) -> nnx.Param:
    return nnx.Param(jnp.full(shape, 1.0 - config.norm_offset, dtype))
