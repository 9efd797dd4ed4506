"""Attention of a quantized layer whose newest tokens stand in a residual layer, in bfloat16.

A query reads the last `residual_length` tokens up to its own from the residual layer and those before them from the
quantized one, and both outputs are merged by their LSE. What it reads thus follows from its position alone, however a
prompt is split into steps. `pallas_kernels` leaves the newest tokens of the quantized layer out (`residual_length`).
"""

from typing import Any

import jax.numpy as jnp

import pallas_kernels
from jaxkv._core.state.state import Layer

# Options by which a token sees other tokens of the step than those before it, or tokens of its own choice.
REFUSED = ("tree", "spans", "tokens", "blocks")


def split_options(layer: Layer, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the options of a call for the newest tokens and for those before; None: no token sees any of these.

    Raises:
      ValueError: an option that a layer with a residual layer does not support.
    """
    length, window = _residual_length(layer), options.get("window")
    if given := [name for name in REFUSED if name in options]:
        raise ValueError(
            f"Layer {layer.number} reads its newest {length} tokens from a residual layer, by their positions, and "
            f"cannot take {given[0]}: leave it out, or make the cache without residual_length."
        )
    newest = {name: x for name, x in options.items() if name not in ("shared", "sink_tokens")}
    newest["window"] = length if window is None else min(window, length)
    newest.setdefault("scale", layer.layer_config.head_dim**-0.5)  # rows of either layer may be wider than a head
    if window is not None and window <= length:
        if "sink_tokens" in options:
            raise ValueError(
                f"Layer {layer.number} reads its newest {length} tokens from a residual layer, without sink tokens: "
                f"with sink_tokens give a wider window than {window}, or make the cache without residual_length."
            )
        return newest, None
    older = {name: x for name, x in options.items() if name != "sinks"}
    older |= {"scale": newest["scale"], "return_lse": True, "residual_length": length}
    if window is not None:
        older["window"] = window - length
    return newest | {"return_lse": True}, older


def merge_outputs(layer: Layer, newest: Any, older: Any, options: dict[str, Any]) -> Any:
    """Returns the output over all tokens of that over the newest ones and that over those before, each with its LSE."""
    (out, lse), (older_out, older_lse) = newest, older
    if "alibi" in options:  # slopes were taken of distances that are smaller by as much
        older_lse -= jnp.broadcast_to(options["alibi"] * _residual_length(layer), older_lse.shape)
    merged = pallas_kernels.merge_attention(jnp.stack([out, older_out]), jnp.stack([lse, older_lse]))
    return merged if options.get("return_lse") else merged[0]


def describe_residual(layer: Layer) -> str:
    """Returns a sentence about where the newest tokens are read; "" without a residual layer."""
    if layer.residual is None:
        return ""
    return f" The newest {_residual_length(layer)} tokens of each query are read from a residual layer, in bfloat16."


def _residual_length(layer: Layer) -> int:
    assert layer.config.residual_length is not None
    return layer.config.residual_length
