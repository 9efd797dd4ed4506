"""The doors of layers that keep a state of fixed size: see `mixer_dispatch` for who runs behind them."""

import inspect

from pallas_kernels.api.backends import Choice
from pallas_kernels.api.mixer_dispatch import explain_call, run_call
from pallas_kernels.common.state_batch import MIXERS, MixerCall, StateBatch


def causal_conv(
    x,
    weight,
    states,
    slots,
    lengths,
    new,
    *,
    offsets=None,
    to_slots=None,
    bias=None,
    activation=None,
    every=None,
    snapshot_slots=None,
    implementation=None,
):
    """Computes a causal convolution of each channel by itself, behind the last inputs of each row.

    Output t is `sum_j weight[:, j] * x[t - (width - 1) + j]`, in float32. What a row does not own is never read, and a
    row without tokens before this step sees zeros before its first.

    Args:
      x: `[S, T, C]` padded or `[N, C]` packed.
      weight: `[C, width]`; the last column is the token's own.
      states: `[slots, C, width - 1]`, the last inputs of each row, or `[slots, C // n, width - 1, n]`, where channels
        stand in groups of n. A TPU's kernel takes groups of 128. Donated at the `jit`, it is updated in place.
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

    >>> import jax.numpy as jnp
    >>> x, states, count = jnp.ones((1, 3, 2)), jnp.zeros((1, 2, 1)), jnp.array([3])
    >>> y, states = causal_conv(x, jnp.ones((2, 2)), states, jnp.array([0]), count, count)
    >>> y[0, :, 0].tolist()
    [1.0, 2.0, 2.0]
    """
    arrays = dict(x=x, weight=weight, bias=bias, states=states)
    batch = StateBatch(slots, lengths, new, offsets, to_slots, snapshot_slots, every)
    return run_call(MixerCall("causal_conv", arrays, {"activation": activation}, batch), implementation)


def gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    states,
    slots,
    lengths,
    new,
    *,
    offsets=None,
    to_slots=None,
    scale=None,
    every=None,
    snapshot_slots=None,
    implementation=None,
):
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

    >>> import jax.numpy as jnp
    >>> q, g = jnp.ones((1, 2, 1, 1)), jnp.zeros((1, 2, 1))
    >>> y, states = gated_delta_rule(q, q, 2 * q, g, g + 0.5, jnp.zeros((1, 1, 1, 1)), *jnp.array([[0], [2], [2]]))
    >>> y.ravel().tolist()
    [1.0, 1.5]
    """
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, states=states)
    batch = StateBatch(slots, lengths, new, offsets, to_slots, snapshot_slots, every)
    return run_call(MixerCall("gated_delta_rule", arrays, {"scale": scale}, batch), implementation)


def state_space(
    x,
    dt,
    A,
    B,
    C,
    states,
    slots,
    lengths,
    new,
    *,
    offsets=None,
    to_slots=None,
    D=None,
    every=None,
    snapshot_slots=None,
    implementation=None,
):
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

    >>> import jax.numpy as jnp
    >>> x, A, count = jnp.ones((1, 2, 1, 1)), -jnp.ones(1), jnp.array([2])
    >>> y, _ = state_space(x, x[..., 0] * 0, A, x, x, jnp.zeros((1, 1, 1, 1)), jnp.array([0]), count, count, D=-A)
    >>> y.ravel().tolist()
    [1.0, 1.0]
    """
    arrays = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, states=states)
    batch = StateBatch(slots, lengths, new, offsets, to_slots, snapshot_slots, every)
    return run_call(MixerCall("state_space", arrays, {}, batch), implementation)


def explain_mixer(op: str, *, platform: str | None = None, implementation: str | None = None, **arguments) -> Choice:
    """Returns what `explain` says of one of `MIXERS`; of arrays only shapes and dtypes are read."""
    names = inspect.signature(globals()[op]).parameters
    if unknown := sorted(set(arguments) - set(names)):
        raise TypeError(f"{op} takes no {' and no '.join(unknown)}: it takes {', '.join(names)}.")
    rows = {name: arguments.pop(name, None) for name in ("slots", "lengths", "new", "offsets", "to_slots", "every")}
    batch = StateBatch(
        rows["slots"],
        rows["lengths"],
        rows["new"],
        rows["offsets"],
        rows["to_slots"],
        arguments.pop("snapshot_slots", None),
        rows["every"],
    )
    options = {name: arguments.pop(name, None) for name in ("activation", "scale") if name in names}
    form = MIXERS[op]
    arrays = dict.fromkeys(form.optional) | arguments if set(form.arrays) <= {*form.optional, *arguments} else {}
    return explain_call(MixerCall(op, arrays, options, batch), implementation, platform)
