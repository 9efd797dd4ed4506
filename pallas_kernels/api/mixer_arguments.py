"""What the doors of mixers take: checks shapes against the mixer's form, and dtypes, options and rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.state_batch import MIXERS, MixerCall, MixerForm, StateBatch

ACTIVATIONS = (None, "silu")
SHAPES_ONLY = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def check_arguments(call: MixerCall, kinds: Any = (jax.Array, np.ndarray)) -> tuple[int, ...]:
    """Returns the token axes of a mixer's arrays. Raises ValueError for shapes, dtypes or options that do not fit."""
    form = MIXERS[call.op]
    given = {name: x for name, x in call.arrays.items() if x is not None or name not in form.optional}
    for name, x in given.items():
        if not isinstance(x, kinds):
            raise ValueError(f"{name} must be an array, not {type(x).__name__}: convert it with jnp.asarray.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, not {x.dtype}.")
        if 0 in x.shape and name != "states" and name not in form.token_arrays:
            raise ValueError(f"{name} must be [{form.arrays[name][0].replace(' ', ', ')}], not empty: {list(x.shape)}.")
    if given[form.shown].ndim - form.inner not in (1, 2):
        inner = ", ".join(form.arrays[form.shown][0].split()[1:])
        raise ValueError(
            f"{form.shown} must be padded [S, T, {inner}] or packed [N, {inner}], but its shape is "
            f"{given[form.shown].shape}."
        )
    sizes: dict[str, int] = {}
    for name, forms in form.arrays.items():
        if name in given:
            _match(name, given[name].shape, forms, call.token_axes, sizes)
    if form.shared is not None:
        _check_sharing(form, sizes[form.heads], sizes[form.shared])
    if call.op == "causal_conv":
        _check_groups(call.arrays["states"].shape, sizes["C"])
    for name, option in call.options.items():
        OPTIONS[name](option)
    return call.token_axes


def _match(
    name: str, shape: tuple[int, ...], forms: tuple[str, ...], token_axes: tuple[int, ...], sizes: dict[str, int]
) -> None:
    """Raises ValueError unless a shape has one of the forms of `MixerForm`. `sizes` are those of known axes; it takes
    those of the others."""
    allowed = []
    for form in forms:
        axes = form.removeprefix("... ").split()
        wanted = [*(token_axes if form.startswith("...") else ()), *(_find_size(axis, sizes) for axis in axes)]
        if len(wanted) == len(shape) and all(n == m or isinstance(m, str) for n, m in zip(shape, wanted, strict=True)):
            sizes |= zip(axes, shape[len(shape) - len(axes) :], strict=True)
            return
        allowed.append(f"[{', '.join(map(str, wanted))}]")
    raise ValueError(f"{name} must be {' or '.join(allowed)}, but its shape is {list(shape)}.")


def _find_size(axis: str, sizes: dict[str, int]) -> int | str:
    """Returns the size of an axis, `width` or `width-1`; its name where the size is not known."""
    known, _, less = axis.partition("-")
    return sizes[known] - int(less or 0) if known in sizes else axis


def _check_sharing(form: MixerForm, heads: int, shared: int) -> None:
    if not shared or heads % shared:
        raise ValueError(
            f"{heads} heads of {form.shown} cannot share {shared} heads of {form.shared_arrays[0]}: the first must "
            "be a multiple."
        )


def _check_groups(states: tuple[int, ...], channels: int) -> None:
    if len(states) == 4 and states[1] * states[3] != channels:
        raise ValueError(
            f"states must hold {channels} channels in equal groups, [slots, groups, {states[2]}, channels of a group], "
            f"but its shape is {list(states)}."
        )


def _check_activation(activation: Any) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f'activation must be None or "silu", not {activation!r:.99}.')


def _check_scale(scale: Any) -> None:
    is_number = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not (scale is None or (is_number and np.isfinite(scale)) or (isinstance(scale, jax.Array) and not scale.shape)):
        raise ValueError(f"scale must be a finite number or a scalar array, not {scale!r:.99}.")


OPTIONS = {"activation": _check_activation, "scale": _check_scale}


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
