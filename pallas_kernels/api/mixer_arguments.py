"""What the doors of mixers take: every check of a shape, a dtype or an option, each with its sentence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.state_batch import MixerCall, StateBatch

ACTIVATIONS = (None, "silu")
SHAPES_ONLY = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def check_arguments(call: MixerCall, kinds: Any = (jax.Array, np.ndarray)) -> tuple[int, ...]:
    """Returns the token axes of a mixer's arrays. Raises ValueError for shapes, dtypes or options that do not fit."""
    for name, x in call.arrays.items():
        if x is None and name in ("bias", "D"):
            continue
        if not isinstance(x, kinds):
            raise ValueError(f"{name} must be an array, not {type(x).__name__}: convert it with jnp.asarray.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, not {x.dtype}.")
    checks = {"causal_conv": _check_conv, "gated_delta_rule": _check_delta, "state_space": _check_space}
    return checks[call.op](call.arrays, call.options)


def _check_conv(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[int, ...]:
    axes = _token_axes("x", arrays["x"], "C", 1)
    channels, weight = arrays["x"].shape[-1], arrays["weight"]
    if weight.ndim != 2 or weight.shape[0] != channels or not weight.shape[1]:
        raise ValueError(f"weight must be [{channels}, width], but its shape is {weight.shape}.")
    taps, states = weight.shape[1] - 1, arrays["states"]
    if states.ndim == 4 and states.shape[1] * states.shape[3] == channels:
        _expect("states", states, ("slots", states.shape[1], taps, states.shape[3]))
    elif states.ndim == 4:
        raise ValueError(
            f"states must hold {channels} channels in equal groups, [slots, groups, {taps}, channels of a group], but "
            f"its shape is {list(states.shape)}."
        )
    else:
        _expect("states", states, ("slots", channels, taps))
    if arrays["bias"] is not None:
        _expect("bias", arrays["bias"], (channels,))
    if options["activation"] not in ACTIVATIONS:
        raise ValueError(f'activation must be None or "silu", not {options["activation"]!r:.99}.')
    return axes


def _check_delta(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[int, ...]:
    axes = _token_axes("v", arrays["v"], "H, V", 2)
    heads, width = arrays["v"].shape[-2:]
    keys = arrays["k"].shape[-2:]
    _expect("k", arrays["k"], (*axes, *(keys if len(keys) == 2 else ("heads", "K"))))
    _expect("q", arrays["q"], (*axes, *keys))
    if not keys[0] or heads % keys[0]:
        raise ValueError(f"{heads} heads of v cannot share {keys[0]} heads of k: the first must be a multiple.")
    gates = arrays["g"].shape
    if gates not in ((*axes, heads), (*axes, heads, keys[1])):
        raise ValueError(
            f"g must have a gate for each of the {heads} heads, {[*axes, heads]}, or for each key channel, "
            f"{[*axes, heads, keys[1]]}, but its shape is {list(gates)}."
        )
    _expect("beta", arrays["beta"], (*axes, heads))
    _expect("states", arrays["states"], ("slots", heads, keys[1], width))
    scale = options["scale"]
    is_number = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not (scale is None or (is_number and np.isfinite(scale)) or (isinstance(scale, jax.Array) and not scale.shape)):
        raise ValueError(f"scale must be a finite number or a scalar array, not {scale!r:.99}.")
    return axes


def _check_space(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[int, ...]:
    axes = _token_axes("x", arrays["x"], "H, P", 2)
    heads, width = arrays["x"].shape[-2:]
    groups = arrays["B"].shape[-2:]
    _expect("dt", arrays["dt"], (*axes, heads))
    _expect("A", arrays["A"], (heads,))
    _expect("B", arrays["B"], (*axes, *(groups if len(groups) == 2 else ("G", "n"))))
    _expect("C", arrays["C"], (*axes, *groups))
    if not groups[0] or heads % groups[0]:
        raise ValueError(f"{heads} heads of x cannot share {groups[0]} groups of B: the first must be a multiple.")
    if arrays["D"] is not None and arrays["D"].shape not in ((heads,), (heads, width)):
        raise ValueError(f"D must be [{heads}] or [{heads}, {width}], but its shape is {list(arrays['D'].shape)}.")
    _expect("states", arrays["states"], ("slots", heads, width, groups[1]))
    return axes


def _token_axes(name: str, x: Any, inner: str, count: int) -> tuple[int, ...]:
    if x.ndim - count not in (1, 2):
        raise ValueError(f"{name} must be padded [S, T, {inner}] or packed [N, {inner}], but its shape is {x.shape}.")
    return x.shape[: x.ndim - count]


def _expect(name: str, x: Any, shape: tuple[Any, ...]) -> None:
    """Raises ValueError unless an array has a shape; any size will do where a name stands."""
    if x.ndim != len(shape) or any(n != m for n, m in zip(x.shape, shape, strict=True) if not isinstance(m, str)):
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}], but its shape is {list(x.shape)}.")


def check_batch(batch: StateBatch, states: Any, token_axes: tuple[int, ...]) -> None:
    """Raises ValueError for rows, slots or snapshots that do not fit the pool or the tokens."""
    rows = batch.slots.shape if hasattr(batch.slots, "shape") else None
    if rows is None or len(rows) != 1:
        raise ValueError(f"slots must be i32[S], each row's slot, not {rows or type(batch.slots).__name__}.")
    named: dict[str, Any] = {"slots": batch.slots, "lengths": batch.kv_lens, "new": batch.query_lens}
    named |= {"offsets": batch.query_starts, "to_slots": batch.to_slots}
    for name, x in named.items():
        if x is not None and (x.shape != rows or x.dtype != jnp.int32):
            raise ValueError(f"{name} must be i32[{rows[0]}], one entry for each row, not {x.dtype}{list(x.shape)}.")
    if len(token_axes) == 2 and token_axes[0] != rows[0]:
        raise ValueError(f"Padded tokens have {token_axes[0]} rows, but slots has {rows[0]}: give one row for each.")
    if not states.shape[0]:
        raise ValueError(f"states must have at least one slot, but its shape is {list(states.shape)}.")
    every, slots = batch.every, batch.snapshot_slots
    if (every is None) != (slots is None):
        raise ValueError("every and snapshot_slots say together which states are stored: give both, or none.")
    if every is not None and slots is not None:
        if isinstance(every, bool) or not isinstance(every, int | np.integer) or every < 1:
            raise ValueError(f"every must be an integer, at least 1, not {every!r:.99}.")
        if slots.ndim != 2 or slots.shape[0] != rows[0] or slots.dtype != jnp.int32:
            raise ValueError(f"snapshot_slots must be i32[{rows[0]}, n], not {slots.dtype}{list(slots.shape)}.")
