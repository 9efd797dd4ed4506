"""Rotary position embedding, with the rescalings that published checkpoints use."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.numbers import integer, real, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Turn each pair (i, i + D/2) of a head's entries by an angle that grows with the token's position.

    It fits the `position_fn` of `jaxkv.nnx.Attention` and `jaxkv.linen.Attention`. From RoFormer
    (https://arxiv.org/abs/2104.09864).

    Fields:
      theta: the base of the wavelengths.
      scaling: "linear" divides every frequency by `factor`; "llama3" does so only for waves longer than
        `original_max_position / low_freq_factor`, leaves those shorter than `original_max_position / high_freq_factor`
        as they are, and blends in between.

    >>> q = k = jnp.ones((3, 2, 8))
    >>> Rope(theta=10_000.0)(q, k, jnp.arange(3))[0].shape
    (3, 2, 8)
    """

    theta: float = 10_000.0
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        for name, least in {"theta": 1, "factor": None, "low_freq_factor": None}.items():
            real(name, getattr(self, name), least=least, above=0)
        real("high_freq_factor", self.high_freq_factor, above=self.low_freq_factor)
        integer("original_max_position", self.original_max_position, least=1)
        if self.scaling not in ("default", "linear", "llama3"):
            raise ValueError(f"scaling must be 'default', 'linear' or 'llama3', not {shown(self.scaling)}.")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair, `f32[head_dim // 2]`."""
        frequency = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling == "linear":
            frequency = frequency / self.factor
        elif self.scaling == "llama3":
            turns = self.original_max_position * frequency / (2 * math.pi)  # within the original context
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)
            frequency = kept * frequency + (1 - kept) * frequency / self.factor
        return frequency.astype(np.float32)

    def __call__(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`q [..., H, D]` and `k [..., K, D]` of the tokens at `positions [...]`, turned; computed in float32."""
        frequencies = jnp.expand_dims(self.frequencies(q.shape[-1]), tuple(range(positions.ndim + 1)))
        angles = positions.astype(jnp.float32)[..., None, None] * frequencies  # [..., 1, D/2]
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def rotate(x: jax.Array) -> jax.Array:
            left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
            return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)

        return rotate(q), rotate(k)
