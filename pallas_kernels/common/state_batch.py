"""The rows of a step over a pool of states: which slot each row reads and writes, and which tokens are its own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.ragged_layout import default_offsets, locate


class StateBatch(NamedTuple):
    """Rows, their slots and their tokens. Packed tokens begin at `query_starts`; padded ones at `row * T`."""

    slots: jax.Array  # i32[S]: the slot that holds a row's state before the step
    kv_lens: jax.Array  # i32[S]: tokens of each row, this step's included
    query_lens: jax.Array  # i32[S]: this step's tokens among them
    query_starts: jax.Array | None = None  # i32[S]
    to_slots: jax.Array | None = None  # i32[S]: the slot that takes the state after the step; None: `slots`
    snapshot_slots: jax.Array | None = None  # i32[S, n]: the slots that take states on the way; -1: none
    every: int | None = None  # tokens between these states

    @property
    def begins(self) -> jax.Array:
        """`bool[S]`: rows that had no token before this step, and whose state is 0 whatever their slot holds."""
        return self.kv_lens == self.query_lens

    @property
    def starts(self) -> jax.Array:
        """`i32[S]`: the position of each row's first token of this step."""
        return self.kv_lens - self.query_lens

    def targets(self, num_slots: int) -> jax.Array:
        """Returns `i32[S]`, the slot that each row writes; past the end, so that nothing is, without tokens."""
        slots = self.slots if self.to_slots is None else self.to_slots
        return jnp.where((self.query_lens > 0) & (slots >= 0), slots, num_slots)

    @property
    def may_meet(self) -> bool:
        """Whether a row may write a slot that another reads; else rows that have tokens have slots of their own."""
        return self.to_slots is not None or self.snapshot_slots is not None

    def reads(self, num_slots: int) -> jax.Array:
        """Returns `i32[S]`, the slot that each row reads; -1: none."""
        return jnp.where((self.query_lens > 0) & ~self.begins, jnp.clip(self.slots, 0, num_slots - 1), -1)

    def writes(self, num_slots: int) -> jax.Array:
        """Returns `i32[S, n]`, the slots that each row may write; -1: none."""
        target = self.targets(num_slots)
        found = jnp.where(target < num_slots, target, -1)[:, None]
        if self.snapshot_slots is not None:
            found = jnp.concatenate([found, self.snapshot_slots], axis=1)
        return jnp.where((self.query_lens > 0)[:, None], found, -1)

    def snapshot_targets(self, number: jax.Array, taken: jax.Array, num_slots: int) -> jax.Array:
        """Returns the slots `i32[S, ...]` of each row's snapshots of a `number`, where `taken`; else past the end."""
        if self.snapshot_slots is None:
            return jnp.full(number.shape, num_slots, jnp.int32)
        flat = number.reshape(number.shape[0], -1)
        width = self.snapshot_slots.shape[1]
        slots = jnp.take_along_axis(self.snapshot_slots, jnp.clip(flat, 0, width - 1), axis=1).reshape(number.shape)
        return jnp.where(taken & (number >= 0) & (number < width) & (slots >= 0), slots, num_slots)

    def flatten(self, token_axes: tuple[int, ...]) -> "StateBatch":
        """Returns the batch with the starts of the rows in the flattened tokens."""
        rows = self.query_lens.shape[0]
        if len(token_axes) == 2:
            return self._replace(query_starts=jnp.arange(rows, dtype=jnp.int32) * token_axes[1])
        return self if self.query_starts is not None else self._replace(query_starts=default_offsets(self.query_lens))


def find_meetings(reads: jax.Array, writes: jax.Array) -> jax.Array:
    """Returns `bool[S, S]`, whether a row reads what another one, of the second axis, writes.

    Args:
      reads, writes: of `StateBatch`.
    """
    row = jnp.arange(reads.shape[0], dtype=jnp.int32)
    earlier = row[None, :] < row[:, None]  # as a GPU's plan of turns has it: a launch less than to ask for other rows
    meets = (reads[:, None, None] == writes[None]).any(axis=2)
    return meets & (earlier | earlier.T) & (reads >= 0)[:, None]


def share_rows(batch: StateBatch, least: int, num_slots: int) -> tuple[StateBatch, StateBatch, jax.Array]:
    """Shares rows out to two kernels by their tokens of this step: in each one's batch the other's rows have none.

    Run the rows of few tokens first. Rows are served in order, and a row may write what an earlier one reads: where one
    of few tokens would write what one of many reads, all that write what others read go with the rows of many.

    Args:
      batch: packed, or flattened.
      least: how many tokens are many.

    Returns:
      The batch of the rows of few tokens, that of the rows of many, and which rows these are, `bool[S]`.
    """
    is_many = batch.query_lens >= least
    if batch.may_meet:
        meets = find_meetings(batch.reads(num_slots), batch.writes(num_slots))
        too_early = (meets & is_many[:, None] & ~is_many[None, :]).any()
        is_many |= meets.any(axis=0) & too_early
    few, many = (batch._replace(query_lens=jnp.where(own, batch.query_lens, 0)) for own in (~is_many, is_many))
    return few, many, is_many


def merge_rows(few: jax.Array, many: jax.Array, is_many: jax.Array, row: jax.Array) -> jax.Array:
    """Returns outputs `[.., H, V]` that come from two kernels; the tokens' rows, `i32[..]`, say which from where."""
    return jnp.where(expand(is_many[row], many.ndim), many, few)


class MixerForm(NamedTuple):
    """The arrays of a mixer, the one that shows the token axes first, and their axes, one letter or word each.

    `...` are the token axes, of which the other axes stand behind. An array may have one of several forms. A mesh
    divides the axis `heads`, and the fewer heads `shared` that those of `heads` share.
    """

    arrays: dict[str, tuple[str, ...]]
    heads: str = "H"
    shared: str | None = None
    optional: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # no state depends on them

    @property
    def shown(self) -> str:
        """The array that shows the token axes."""
        return next(iter(self.arrays))

    @property
    def inner(self) -> int:
        """How many axes it has behind them."""
        return len(self.arrays[self.shown][0].split()) - 1

    @property
    def token_arrays(self) -> set[str]:
        """The arrays that have token axes."""
        return {name for name, (form, *_) in self.arrays.items() if form.startswith("...")}

    @property
    def fixed(self) -> set[str]:
        """The arrays without token axes that states depend on."""
        return set(self.arrays) - self.token_arrays - {"states", *self.unread}

    @property
    def shared_arrays(self) -> list[str]:
        """The arrays of fewer heads, which others share."""
        return [name for name, (form, *_) in self.arrays.items() if self.shared in form.split()]

    def find_stand_in(self, name: str) -> str | None:
        """Returns an array of the same axes as one that is not read, if there is any."""
        read = [other for other in self.arrays if other in self.token_arrays and other not in self.unread]
        return next((other for other in read if self.arrays[other] == self.arrays[name]), None)

    def find_heads(self, name: str, num_axes: int) -> int:
        """Returns which axis of an array holds heads, or channels, behind `num_axes` token axes if it has these."""
        found = next(i for i, axis in enumerate(self.arrays[name][0].split()) if axis in (self.heads, self.shared))
        return found - 1 + num_axes if name in self.token_arrays else found


# All mixers, by the names of their doors.
MIXERS = {
    "causal_conv": MixerForm(
        {
            "x": ("... C",),
            "weight": ("C width",),
            "bias": ("C",),
            "states": ("slots C width-1", "slots groups width-1 channels"),
        },
        heads="C",
        optional=("bias",),
        unread=("weight", "bias"),
    ),
    "gated_delta_rule": MixerForm(
        {
            "v": ("... H V",),
            "k": ("... h K",),
            "q": ("... h K",),
            "g": ("... H", "... H K"),
            "beta": ("... H",),
            "states": ("slots H K V",),
        },
        shared="h",
        unread=("q",),
    ),
    "state_space": MixerForm(
        {
            "x": ("... H P",),
            "dt": ("... H",),
            "A": ("H",),
            "B": ("... G n",),
            "C": ("... G n",),
            "D": ("H", "H P"),
            "states": ("slots H P n",),
        },
        shared="G",
        optional=("D",),
        unread=("C", "D"),
    ),
}


class MixerCall(NamedTuple):
    """A call of a mixer, as the doors take it. For `explain` arrays may be shapes, and rows None."""

    op: str
    arrays: dict[str, Any]  # by their names at the door; without `slots` and the like
    options: dict[str, Any]
    batch: StateBatch

    @property
    def token_axes(self) -> tuple[int, ...]:
        """`(S, T)` or `(N,)`."""
        form = MIXERS[self.op]
        return self.arrays[form.shown].shape[: -form.inner]


def hide_padding(y: jax.Array, values: jax.Array, batch: StateBatch) -> jax.Array:
    """Returns outputs `[.., H, V]` in the dtype of the values, which have the same token axes, and 0 for padding."""
    valid = locate(values.shape[:-2], batch.kv_lens, batch.query_lens, batch.query_starts).valid
    return jnp.where(expand(valid, y.ndim), y, 0.0).astype(values.dtype)


def read_slots(states: jax.Array, batch: StateBatch) -> jax.Array:
    """Returns the states of all rows before the step, `f32[S, ...]`: 0 for rows that begin, or have no token."""
    idle = batch.begins | (batch.query_lens == 0)
    found = states.at[jnp.where(idle, 0, batch.slots)].get(mode="clip").astype(jnp.float32)
    return jnp.where(expand(idle, found.ndim), 0.0, found)


def expand(x: Any, ndim: int) -> jax.Array:
    """Returns an array with trailing axes of 1, `ndim` axes in all."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))
