"""What codes of a few bits stand for, and the scale by which a group of numbers is nearest to that.

Levels lie closer around 0, as the numbers of a rotated head do: of normal numbers they lose least (Lloyd, Max). They
are a cubic of the code, so no table is read. A kernel that multiplies in 16 bits rounds the sum and the product, at
most half a percent of a level. Of eight scales a group takes the one that loses least.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

SCALE_PARTS = 20


@dataclasses.dataclass(frozen=True)
class Levels:
    """Codes from `-2 ** (bits - 1)` on, and the level of each: `h (h^2 + cubic)`, with `h` the code and a half.

    Scales are chosen by whole numbers, parts, of which the last level of the scale that is tried is `SCALE_PARTS` times
    `last_parts`, or fewer. So sums of squared errors are exact, whatever their order.

    >>> FOUR_BITS.read(jnp.array([-8, -1, 0, 7])).tolist()
    [-1471.875, -70.125, 70.125, 1471.875]
    """

    bits: int
    cubic: int  # what is added to the square of a code and a half
    scales_tried: range  # in parts, of `SCALE_PARTS`, of the scale by which a group's largest number is the last level
    last_parts: int = 126

    @functools.cached_property
    def above_0(self) -> tuple[float, ...]:
        """The levels above 0; those below are the same."""
        return tuple(half * (half * half + self.cubic) for half in (n + 0.5 for n in range(2 ** (self.bits - 1))))

    @property
    def last(self) -> float:
        """What the largest number of a group becomes."""
        return self.above_0[-1]

    @functools.cached_property
    def bars(self) -> tuple[float, ...]:
        """Above each the next level is the nearest."""
        return tuple((low + high) / 2 for low, high in itertools.pairwise(self.above_0))

    @property
    def part(self) -> float:
        """How much of a level a part is."""
        return self.last / self.last_parts

    @functools.cached_property
    def units_tried(self) -> np.ndarray:
        """A level of 1 of each scale that is tried, in parts."""
        return np.array(self.scales_tried, np.float32) / np.float32(self.part)

    def find_codes(self, x: jax.Array) -> jax.Array:
        """Returns `i32[...]`: the code whose level is nearest, counted from 0 upwards and from -1 downwards."""
        above = self._count_below(jnp.abs(x), np.float32(1))
        return jnp.where(x < 0, ~above, above)

    def read(self, code: jax.Array) -> jax.Array:
        """Returns the levels of codes, in float32, which holds them exactly."""
        half = code.astype(jnp.float32) + 0.5
        return half * (half * half + float(self.cubic))

    def count_parts(self, size: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns sizes in whole parts, for the scale by which the largest is the last level."""
        return jnp.round(size / scale * float(SCALE_PARTS / self.part))

    def lose(self, parts: jax.Array, unit: jax.Array | np.ndarray | np.float32) -> jax.Array:
        """Returns by how many parts the levels miss that are multiplied by a unit, one of `units_tried`."""
        return jnp.round(self.read(self._count_below(parts, unit)) * unit) - parts

    def pick(self, parts: jax.Array, unit: np.float32) -> jax.Array:
        """Returns the level that is nearest to each size, in whole parts, for a unit that is known beforehand: `lose`
        in fewer operations."""
        first, *others = (np.round(np.float32(level) * unit) for level in self.above_0)
        found = jnp.full_like(parts, first)
        for bar, level in zip(self.bars, others, strict=True):
            found = jnp.where(parts > np.float32(bar) * unit, level, found)
        return found

    def choose_scale(self, parts: jax.Array, is_entry: jax.Array) -> jax.Array:
        """Returns what loses least, the first of several, of `scales_tried`: `f32[...]`, by which the scale of groups
        `[..., entries]` is multiplied."""
        at_once, in_turn = self.find_least_at_once, self.find_least_in_turn
        best = jax.lax.platform_dependent(parts, is_entry, cpu=in_turn, default=at_once)
        return (best + self.scales_tried[0]).astype(jnp.float32) / float(SCALE_PARTS)

    def find_least_at_once(self, parts: jax.Array, is_entry: jax.Array) -> jax.Array:
        """Returns, of groups `[..., entries]`, which of `units_tried` loses least, the first of several: `i32[...]`."""
        units = self.units_tried.reshape(*[1] * (parts.ndim - 1), -1, 1)
        lost = self.lose(parts[..., None, :], units)
        return jnp.argmin((lost * lost * is_entry[..., None, :]).sum(axis=-1), axis=-1).astype(jnp.int32)

    def find_least_in_turn(self, parts: jax.Array, is_entry: jax.Array) -> jax.Array:
        """Returns the same, trying one after another. At once, XLA for CPUs writes what all of them lose to memory: of
        the new keys and values of a prompt 35 times their bytes, in twice the time."""

        def compare(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            best, least = found
            lost = self.lose(parts, jnp.asarray(self.units_tried)[i])
            lost = (lost * lost * is_entry).sum(axis=-1)
            return jnp.where(lost < least, i, best), jnp.minimum(lost, least)

        zero = jnp.sum(parts[..., :1] * 0, axis=-1)  # of the shards of `parts`, as a loop's arrays must be
        begin = zero.astype(jnp.int32), zero + jnp.inf
        return jax.lax.fori_loop(0, len(self.units_tried), compare, begin)[0]

    def _count_below(self, size: jax.Array, unit: jax.Array | np.ndarray | np.float32) -> jax.Array:
        """Returns the code, from 0 on, of the level above 0 that is nearest to `size / unit`."""
        return functools.reduce(jnp.add, ((size > bar * unit).astype(jnp.int32) for bar in self.bars))


# Which cubic, and which scales are tried: of normal numbers these lose least, in groups of 32 and of 64.
FOUR_BITS = Levels(4, 140, range(17, 25))
FIVE_BITS = Levels(5, 500, range(17, 25))
THREE_BITS = Levels(3, 40, range(15, 23), last_parts=63)
