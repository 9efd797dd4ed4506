"""Converts ragged batches of other conventions to counts of tokens at the start of each row.

Others pad on the left, or carry a mask, segment ids or positions. A step here takes `counts i32[S]`, and padded tokens
`[S, T, ...]`, where row s uses the first `counts[s]` slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.attention_options import to_array
from jaxkv._core.config.validation import integer, show
from jaxkv._core.state.arguments import cast_int32, is_known, read_numbers


def counts(
    *,
    mask: Any = None,
    segment_ids: Any = None,
    positions: Any = None,
    max_seqs: int | None = None,
    check: bool = False,
) -> jax.Array:
    """Computes the number of tokens of each row from a mask, segment ids or positions: give one of the three.

    Args:
      mask: `bool[S, T]` or integers, true for tokens. Tokens may stand anywhere in their row.
      segment_ids: `i32[S, T]`, 0 for padding; or packed `i32[N]`, where row s has the tokens of segment s + 1, with
        `max_seqs`.
      positions: `i32[S, T]`, -1 for padding: a row has as many tokens as its longest run that rises by one. Or packed
        `i32[N]`, with `max_seqs`: each run is a row. (Where one row ends at position p, the next must not go on at
        p + 1.)
      max_seqs: the rows of packed tokens.
      check: raise on holes: tokens of a row that are not contiguous. Outside of `jit` only.

    Returns:
      `i32[S]`.

    Raises:
      ValueError: none or several of the three, another shape, or with `check` a row with holes.

    >>> import jaxkv
    >>> jaxkv.counts(mask=[[0, 0, 1, 1], [1, 1, 1, 1]]).tolist()
    [2, 4]
    >>> jaxkv.counts(segment_ids=[1, 1, 2, 3, 3, 3, 0], max_seqs=4).tolist()
    [2, 1, 3, 0]
    >>> jaxkv.counts(positions=[[-1, 7, 8, 9], [0, 1, 0, 0]]).tolist()
    [3, 2]
    """
    named = {"mask": mask, "segment_ids": segment_ids, "positions": positions}
    given = {name: x for name, x in named.items() if x is not None}
    if len(given) != 1:
        what = f"{', '.join(given)} were given" if given else "none was"
        raise ValueError(f"counts takes one of mask, segment_ids and positions, but {what}.")
    ((name, x),) = given.items()
    x = _integers(name, x)
    if x.ndim == 1 and name != "mask":
        if max_seqs is None:
            raise ValueError(f"Packed {name} need max_seqs, the number of rows.")
        max_seqs = integer("max_seqs", max_seqs, least=1)
    elif x.ndim != 2:
        packed = "" if name == "mask" else ", or packed [N]"
        raise ValueError(f"{name} must be [S, T]{packed}, but its shape is {x.shape}.")
    elif max_seqs is not None:
        raise ValueError(f"max_seqs is for packed tokens; {name} of {x.shape[0]} rows need none.")
    row = _rows_of(name, x)  # of each token, from 1, 0 for none; in a padded row of each run
    if max_seqs is not None:
        found = jnp.sum(row[None] == jnp.arange(1, max_seqs + 1, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    elif name == "positions":
        runs = jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32)
        found = jnp.max(jnp.sum(row[:, None] == runs[None, :, None], axis=2, dtype=jnp.int32), axis=1, initial=0)
    else:
        found = jnp.sum(row != 0, axis=1, dtype=jnp.int32)
    if check:
        if isinstance(x, jax.core.Tracer):
            raise ValueError("check=True cannot be part of jit: holes are looked for on the host. Leave it out there.")
        _check_holes(name, np.asarray(x), max_seqs)
    return found


def left_align(x: Any, counts: Any) -> jax.Array:
    """Converts rows padded on the left to rows padded on the right: `[S, T, ...]` both.

    `right_align` is the inverse. Counts that are known on the host must be from 0 to T.

    >>> import jaxkv
    >>> jaxkv.left_align([[0, 0, 5, 6], [1, 2, 3, 4]], [2, 4]).tolist()
    [[5, 6, 0, 0], [1, 2, 3, 4]]
    """
    return _roll(x, counts, jnp.negative)


def right_align(x: Any, counts: Any) -> jax.Array:
    """Converts rows padded on the right to rows padded on the left: the inverse of `left_align`.

    >>> import jaxkv
    >>> jaxkv.right_align([[5, 6, 0, 0], [1, 2, 3, 4]], [2, 4]).tolist()
    [[0, 0, 5, 6], [1, 2, 3, 4]]
    """
    return _roll(x, counts, jnp.positive)


def last(x: Any, counts: Any) -> jax.Array:
    """Returns the entry at each row's last token, `[S, ...]` of `[S, T, ...]`; 0 for a row without tokens.

    It is for padded tokens. Of packed ones, `x[jnp.maximum(jnp.cumsum(counts) - 1, 0)]` are the last; those of rows
    without tokens mean nothing.

    >>> import jaxkv
    >>> jaxkv.last([[5, 6, 0, 0], [1, 2, 3, 4], [9, 9, 9, 9]], [2, 4, 0]).tolist()
    [6, 4, 0]
    """
    x, counts = _rows(x, counts, ": of packed tokens, x[cumsum(counts) - 1] are the last ones")
    if not x.shape[1]:
        return jnp.zeros((x.shape[0], *x.shape[2:]), x.dtype)
    places = jnp.clip(counts - 1, 0, x.shape[1] - 1)
    found = x[jnp.arange(x.shape[0], dtype=jnp.int32), places]
    return jnp.where(jnp.expand_dims(counts > 0, range(1, found.ndim)), found, jnp.zeros((), x.dtype))


def _roll(x: Any, counts: Any, direction: Any) -> jax.Array:
    """Rolls each row by the number of its tokens, in the given direction."""
    x, counts = _rows(x, counts)
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None] + direction(counts)[:, None]
    index = jnp.mod(place, max(x.shape[1], 1))
    return x[jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], index]


def _rows(x: Any, counts: Any, packed: str = "") -> tuple[jax.Array, jax.Array]:
    """Returns both as arrays, checked. Raises ValueError, with `packed`: what does the same for packed tokens."""
    x, given = to_array("x", x), read_numbers("counts", counts)
    counts = _integers("counts", given)
    if x.ndim < 2 or counts.shape != x.shape[:1]:
        raise ValueError(
            f"x must be [S, T, ...] and counts [S], but their shapes are {x.shape} and {counts.shape}{packed}."
        )
    if is_known(given):
        wrong = np.flatnonzero((given < 0) | (given > x.shape[1]))
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"counts must be from 0 to {x.shape[1]}, the slots of a row, but row {row} has "
                f"{show(given[row].item())}."
            )
    return x, counts


def _integers(name: str, x: Any) -> jax.Array:
    x = read_numbers(name, x)
    if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool):
        raise ValueError(f"{name} must be integers, not {x.dtype}.")
    return cast_int32(x)


def _rows_of(name: str, x: jax.Array) -> jax.Array:
    """Returns the number of each token's row, from 1, and 0 for padding; for positions the number of its run."""
    if name != "positions":
        return x
    before = jnp.concatenate([jnp.full_like(x[..., :1], -2), x[..., :-1]], axis=-1)
    begins = (x != -1) & ((x != before + 1) | (before == -1))
    return jnp.where(x == -1, 0, jnp.cumsum(begins.astype(jnp.int32), axis=-1))


def _check_holes(name: str, x: np.ndarray, max_seqs: int | None) -> None:
    """Raises if the tokens of a row are not contiguous."""
    if x.ndim == 1:  # each row is one run by what it is; ids must rise
        ids = x[x != 0] if name == "segment_ids" else np.zeros(0, np.int32)
        wrong = np.flatnonzero(np.diff(ids) < 0)
        if wrong.size or (x[np.argmax(x == 0) :] if name == "segment_ids" and (x == 0).any() else ids[:0]).any():
            raise ValueError(
                "Packed segment_ids must rise from row to row and end in padding: the tokens of a row stand together."
            )
        if ids.size and ids.max() > (max_seqs or 0):
            raise ValueError(f"segment_ids go up to {ids.max()}, but max_seqs is {max_seqs}.")
        return
    is_token = x != (-1 if name == "positions" else 0)
    begins = is_token & ~np.pad(is_token, ((0, 0), (1, 0)))[:, :-1]
    rows = np.flatnonzero(begins.sum(axis=1) > 1)
    if name == "positions":
        steps = is_token[:, 1:] & is_token[:, :-1] & (np.diff(x, axis=1) != 1)
        rows = np.union1d(rows, np.flatnonzero(steps.any(axis=1)))
    if name == "segment_ids":
        several = [r for r, ids in enumerate(x) if len(set(ids[ids != 0].tolist())) > 1]
        rows = np.union1d(rows, several)
    if rows.size:
        raise ValueError(
            f"Row {int(rows[0])} of {name} has holes: the tokens of a row must stand together, as one segment."
        )
