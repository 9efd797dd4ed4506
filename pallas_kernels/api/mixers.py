"""The doors of layers that keep a state of fixed size: checks arguments, has a backend chosen, and runs it."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api.backends import IMPLEMENTATIONS, Choice, current_platform, read_platform
from pallas_kernels.common.ragged_layout import locate
from pallas_kernels.common.state_batch import StateBatch, expand

OPS = ("causal_conv", "gated_delta_rule", "state_space")
ACTIVATIONS = (None, "silu")


def causal_conv(
    x, weight, states, slots, lengths, new, *, offsets=None, to_slots=None, bias=None, activation=None, every=None,
    snapshot_slots=None, implementation=None,
):  # fmt: skip
    """Computes a causal convolution of each channel by itself, behind the last inputs of each row.

    Output t is `sum_j weight[:, j] * x[t - (width - 1) + j]`, in float32. What a row does not own is never read, and a
    row without tokens before this step sees zeros before its first.

    Args:
      x: `[S, T, C]` padded or `[N, C]` packed.
      weight: `[C, width]`; the last column is the token's own.
      states: `[slots, C, width - 1]`, the last inputs of each row. Donated at the `jit`, it is updated in place.
      slots: `i32[S]`, each row's slot. Rows that have tokens have slots of their own.
      lengths, new, offsets: `i32[S]`, as for [`pallas_kernels.paged_attention`][].
      to_slots: `i32[S]`, the slot that takes the state after the step, for a row that shares the one it reads; default:
        `slots`. Rows are served in order: a slot that one writes may not be read by a later one.
      bias: `[C]`.
      activation: None or "silu".
      every, snapshot_slots: the states after positions that are multiples of `every` are stored too, the j-th of a
        row's step in slot `snapshot_slots[s, j]` of `i32[S, n]`; -1: nowhere.
      implementation: None picks the kernels of the platform, and XLA where there are none; a name insists.

    Returns:
      `(y, states)`: the output in x's shape and dtype, 0 for padding, and the pool. Gradients go to `x`, `weight`,
      `bias` and `states`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      NotImplementedError: the named implementation has no such kernel.

    >>> x, states, count = jnp.ones((1, 3, 2)), jnp.zeros((1, 2, 1)), jnp.array([3])
    >>> y, states = causal_conv(x, jnp.ones((2, 2)), states, jnp.array([0]), count, count)
    >>> y[0, :, 0].tolist()
    [1.0, 2.0, 2.0]
    """
    arrays = dict(x=x, weight=weight, bias=bias, states=states)
    batch = StateBatch(slots, lengths, new, offsets, to_slots, snapshot_slots, every)
    return _run("causal_conv", implementation, arrays, {"activation": activation}, batch)


def gated_delta_rule(
    q, k, v, g, beta, states, slots, lengths, new, *, offsets=None, to_slots=None, scale=None, every=None,
    snapshot_slots=None, implementation=None,
):  # fmt: skip
    """Computes the gated delta rule: each token's state is `exp(g) * before + beta * k (v - k^T before)^T`, where
    before has been multiplied already, and its output `scale * q^T state`. All of it is float32.

    Args:
      q, k: `[S, T, H', K]` padded or `[N, H', K]` packed; H' divides H: heads `h * H' // H` are shared.
      v: `[.., H, V]`.
      g: `[.., H]`, or `[.., H, K]` with a gate for each key channel (KDA): logarithms, at most 0. Those under -100
        count as -100.
      beta: `[.., H]`.
      states: `[slots, H, K, V]`.
      scale: default `K ** -0.5`.
      slots, lengths, new, offsets, to_slots, every, snapshot_slots, implementation: as for
        [`pallas_kernels.causal_conv`][].

    Returns:
      `(y, states)`: the output `[.., H, V]` in v's dtype, 0 for padding, and the pool. Gradients go to all floating
      point arrays.

    From Gated Delta Networks (https://arxiv.org/abs/2412.06464) and Kimi Linear (https://arxiv.org/abs/2510.26692).

    >>> q, g = jnp.ones((1, 2, 1, 1)), jnp.zeros((1, 2, 1))
    >>> y, states = gated_delta_rule(q, q, 2 * q, g, g + 0.5, jnp.zeros((1, 1, 1, 1)), *jnp.array([[0], [2], [2]]))
    >>> y.ravel().tolist()
    [1.0, 1.5]
    """
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, states=states)
    batch = StateBatch(slots, lengths, new, offsets, to_slots, snapshot_slots, every)
    return _run("gated_delta_rule", implementation, arrays, {"scale": scale}, batch)


def state_space(
    x, dt, A, B, C, states, slots, lengths, new, *, offsets=None, to_slots=None, D=None, every=None,
    snapshot_slots=None, implementation=None,
):  # fmt: skip
    """Computes a selective state space (Mamba 2): each token's state is `exp(dt A) * before + dt * x B^T`, and its
    output `state C + D x`. All of it is float32.

    Args:
      x: `[S, T, H, P]` padded or `[N, H, P]` packed.
      dt: `[.., H]`, time steps, at least 0, as they are after any softplus and limits.
      A: `[H]`, below 0.
      B, C: `[.., G, n]`; G divides H.
      states: `[slots, H, P, n]`.
      D: `[H]` or `[H, P]`.
      slots, lengths, new, offsets, to_slots, every, snapshot_slots, implementation: as for
        [`pallas_kernels.causal_conv`][].

    Returns:
      `(y, states)`: the output in x's shape and dtype, 0 for padding, and the pool. Gradients go to all floating point
      arrays.

    From Mamba 2 (https://arxiv.org/abs/2405.21060).

    >>> x, A, count = jnp.ones((1, 2, 1, 1)), -jnp.ones(1), jnp.array([2])
    >>> y, _ = state_space(x, x[..., 0] * 0, A, x, x, jnp.zeros((1, 1, 1, 1)), jnp.array([0]), count, count, D=-A)
    >>> y.ravel().tolist()
    [1.0, 1.0]
    """
    arrays = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, states=states)
    batch = StateBatch(slots, lengths, new, offsets, to_slots, snapshot_slots, every)
    return _run("state_space", implementation, arrays, {}, batch)


def explain_mixer(op: str, *, platform: str | None = None, implementation: str | None = None, **arguments) -> Choice:
    """Returns what `explain` says of one of `OPS`; of arrays only shapes and dtypes are read."""
    names = inspect.signature(globals()[op]).parameters
    if unknown := sorted(set(arguments) - set(names)):
        raise TypeError(f"{op} takes no {' and no '.join(unknown)}: it takes {', '.join(names)}.")
    platform = None if platform is None else read_platform(platform)
    if implementation is None:
        platform = platform or current_platform()
        return Choice("xla", f"There is no kernel of {op} for the platform {platform!r} yet; XLA runs on all of them.")
    _check_implementation(op, implementation)
    return Choice(implementation, "It was asked for by name.")


def _check_implementation(op: str, implementation: Any) -> None:
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}.")
    if implementation in ("gpu", "tpu"):
        raise NotImplementedError(
            f"The {implementation} backend has no kernel of its own for {op}; leave implementation=None to use XLA's."
        )


def _run(op: str, implementation: Any, arrays: dict[str, Any], options: dict[str, Any], batch: StateBatch) -> Any:
    _check_implementation(op, implementation)
    token_axes = check_arguments(op, arrays, options)
    check_batch(batch, arrays["states"], token_axes)
    scale = options.get("scale")
    if op == "gated_delta_rule" and scale is None:
        options = {"scale": arrays["k"].shape[-1] ** -0.5}
    elif scale is not None and not isinstance(scale, jax.Array):
        options = {"scale": float(scale)}
    traced = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = tuple((name, x) for name, x in options.items() if name not in traced)
    every, batch = batch.every, batch._replace(every=None)
    return _once(op, implementation or "xla", static, every, token_axes, arrays | traced, batch)


# Layers of the same shapes are traced and lowered once in a program.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _once(op, implementation, static, every, token_axes, arrays, batch):
    if implementation == "reference":
        from pallas_kernels import reference_mixers as backend
    else:
        from pallas_kernels.xla import mixers as backend  # type: ignore[no-redef]
    y, states = getattr(backend, op)(**arrays, **dict(static), batch=batch._replace(every=every))
    valid = locate(token_axes, batch.kv_lens, batch.query_lens, batch.query_starts).valid
    values = arrays["v" if op == "gated_delta_rule" else "x"]
    return jnp.where(expand(valid, y.ndim), y, 0.0).astype(values.dtype), states


def check_arguments(op: str, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[int, ...]:
    """Returns the token axes of a mixer's arrays. Raises ValueError for shapes, dtypes or options that do not fit."""
    for name, x in arrays.items():
        if x is None and name in ("bias", "D"):
            continue
        if not isinstance(x, jax.Array | np.ndarray):
            raise ValueError(f"{name} must be an array, not {type(x).__name__}: convert it with jnp.asarray.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, not {x.dtype}.")
    checks = {"causal_conv": _check_conv, "gated_delta_rule": _check_delta, "state_space": _check_space}
    return checks[op](arrays, options)


def _check_conv(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[int, ...]:
    axes = _token_axes("x", arrays["x"], "C", 1)
    channels, weight = arrays["x"].shape[-1], arrays["weight"]
    if weight.ndim != 2 or weight.shape[0] != channels or not weight.shape[1]:
        raise ValueError(f"weight must be [{channels}, width], but its shape is {weight.shape}.")
    _expect("states", arrays["states"], ("slots", channels, weight.shape[1] - 1))
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
