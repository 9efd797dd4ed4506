"""Entries of several tokens (DeepSeek V4): what they are made of, and how."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models.blocks.norms import normalize
from jaxkv.models.blocks.part_configs import CompressorConfig
from jaxkv.models.config import DecoderConfig
from jaxkv.models.layers import norm_weight
from jaxkv.models.rope import Rope
from jaxkv.nnx import project
from pallas_kernels.common.xla_cpu import side_by_side


class EntryParts(NamedTuple):
    """What entries of one width are made of."""

    k: jax.Array  # f32[.., width], or twice as wide where windows overlap
    gate: jax.Array  # the same: logits of the softmax over an entry's tokens
    norm: jax.Array  # [width], of the norm's weight


class Compressor(nnx.Module):
    """Projects tokens to what entries are made of.

    Shapes: E inputs, D entries of an entry, and P = D, or 2 D where windows overlap, in which a token's first D numbers
    go into the next entry, and its last D into its own. `key [P, E]`, `gate [P, E]`, `position_bias [ratio, P]`,
    `norm [D]`.
    """

    def __init__(self, config: DecoderConfig, own: CompressorConfig, dim: int, dtype: Any, rngs: nnx.Rngs):
        def weight() -> nnx.Param:
            return nnx.Param(init(rngs.params(), (own.overlaps * dim, config.embed_dim), dtype))

        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.key, self.gate, self.norm = weight(), weight(), norm_weight(config, dim, dtype)
        self.position_bias = nnx.Param(jnp.zeros((own.ratio, own.overlaps * dim), dtype))

    def __call__(self, x: jax.Array, positions: jax.Array) -> EntryParts:
        bias = self.position_bias[...].astype(jnp.float32)
        k, gate = (project("...e,de->...d", x, w).astype(jnp.float32) for w in (self.key, self.gate))
        return EntryParts(k, gate + bias[positions % bias.shape[0]], self.norm[...])


def combine_tokens(
    k: jax.Array, gate: jax.Array, is_token: jax.Array, position: jax.Array, *, rope: Rope, rope_dim: int, eps: float,
    norm: jax.Array,
) -> jax.Array:  # fmt: skip
    """Returns entries `f32[n, D]`: sums of their tokens, weighted by a softmax of the gates in each number, normalised,
    and rotated in their last entries.

    Args:
      k, gate: `f32[n, W, P]`, of the tokens that an entry is made of; see `Compressor`.
      is_token: `bool[n, W]`: those that there are.
      position: `i32[n]`, by which entries are rotated.
      norm: `[D]`.
    """
    dim = norm.shape[0]
    if k.shape[-1] > dim:  # the first half of the tokens belong to the entry before
        half = k.shape[1] // 2
        k, gate = (jnp.concatenate([x[:, :half, :dim], x[:, half:, dim:]], axis=1) for x in (k, gate))
    gate = jnp.where(is_token[..., None], gate, jnp.finfo(jnp.float32).min)
    k = jnp.where(is_token[..., None], k, 0.0)
    entry = normalize(jnp.sum(k * jax.nn.softmax(gate, axis=1), axis=1), norm, eps=eps)[:, None]
    _, entry = rotate_last(lambda q, k: rope(q, k, position), rope_dim, entry, entry)
    return entry[:, 0]


def rotate_last(rotate: Callable[..., tuple[jax.Array, ...]], size: int, *heads: jax.Array) -> list[jax.Array]:
    """Returns heads `[.., H, D]` of one width whose last `size` numbers went through `rotate`, together."""
    begin = heads[0].shape[-1] - size
    rotated = rotate(*(x[..., begin:] for x in heads))
    return [side_by_side(x[..., :begin], y) if begin else y for x, y in zip(heads, rotated, strict=True)]


def split_windows(x: jax.Array, ratio: int, window: int) -> jax.Array:
    """Returns the last `window` tokens up to the end of each entry of whole sequences: `[.., n, window, P]` of
    `[.., T, P]`; before the first token lie others."""
    at, _ = find_windows(x.shape[-2], ratio, window)
    return jnp.take(x, at, axis=-2, mode="clip")


def find_windows(num_tokens: int, ratio: int, window: int) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of `split_windows`, `i32[n, window]`, negative before the first, and which there are."""
    end = (jnp.arange(num_tokens // ratio, dtype=jnp.int32)[:, None] + 1) * ratio
    at = end - window + jnp.arange(window, dtype=jnp.int32)[None]
    return at, at >= 0
