"""Layers that keep a state on the chip: the kernel's numbers against the reference's, and decode against a copy.

A decode step reads and writes the states of all rows once, as a copy in place of as many bytes does.
"""

import dataclasses
import functools
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_states_peer
import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Contender

from pallas_kernels import reference_mixers
from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.gpu import mixers
from pallas_kernels.xla import mixers as xla_mixers

IN_TURN = 500e6  # bytes of pools that one call after another goes round, for the L2 cache's sake


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer: a delta rule with a gate a head or a channel, or a state space."""

    op: str = "gated_delta_rule"
    heads: int = 32
    groups: int = 16  # heads of keys
    keys: int = 128
    values: int = 128
    channels: bool = False

    @property
    def state(self) -> tuple[int, int, int]:
        """Of a row."""
        last = (self.keys, self.values) if self.op == "gated_delta_rule" else (self.values, self.keys)
        return self.heads, *last

    def arrays(self, axes: tuple[int, ...], key: jax.Array, dtype: Any = jnp.bfloat16) -> dict[str, jax.Array]:
        """Random arrays of tokens."""
        keys = iter(jax.random.split(key, 8))

        def draw(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32)

        of_keys, of_values = (*axes, self.groups, self.keys), (*axes, self.heads, self.values)
        rate = jax.nn.softplus(draw(*axes, self.heads))
        if self.op == "state_space":
            tokens = {"x": draw(*of_values), "B": draw(*of_keys), "C": draw(*of_keys)}
            rest = {"dt": rate, "A": -jnp.exp(draw(self.heads)), "D": draw(self.heads)}
        else:
            unit = draw(*of_keys)
            unit /= jnp.linalg.norm(unit, axis=-1, keepdims=True)
            tokens = {"q": draw(*of_keys), "k": unit, "v": draw(*of_values)}
            gates = jax.nn.softplus(draw(*axes, self.heads, self.keys)) if self.channels else rate
            rest = {"g": -gates, "beta": jax.nn.sigmoid(draw(*axes, self.heads)), "scale": jnp.float32(self.keys**-0.5)}
        return {name: x.astype(dtype) for name, x in tokens.items()} | rest


LAYERS = {
    "qwen3-next": Shape(),
    "kimi-linear": Shape(groups=32, channels=True),
    "nemotron-h": Shape("state_space", heads=128, groups=8, values=64),
}
# Tokens of rows, as an engine sends them.
STEPS = {"": (1,) * 32, "-prompt": (2048,), "-mixed": (1,) * 31 + (225,), "-prompts": (1024,) * 8}


def check_states(nth: int, interpret: Any) -> dict[str, Any]:
    """Compares one random step of small layers and few tokens with the reference."""
    chosen = random.Random(nth)
    small = chosen.choice((Shape(heads=2, groups=1, keys=16, values=64), Shape(heads=2, groups=2, channels=True)))
    space = Shape("state_space", heads=4, groups=2, keys=chosen.choice((32, 128)), values=chosen.choice((16, 64)))
    if interpret is not None:
        return compare_step(dataclasses.replace(space, keys=32, values=16), [2, 1], chosen, interpret)
    rows, most = chosen.choice((1, 4, 40)), chosen.choice((1, 1, 3))
    return compare_step(chosen.choice((small, space)), [chosen.randint(0, most) for _ in range(rows)], chosen)


def check_chunks(nth: int, interpret: Any) -> dict[str, Any]:
    """Compares one random step with the reference whose rows have many tokens, one or none: of each kind of layer in
    turn."""
    chosen = random.Random(nth)
    shape = CHUNKED[nth % len(CHUNKED)]
    if interpret is not None:  # as rows of few go
        return compare_step(dataclasses.replace(shape, heads=2, groups=1), [2, 0], chosen, interpret)
    most = chosen.choice((20, 70, 200))
    rows = chosen.choice((1, 3, 12))
    new = [chosen.choice((0, 1, 9, chosen.randint(16, most), most)) for _ in range(rows)]
    return compare_step(shape, [*new, most], chosen)


CHUNKED = (
    Shape(heads=4, groups=4, channels=True),
    Shape(heads=4, groups=2),
    Shape("state_space", heads=4, groups=2, keys=128, values=64),
)


def compare_step(shape: Shape, new: list[int], chosen: random.Random, interpret: Any = None) -> dict[str, Any]:
    """Compares a step with the reference, padded or packed: rows of other slots, and NaN where nobody reads."""
    rows, packed = len(new), chosen.random() < 0.5
    new[0] = max(new[0], 1)
    query_lens = np.array(new)
    lengths = query_lens + np.array([chosen.choice((0, 9)) for _ in range(rows)]) * (query_lens > 0)
    # Some rows read a slot that the last of them writes, as rows that were forked do.
    slots = np.array([chosen.choice((1, 2, 3 + row)) for row in range(rows)])
    last = {int(slot): row for row, slot in enumerate(slots) if new[row]}
    to = np.array([slot if last.get(int(slot)) == row else 3 + rows + row for row, slot in enumerate(slots)])
    ints = (jnp.asarray(x, jnp.int32) for x in (slots, lengths, query_lens))
    batch = StateBatch(*ints, None, jnp.asarray(to, jnp.int32))
    key, stored = jax.random.key(chosen.randrange(2**31)), chosen.choice((jnp.float32, jnp.float32, jnp.bfloat16))
    read = np.isin(np.arange(3 + 2 * rows), slots[(query_lens > 0) & (lengths > query_lens)])
    held = jnp.where(read[:, None, None, None], jax.random.normal(key, (read.size, *shape.state)), jnp.nan)
    axes = (sum(new) + chosen.choice((0, 5)),) if packed else (rows, max(new))
    arrays = shape.arrays(axes, key) | {"states": held.astype(stored)}
    ours = functools.partial(getattr(mixers, shape.op), batch=batch, interpret=interpret)
    y, states = jax.jit(lambda arrays: ours(**arrays))(arrays)
    wanted, expected = getattr(reference_mixers, shape.op)(**arrays, batch=batch)
    for found, right, error in ((y, wanted, 0.02), (states, expected, 1e-4 if stored == jnp.float32 else 0.02)):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, right)), rtol=error, atol=error)
    return {"agrees": True}


def make_batch(new: Sequence[int]) -> StateBatch:
    """Returns rows of so many tokens behind 50 others, each with a slot of its own."""
    row, query_lens = jnp.arange(len(new), dtype=jnp.int32), jnp.asarray(new, jnp.int32)
    return StateBatch(row + 1, 50 + query_lens, query_lens, None, row + 1)


def token_axes(new: Sequence[int]) -> tuple[int, ...]:
    """Returns the token axes of such rows: padded, or packed where rows differ."""
    return (len(new), new[0]) if len(set(new)) == 1 else (sum(new),)


def steps_of(shape: Shape, new: Sequence[int], interpret: Any) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Who takes part in a step of rows of so many tokens: this library's kernels, those of many tokens with a gate a
    channel once more token by token, XLA, and in decode a copy in place."""
    rows, tokens = len(new), max(new)
    size = rows * int(np.prod(shape.state)) * 4
    pools, expected = min(8, max(2, -(-int(IN_TURN) // size))), 2 * size / 2e12 + tokens * 1e-6 + 10e-6
    if interpret is not None:
        pools, expected = 1, 1.0
    key, batch = jax.random.key(0), make_batch(new)

    def prepare(step: Callable[[dict[str, jax.Array]], Any]) -> Contender:
        step = jax.jit(step)  # traced and lowered once for all pools

        @functools.partial(jax.jit, donate_argnums=0)
        def steps(held: list[jax.Array], arrays: dict[str, jax.Array]) -> Any:
            name, gate = ("x", "dt") if shape.op == "state_space" else ("v", "g")
            for i, states in enumerate(held):  # each waits for the one before, as layers do
                y, held[i] = step(arrays | {"states": states})
                arrays = arrays | {name: arrays[name] + y}
                if tokens > 1:  # or what needs no state would be computed once for all
                    arrays |= {gate: arrays[gate] + 1e-9 * y.ravel()[0]}
            return held, arrays[name]

        arrays = shape.arrays(token_axes(new), key)
        held = [[jax.random.normal(key, (rows + 1, *shape.state), jnp.float32) for _ in range(pools)]]

        def run() -> Any:
            held[0], y = steps(held[0], arrays)
            return held[0], y

        return Contender(run, pools, expected)

    def on(module: Any, **options: Any) -> Callable[[dict[str, jax.Array]], Any]:
        return lambda arrays: getattr(module, shape.op)(**arrays, batch=batch, **options)

    def prepare_peer() -> Contender:
        arrays = shape.arrays(token_axes(new), key)
        held = [jax.random.normal(key, (rows + 1, *shape.state), jnp.float32) for _ in range(pools)]
        return gpu_states_peer.prepare_steps(arrays, held, batch, new, expected)

    yield "ours", lambda: prepare(on(mixers, interpret=interpret))
    if tokens > 1 and shape.channels:  # as queries of float32 go
        by_token = on(mixers, interpret=interpret)
        yield (
            "token by token",
            lambda: prepare(lambda arrays: by_token(arrays | {"q": arrays["q"].astype(jnp.float32)})),
        )
    if shape.op == "gated_delta_rule" and importlib.util.find_spec("fla"):
        yield gpu_states_peer.NAME, prepare_peer
    yield "xla", lambda: prepare(on(xla_mixers))
    if tokens == 1:
        yield "copy in place", lambda: prepare(lambda arrays: (jnp.zeros((), jnp.bfloat16), arrays["states"] * 1.0001))


def measure_step(shape: Shape, rows: int, prepare: Callable[[], Contender]) -> dict[str, float]:
    """Returns the seconds of a step, and the bytes of states that it reads and writes in a second."""
    seconds = prepare().seconds()
    return {"seconds": seconds, "bytes_per_second": 2 * rows * int(np.prod(shape.state)) * 4 / seconds}
