"""Rows that hold fewer tokens than they have queries, as what is left of rows whose last tokens are read elsewhere.

Query i of a row is at position `lengths - new + i`. Where that is negative, it sees nothing: 0, and an LSE of -inf.
"""

import functools

import jax
import numpy as np
from numpy_attention import attention

from pallas_kernels import testing
from pallas_kernels.testing import Case, Inputs


def draw_case(seed: int, edges: tuple[int, ...], *, count: int | None = None, longest: int = 0, **fields) -> Case:
    """Draws the order of rows of `longest` queries, of which the first sits at minus 1, minus each of the edges and the
    numbers beside it, or before all keys, and of decode rows, of rows of few queries and of none.

    Args:
      edges: such as a block's tokens, and those of a tile of queries.
      count: of the rows that are drawn; None: all.
      longest: default: two more than the largest of `edges`.
    """
    longest = longest or max(edges) + 2
    lags = {1, *(edge + n for edge in edges for n in (-1, 0, 1))}
    rows = [(max(longest - lag, 0), longest) for lag in sorted(lags)]
    rows += [(0, longest), (1, longest), (longest + min(edges) + 3, longest)]
    rows += [(0, 1), (1, 1), (min(edges) + 5, 1), (0, 3), (2, 3), (0, 0), (min(edges) - 1, 0)]
    lengths, new = zip(*np.random.default_rng(seed).permutation(rows)[:count].tolist(), strict=True)
    return Case(lengths, new, **fields)


def make_inputs(case: Case, kind: str | None = None, seed: int = 0) -> tuple[Inputs, dict, Inputs]:
    """Returns inputs, options of a pool that is stored in a kind, and the inputs with what it decodes to. All that no
    query of its row may read is NaN, the null block too."""
    inputs = testing.hide_unseen(case, testing.make_inputs(case, seed))
    if kind is None:
        return inputs, {}, inputs
    inputs, scale, held = testing.quantise(case, inputs, kind)
    return inputs, {"kv_scale": scale, "kind": kind}, held


def check(attend, case: Case, kind: str | None = None, *, seed: int = 0, with_lse: bool = True) -> None:
    """Compares `attend(*inputs, **options)` with NumPy."""
    inputs, stored, held = make_inputs(case, kind, seed)
    options = testing.make_options(case, seed)
    found = attend(*inputs, **options, **stored, return_lse=with_lse)
    out, lse = found if with_lse else (found, None)
    wanted, wanted_lse = attention(*held, **options)
    testing.assert_close(out, wanted)
    assert not np.asarray(out, np.float32)[np.isneginf(wanted_lse)].any()
    if lse is not None:
        testing.assert_close(lse, wanted_lse, dtype=case.dtype)


def run_jitted(function, *inputs, **options):
    """Calls a function as one program; options that are no arrays are part of it."""
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    others = {name: x for name, x in options.items() if name not in arrays}
    return jax.jit(functools.partial(function, **others))(*inputs, **arrays)
