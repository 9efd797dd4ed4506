"""Rotary position embedding, with the scalings of published checkpoints."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import integer, real, show
from jaxkv._products import moves_heads
from jaxkv.models.blocks.norms import normalize
from pallas_kernels.common.xla_cpu import side_by_side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotates each pair (i, i + D/2) of a head's entries by an angle proportional to the token's position.

    An instance can be the `position_fn` of `jaxkv.nnx.Attention` and `jaxkv.linen.Attention`. From RoFormer
    (https://arxiv.org/abs/2104.09864).

    Fields:
      theta: the base of the wavelengths.
      scaling: "linear" divides every frequency by `factor`; "llama3" does so only for waves longer than
        `original_max_position / low_freq_factor`, leaves those shorter than `original_max_position / high_freq_factor`
        unchanged, and blends in between; "yarn" (https://arxiv.org/abs/2309.00071) leaves those that turn more than
        `beta_fast` times within `original_max_position`, divides those that turn less than `beta_slow` times, and
        blends in between, with bounds rounded to whole pairs if `truncate`; "longrope"
        (https://arxiv.org/abs/2402.13753) divides each pair's by its own of `divisors`; "proportional" rotates the
        first pairs, a share of them, by what they would be in a head that rotates as a whole (Gemma 4).
      attention_factor, mscale, mscale_all_dim: with "yarn", these determine `magnitude`; with "longrope" the first.
      partial_rotary_factor: share of a head's entries that are rotated, the first ones; 0: none, a layer without
        positions (NoPE).
      temperature_beta: b in `1 + b log(1 + floor((position + temperature_shift) / temperature_length))`, a factor of
        queries that keeps attention sharp beyond the positions of the training; 0: none. The length is by default
        `original_max_position`.
      norm_eps: epsilon of RMS norms, without weights, of rotated queries and keys; None: no such norms.
      interleaved: the pairs are (2 i, 2 i + 1). The output has them at (i, i + D/2), in queries and keys alike.

    >>> q = k = jnp.ones((3, 2, 8))
    >>> Rope(theta=10_000.0)(q, k, jnp.arange(3))[0].shape
    (3, 2, 8)
    """

    theta: float = 10_000.0
    scaling: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    interleaved: bool = False
    divisors: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    temperature_beta: float = 0.0
    temperature_length: int | None = None
    temperature_shift: int = 0
    norm_eps: float | None = None

    def __post_init__(self):
        above_0 = (
            "theta",
            "factor",
            "low_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        )
        for name in above_0:
            if getattr(self, name) is not None:
                real(name, getattr(self, name), least=1 if name == "theta" else None, above=0)
        real("high_freq_factor", self.high_freq_factor, above=self.low_freq_factor)
        integer("original_max_position", self.original_max_position, least=1)
        real("temperature_beta", self.temperature_beta, least=0)
        integer("temperature_shift", self.temperature_shift, least=0)
        if self.temperature_length is not None:
            integer("temperature_length", self.temperature_length, least=1)
        if self.norm_eps is not None:
            real("norm_eps", self.norm_eps, least=0)
        real("partial_rotary_factor", self.partial_rotary_factor, least=0, most=1)
        if self.scaling not in ("default", "linear", "llama3", "yarn", "longrope", "proportional"):
            known = "'default', 'linear', 'llama3', 'yarn', 'longrope' or 'proportional'"
            raise ValueError(f"scaling must be {known}, not {show(self.scaling)}.")

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys: with more positions logits get sharper."""
        if self.scaling not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling == "longrope":
            extended = max(self.factor, 1.0)
            return math.sqrt(1 + math.log(extended) / math.log(max(self.original_max_position, 2)))
        if self.mscale and self.mscale_all_dim:
            return self.sharpening(self.mscale) / self.sharpening(self.mscale_all_dim)
        return self.sharpening(1.0)

    def sharpening(self, mscale: float | None) -> float:
        """Returns YaRN's magnitude for the factor by which positions are extended; 1 where `mscale` is not set."""
        if self.scaling != "yarn" or not mscale or self.factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each rotated pair, `f32[rotated_dim(head_dim) // 2]`."""
        head_dim = self.rotated_dim(head_dim)
        frequency = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling in ("linear", "proportional"):
            frequency = frequency / self.factor
        if self.scaling == "proportional":
            frequency[int(self.partial_rotary_factor * head_dim // 2) :] = 0
        if self.scaling == "llama3":
            turns = self.original_max_position * frequency / (2 * math.pi)  # within the original context
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)
            frequency = kept * frequency + (1 - kept) * frequency / self.factor
        elif self.scaling == "yarn":
            low, high = self._find_blended(head_dim)
            divided = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
            frequency = (1 - divided) * frequency + divided * frequency / self.factor
        elif self.scaling == "longrope":
            if len(self.divisors) != head_dim // 2:
                raise ValueError(
                    f"divisors must be {head_dim // 2}, one for each rotated pair, not {len(self.divisors)}."
                )
            frequency = frequency / np.asarray(self.divisors, np.float64)
        return frequency.astype(np.float32)

    def rotated_dim(self, head_dim: int) -> int:
        """Number of a head's entries that are rotated, even; with "proportional" the others turn by 0."""
        return head_dim if self.scaling == "proportional" else int(head_dim * self.partial_rotary_factor) // 2 * 2

    def _find_blended(self, head_dim: int) -> tuple[float, float]:
        """Returns the pairs between which YaRN blends."""

        def pair(turns: float) -> float:  # the pair that turns `turns` times within the original context
            return head_dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high if high != low else high + 0.001

    @functools.partial(jax.jit, static_argnums=0)  # traced once for all layers
    def __call__(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotates `q [..., H, D]` and `k [..., K, D]` of the tokens at `positions [...]`; computes in float32."""
        if q.shape[-1] % 2:
            raise ValueError(f"q and k must have an even head_dim, so that entries can be paired, not {q.shape[-1]}.")
        q, k = self._rotate(q, k, positions) if self.rotated_dim(q.shape[-1]) else (q, k)
        if self.norm_eps is not None:
            q, k = normalize(q, eps=self.norm_eps), normalize(k, eps=self.norm_eps)
        return self.heat(q, positions), k

    def heat(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """Multiplies queries by their temperature."""
        if self.temperature_beta == 0:
            return q
        length = self.temperature_length or self.original_max_position
        steps = jnp.floor_divide(positions + self.temperature_shift, length).astype(jnp.float32)
        return (q * (1 + self.temperature_beta * jnp.log1p(steps))[..., None, None]).astype(q.dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def rotate_back(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates heads `[..., H, D]`, as `__call__` returns them, by the opposite angles: their entries then lie as
        they did before. The magnitude multiplies them once more."""
        size = self.rotated_dim(x.shape[-1])
        frequencies = jnp.expand_dims(self.frequencies(x.shape[-1]), tuple(range(positions.ndim + 1)))
        angles = positions.astype(jnp.float32)[..., None, None] * frequencies
        cos, sin = jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude
        left, right = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
        halves = left * cos + right * sin, right * cos - left * sin
        y = jnp.stack(halves, axis=-1).reshape(*x.shape[:-1], size) if self.interleaved else side_by_side(*halves)
        y = y.astype(x.dtype)
        return y if size == x.shape[-1] else side_by_side(y, x[..., size:])

    def _rotate(self, q: jax.Array, k: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Rotates both halves of a head at once: one kernel, not one for each half and another to concatenate them.
        frequencies, size = self.frequencies(q.shape[-1]), self.rotated_dim(q.shape[-1])
        sign = np.repeat(np.array([-self.magnitude, self.magnitude], np.float32), frequencies.size)
        twice = jnp.expand_dims(np.tile(frequencies, 2), tuple(range(positions.ndim + 1)))
        angles = positions.astype(jnp.float32)[..., None, None] * twice  # [..., 1, D]
        cos, sin = jnp.cos(angles), jnp.sin(angles) * jnp.expand_dims(sign, tuple(range(positions.ndim + 1)))
        if self.magnitude != 1.0:
            cos = cos * self.magnitude

        def rotate(x: jax.Array) -> jax.Array:
            halves, swapped = pairs(x if size == x.shape[-1] else x[..., :size], self.interleaved)
            y = (halves * cos + swapped * sin).astype(x.dtype)
            return y if size == x.shape[-1] else side_by_side(y, x[..., size:])

        return rotate(q), rotate(k)


def pairs(x: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Returns heads `[..., H, D]` with each pair's first entry in the left half and its second in the right, and the
    same with the halves exchanged; in float32."""
    if not interleaved and not moves_heads(math.prod(x.shape[:-2]), x.shape[-1]):
        return pairs_by_halves(x, interleaved)
    return jax.lax.platform_dependent(
        x,
        tpu=functools.partial(pairs_by_product, interleaved=interleaved),
        default=functools.partial(pairs_by_halves, interleaved=interleaved),
    )


def pairs_by_halves(x: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    left, right = (x[..., ::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    return side_by_side(left, right) if interleaved else x, side_by_side(right, left)


def pairs_by_product(x: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Computes the same bits by a product with a permutation matrix.

    A TPU's vector unit permutes lanes a register at a time, and XLA stores the result; a stride of two is by far the
    slowest. The matrix unit permutes on the way to the sum."""
    *front, heads, size = x.shape
    x = jax.lax.optimization_barrier(x.reshape(*front, heads * size)).reshape(x.shape)  # as in `into_heads`
    order = np.arange(size).reshape((-1, 2) if interleaved else (2, -1))
    order = order.T if interleaved else order
    # The highest precision splits float32 exactly into three bfloat16 terms.
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST

    def permute(to: np.ndarray) -> jax.Array:
        permutation = jnp.asarray(np.eye(size, dtype=np.float32)[:, to.reshape(-1)], x.dtype)
        return jnp.matmul(x, permutation, precision=precision, preferred_element_type=jnp.float32)

    return permute(order) if interleaved else x.astype(jnp.float32), permute(order[::-1])
