"""Cases of kernels that update states, and their check against the reference."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference_mixers
from pallas_kernels.common.state_batch import StateBatch

SLOTS, HEADS = 11, 4


class Mixing(NamedTuple):
    """A step of a mixer: rows, and how many tokens each has before and in it."""

    op: str = "gated_delta_rule"
    by_channel: bool = False
    before: tuple[int, ...] = (0, 2, 3, 39, 7)
    new: tuple[int, ...] = (1, 1, 0, 1, 1)
    slots: tuple[int, ...] = (2, 5, 0, 1, 1)  # rows 3 and 4 share a state, of which the last goes on in place
    to_slots: tuple[int, ...] = (2, 6, 0, 7, 1)
    snapshots: tuple[int, ...] = (3, -1, -1, 8, 9)
    packed: bool = False
    every: int = 4
    heads: int = HEADS
    keys: int | None = None  # heads of keys; None: half as many
    dtypes: tuple[str, str] = ("float32", "float32")  # of values, or of a convolution's tokens and of its states

    @property
    def options(self) -> dict[str, Any]:
        """The mixer's options that are no arrays."""
        return {"activation": "silu"} if self.op == "causal_conv" else {}

    @property
    def read(self) -> list[int]:
        """The slots whose states are read; all others hold NaN."""
        rows = zip(self.before, self.new, self.slots, strict=True)
        return [slot for before, new, slot in rows if before and new]


DELTA, CHANNELS, SPACE = Mixing(), Mixing(by_channel=True), Mixing("state_space")
CONVOLUTION = Mixing("causal_conv")
CASES = {"delta": DELTA, "channels": CHANNELS, "space": SPACE, "convolution": CONVOLUTION}


def make_batch(case: Mixing) -> StateBatch:
    """Returns the rows of a step."""
    new = np.array(case.new, np.int32)
    lengths, *rest = (jnp.asarray(x, jnp.int32) for x in (new + case.before, new, case.slots, case.to_slots))
    starts = jnp.asarray(np.cumsum(new) - new + 1, jnp.int32) if case.packed else None
    return StateBatch(
        rest[1], lengths, rest[0], starts, rest[2], jnp.asarray(case.snapshots, jnp.int32)[:, None], case.every
    )


def make_arrays(case: Mixing, seed: int = 0) -> dict[str, Any]:
    """Returns the mixer's arrays, random, with NaN in all that must not be read."""
    random = np.random.default_rng(seed)
    axes = (sum(case.new) + 4,) if case.packed else (len(case.new), max(1, *case.new))
    padding = np.ones(axes, bool)
    start = 1
    for row, count in enumerate(case.new):
        padding[slice(start, start + count) if case.packed else (row, slice(0, count))] = False
        start += count

    def tokens(*shape: int) -> jax.Array:
        x = random.standard_normal((*axes, *shape)).astype(np.float32)
        x[padding] = np.nan
        return jnp.asarray(x)

    heads, few = case.heads, case.keys or case.heads // 2
    inner = (2 * heads, 3, 128) if case.op == "causal_conv" else (heads, 16, 128)
    states = random.standard_normal((SLOTS, *inner)).astype(np.float32)
    states[[slot for slot in range(SLOTS) if slot not in case.read]] = np.nan
    if case.op == "causal_conv":
        channels, (of_tokens, of_states) = inner[0] * inner[2], case.dtypes
        weight, bias = (jnp.asarray(random.standard_normal(x), jnp.float32) for x in ((channels, 4), channels))
        return {"x": tokens(channels).astype(of_tokens), "weight": weight, "bias": bias,
                "states": jnp.asarray(states).astype(of_states)}  # fmt: skip
    if case.op == "state_space":
        arrays = {"x": tokens(heads, 16), "dt": jax.nn.softplus(tokens(heads)), "B": tokens(few, 128),
                  "C": tokens(few, 128), "A": -jnp.exp(jnp.asarray(random.standard_normal(heads), jnp.float32)),
                  "D": jnp.asarray(random.standard_normal(heads), jnp.float32)}  # fmt: skip
    else:
        gates = -3 * jax.nn.softplus(tokens(heads, 16) if case.by_channel else tokens(heads))
        arrays = {"q": tokens(few, 16), "k": tokens(few, 16) / 4, "v": tokens(heads, 128), "g": gates,
                  "beta": 2 * jax.nn.sigmoid(tokens(heads)), "scale": jnp.float32(0.3)}  # fmt: skip
        arrays["v"] = arrays["v"].astype(case.dtypes[0])
    return arrays | {"states": jnp.asarray(states)}


def expect(case: Mixing, arrays: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Returns the outputs and the states by the reference, of other arrays than the case's if given."""
    return _define(case)(make_arrays(case) if arrays is None else arrays)


@functools.cache
def _define(case: Mixing) -> Callable[..., Any]:
    return jax.jit(functools.partial(_run_reference, case))


def _run_reference(case: Mixing, arrays: dict[str, Any]) -> Any:
    return getattr(reference_mixers, case.op)(**arrays, **case.options, batch=make_batch(case))


def check(found: Any, case: Mixing, arrays: dict[str, Any] | None = None, tolerance: float = 2e-5) -> None:
    """Raises AssertionError unless outputs and states are the reference's, and what nobody wrote is as it was."""
    for x, wanted in zip(found, expect(case, arrays), strict=True):
        assert x.dtype == wanted.dtype
        near = max(tolerance, float(jnp.finfo(x.dtype).eps))
        x, wanted = (np.asarray(each.astype(jnp.float32)) for each in (x, wanted))
        np.testing.assert_allclose(x, wanted, rtol=near, atol=near)
