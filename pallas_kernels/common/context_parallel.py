"""Blocks of which a device holds a part: what lies where, as index arithmetic.

Every block is cut into `count` runs of `size` tokens, and a pool holds run `number` of each. So tables, lengths and
positions are those of whole rows, the same on every device, and a row's tokens go round the devices, run by run. What a
device holds of a row is a row of its own, of blocks of `size` tokens: writes, and reads that go by no positions, are
those of such a row, in whatever backend.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.ragged_layout import locate

# What goes by positions or by the places of whole rows, and cannot be said of the part of a row that is at hand.
POSITIONAL = ("window", "mask", "alibi", "spans", "tree", "chunk", "blocks", "sink_tokens", "shared")


def places_before(position: jax.Array, stripe: jax.Array, size: int) -> jax.Array:
    """How many of a row's tokens before `position`, which is not negative, are at hand.

    >>> places_before(jnp.arange(9), jnp.array([1, 2]), 2).tolist()
    [0, 0, 0, 1, 2, 2, 2, 3, 4]
    """
    number, whole = stripe[0].astype(position.dtype), stripe[1].astype(position.dtype) * size
    number, whole = (jnp.broadcast_to(x, position.shape) for x in (number, whole))
    return jax.lax.div(position, whole) * size + jnp.clip(jax.lax.rem(position, whole) - number * size, 0, size)


def position_of(block: jax.Array, offset: jax.Array, stripe: jax.Array, size: int) -> jax.Array:
    """The position of what lies at `offset` of the part of a row's logical block that is at hand."""
    return (block * stripe[1] + stripe[0]) * size + offset


def own_tokens(
    k: jax.Array, v: jax.Array | None, lengths, new, offsets, stripe: jax.Array, size: int
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:  # fmt: skip
    """A step's keys and values that are stored here, in the layout they came in, packed ones one row after another;
    and the lengths and new tokens of the rows that they belong to."""
    token_axes, before = k.shape[:-2], lengths - new
    own_lengths, own_before = (places_before(x, stripe, size) for x in (lengths, before))
    own_new = own_lengths - own_before
    token = locate(token_axes, own_lengths, own_new)
    place = position_of(token.position // size, token.position % size, stripe, size) - before[token.row]
    if len(token_axes) == 1:
        offsets = jnp.cumsum(new) - new if offsets is None else offsets
        at: Any = (jnp.clip(offsets[token.row] + place, 0, max(token_axes[0] - 1, 0)),)
    else:
        at = (token.row, jnp.clip(place, 0, max(token_axes[1] - 1, 0)))
    return k[at], None if v is None else v[at], own_lengths, own_new


def own_rows(lengths, new, stripe: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The lengths of rows as far as they are at hand, and how many queries read them: none where nothing is."""
    own = places_before(lengths, stripe, size)
    return own, jnp.where(own > 0, new, 0)


def reads_all(token_axes: Collection[int], arguments: dict[str, Any]) -> bool:
    """Whether every query of a step sees all of its row, so that no position matters."""
    decodes = len(token_axes) == 2 and tuple(token_axes)[1] == 1
    if not decodes and arguments.get("causal", True):
        return False
    return all(arguments.get(name) is None for name in POSITIONAL)
