"""The parameters of a mixer, and its operations on a cache or on whole rows."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxkv._core.attention import mixers
from jaxkv._core.attention.plan import Step
from jaxkv.models.config import DecoderConfig


class MixerModule(nnx.Module):
    """The parameters of a mixer, by the names and shapes that its config says."""

    def __init__(self, config: DecoderConfig, mixer: Any, dtype: Any, rngs: nnx.Rngs):
        for name, shape in mixer.shapes(config.embed_dim).items():
            param = None if shape is None else nnx.Param(_initial(name, shape, dtype, rngs))
            setattr(self, name, param)
        self.mixer = mixer

    if TYPE_CHECKING:  # parameters are set by name

        def __getattr__(self, name: str) -> Any: ...


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    cache: Any,
    layer: Any,
    step: Step | None,
) -> tuple[jax.Array, Any]:
    """Computes `jaxkv.causal_conv`, or without a cache the convolution of whole rows."""
    if cache is not None:
        return mixers.causal_conv(x, kernel, cache, layer, bias=bias, activation=activation, step=step)
    states = x.shape[-1], kernel.shape[-1] - 1
    door = pallas_kernels.causal_conv
    return whole_rows(door, states, x.ndim - 1, {"weight": kernel, "bias": bias, "activation": activation}, x=x), None


def whole_rows(
    door: Callable[..., Any],
    state: tuple[int, ...],
    num_axes: int,
    options: dict[str, Any] | None = None,
    **tokens: Any,
) -> jax.Array:
    """Returns the outputs of a mixer for whole rows `[S, T, ...]`, or of one row `[T, ...]`, without a cache."""
    padded = {name: x if num_axes == 2 else x[None] for name, x in tokens.items()}
    rows, length = next(iter(padded.values())).shape[:2]
    lengths = jnp.full((rows,), length, jnp.int32)
    slots, states = jnp.arange(rows, dtype=jnp.int32), jnp.zeros((rows, *state), jnp.float32)
    y, _ = door(**padded, **options or {}, states=states, slots=slots, lengths=lengths, new=lengths)
    return y if num_axes == 2 else y[0]


def _initial(name: str, shape: tuple[int, ...], dtype: Any, rngs: nnx.Rngs) -> jax.Array:
    if name == "norm":
        return jnp.ones(shape, dtype)
    if len(shape) == 1:
        return jnp.zeros(shape, dtype)
    in_axis, out_axis = (-2, -1) if name == "out" else (-1, -2)
    return nnx.initializers.lecun_normal(in_axis=in_axis, out_axis=out_axis)(rngs.params(), shape, dtype)
