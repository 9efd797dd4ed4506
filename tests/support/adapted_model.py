"""Models that can be checked by hand whose keys depend on adapters, and a hook that goes by all that it is told."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from checksum_model import VOCAB, Placed

import jaxkv


@functools.cache
def adapted(kind):
    """Returns the class of such a model that takes adapters."""

    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True)
    class Adapted(kind):
        """Its keys depend on the adapter, so that those of another give another token."""

        def __call__(self, tokens, *, cache, logits_at, adapters):
            assert adapters.shape == (cache.config.max_seqs,) and adapters.dtype == jnp.int32
            row = jaxkv.plan_step(cache, tokens.shape).token.row
            return super().__call__(tokens + 7 * adapters[row], cache=cache, logits_at=logits_at)

    return Adapted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacedAdapted(Placed):
    """A model that takes adapters and lies on devices of its own."""

    def __call__(self, tokens, *, cache, logits_at, adapters):
        tokens = tokens + 5 * self.weights.astype(jnp.int32)
        logits, cache = self.model(tokens, cache=cache, logits_at=logits_at, adapters=adapters)
        return logits + self.weights.astype(logits.dtype), cache


def move_by_all(logits, rows):
    """Moves the logits of each row by a sum over its tokens, where its output begins, its adapter and its numbers."""
    place = jnp.arange(rows.tokens.shape[1])[None]
    known = place < rows.lengths[:, None]
    total = jnp.where(known, (place + 3) * (rows.tokens + 1), 0).sum(axis=1)
    total += 5 * rows.prompt_lengths + 11 * rows.adapters
    if (args := rows.hook_args) is not None:
        moved, more = args
        total += 13 * moved
        logits = logits * (1 + more.astype(jnp.float32))[:, None]
    return jnp.take_along_axis(logits, (jnp.arange(VOCAB)[None] - total[:, None]) % VOCAB, axis=1)
