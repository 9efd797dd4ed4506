"""Trees of tokens, as speculation proposes them: how deep each lies, and what stands above it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.ragged_layout import Tokens


class Tree(NamedTuple):
    """One entry per token place, flat."""

    depth: jax.Array  # i32[tokens]: how many ancestors it has; 0 for padding
    ancestors: jax.Array  # bool[tokens, W]: is the row's token of this step with this number one of them, or itself?


def climb(parents: jax.Array, token: Tokens, before: jax.Array, start: jax.Array, longest: int) -> Tree:
    """The tree that `parents` say.

    Args:
      parents: `i32[tokens]`, flat: a token's parent, counted from the row's first token of this step; anything that is
        no earlier one means the context.
      token: where they lie, flat.
      before, start: `i32[S]`: the position of each row's first token of this step, and its place among the tokens.
      longest: W, at least the tokens of any row.

    By doubling: after n rounds a token knows its nearest `2**n` ancestors. There is no loop, so that XLA computes what
    several layers ask for once.
    """
    number = jnp.where(token.valid, token.position - before[token.row], 0)
    has_parent = token.valid & (parents >= 0) & (parents < number)
    place = jnp.arange(parents.shape[0], dtype=jnp.int32)
    jump = jnp.where(has_parent, start[token.row] + parents, place)  # a root is its own parent
    depth = has_parent.astype(jnp.int32)
    ancestors = token.valid[:, None] & (number[:, None] == jnp.arange(longest, dtype=jnp.int32)[None])
    for _ in range((longest - 1).bit_length()):
        ancestors |= ancestors[jump]
        depth, jump = depth + depth[jump], jump[jump]
    return Tree(depth, ancestors)
