"""The attention of DeepSeek V4: one row a token is the key and the value of all heads."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv._core.attention.plan import Step
from jaxkv._core.config.layer_config import LayerConfig
from jaxkv._layers import attend_or_dense
from jaxkv._products import product_by_heads
from jaxkv.models.blocks.norms import normalize
from jaxkv.models.config import CompressedConfig, DecoderConfig
from jaxkv.models.layers import norm_weight, rms_norm
from jaxkv.models.rope import Rope
from jaxkv.nnx import project
from pallas_kernels.common.xla_cpu import side_by_side


class CompressedInputs(NamedTuple):
    """What attention makes of the step's tokens."""

    q: jax.Array  # [.., H, D]
    row: jax.Array  # [.., 1, D]: key and value
    sinks: jax.Array  # f32[H]
    positions: jax.Array  # i32[..], by which outputs are rotated back


class CompressedAttention(nnx.Module):
    """Attention whose keys are its values, rotated in their last entries; outputs are rotated back there, so that they
    tell how far a value is from its query.

    Shapes: E inputs, H heads of D entries, Q the rank of queries, G groups of heads with outputs of rank R.
    `query_down [Q, E]`, `query_up [H, D, Q]`, `key_down [D, E]`, `sinks [H]`, `out_down [G, R, H / G * D]`,
    `out_up [E, G * R]`.
    """

    def __init__(
        self, config: DecoderConfig, own: CompressedConfig, layer: LayerConfig, rope: Rope, dtype: Any, rngs: nnx.Rngs
    ):
        def weight(num_inputs: int, *outputs: int) -> nnx.Param:
            kernel = nnx.initializers.lecun_normal()(rngs.params(), (num_inputs, math.prod(outputs)), dtype)
            return nnx.Param(kernel.T.reshape(*outputs, num_inputs))

        heads, head_dim, width = config.num_heads, layer.head_dim, config.embed_dim
        self.config, self.own, self.rope, self.window = config, own, rope, layer.window
        self.query_down, self.query_norm = weight(width, own.query_rank), norm_weight(config, own.query_rank, dtype)
        self.query_up = weight(own.query_rank, heads, head_dim)
        self.key_down, self.key_norm = weight(width, head_dim), norm_weight(config, head_dim, dtype)
        self.sinks = nnx.Param(jnp.zeros((heads,), dtype))
        self.out_down = weight(heads // own.out_groups * head_dim, own.out_groups, own.out_rank)
        self.out_up = weight(own.out_dim, width)

    def inputs(self, x: jax.Array, positions: jax.Array) -> CompressedInputs:
        compressed = rms_norm(project("...e,qe->...q", x, self.query_down), self.query_norm, self.config)
        q = normalize(project("...q,hdq->...hd", compressed, self.query_up), eps=self.config.norm_eps)
        row = rms_norm(project("...e,de->...d", x, self.key_down), self.key_norm, self.config)[..., None, :]
        size = row.shape[-1] - self.own.rope_dim
        turned, turned_row = self.rope(q[..., size:], row[..., size:], positions)
        if size:
            turned, turned_row = side_by_side(q[..., :size], turned), side_by_side(row[..., :size], turned_row)
        return CompressedInputs(turned, turned_row, self.sinks[...].astype(jnp.float32), positions)

    def attend(
        self, inputs: CompressedInputs, cache: Any, layer: Any, step: Step | None, deterministic: bool = False
    ) -> tuple[jax.Array, Any]:
        """Writes rows, attends, and rotates outputs back. Uses no parameters."""
        q, row, sinks, positions = inputs
        v = row if cache is None else None  # in a cache the values are the keys
        options: dict[str, Any] = dict(scale=self.config.attention_scale, window=self.window, sinks=sinks)
        y, cache = attend_or_dense(q, row, v, cache, layer, step, deterministic=deterministic, **options)
        size = y.shape[-1] - self.own.rope_dim
        turned = self.rope.rotate_back(y[..., size:], positions)
        return side_by_side(y[..., :size], turned) if size else turned, cache

    def output(self, y: jax.Array) -> jax.Array:
        """Projects the outputs of each group of heads, then those of all groups together, to `[..., E]`."""
        by_group = y.reshape(*y.shape[:-2], self.own.out_groups, -1)
        y = product_by_heads(by_group, self.out_down[...].astype(y.dtype), outputs_first=True)
        return project("...f,ef->...e", y.reshape(*y.shape[:-2], -1), self.out_up)
