"""What a decoder's blocks get of their tokens, beside the residual stream."""

from typing import NamedTuple

import jax


class BlockTokens(NamedTuple):
    """What a block reads of its tokens themselves; None: nothing of it.

    Fields:
      ids: `i32[...]`, where blocks choose experts by them.
      own: the block's own embeddings, `[..., P]`.
    """

    ids: jax.Array | None = None
    own: jax.Array | None = None


NOTHING = BlockTokens()
