"""Softmaxes in the making: what a loop keeps of each token, and how parts of a context are merged."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A logit that is not seen. Finite, so that only an LSE is ever infinite, and exp(MASKED - any other) is 0.
MASKED = float(np.finfo(np.float32).min)


class PartialSoftmax(NamedTuple):
    """A softmax in the making, in float32: its value is `values / total`."""

    top: jax.Array  # [..., H]: the largest logit so far, MASKED before the first
    values: jax.Array  # [..., H, D]: the sum of exp(logit - top) * value
    total: jax.Array  # [..., H]: the sum of exp(logit - top)


class RunningSoftmax(NamedTuple):
    """The softmaxes of a step's tokens while loops add to them. Tokens lie side by side in each KV head: a tile is a
    window, which may reach into the tokens of the next rows. Those see nothing in the tile, and stay as they are."""

    both: jax.Array  # f32[K, 2 * room * G]: tops, and behind them totals; each array of a loop is copied once a layer
    values: jax.Array  # f32[K, room * G, D]

    @property
    def size(self) -> int:
        """The number of tops of a KV head."""
        return self.values.shape[1]

    def select(self, num_tokens: int, num_heads: int) -> PartialSoftmax:
        """Returns the softmaxes of the first tokens."""
        group = num_heads // self.values.shape[0]

        def pick(x: jax.Array) -> jax.Array:  # [K, room * G, ...]
            x = x.reshape(x.shape[0], -1, group, *x.shape[2:])[:, :num_tokens]
            return jnp.moveaxis(x, 0, 1).reshape(num_tokens, num_heads, *x.shape[3:])

        return PartialSoftmax(pick(self.both[:, : self.size]), pick(self.values), pick(self.both[:, self.size :]))


def finite_top(top: jax.Array) -> jax.Array:
    """Returns the number that is subtracted from logits with maximum `top`."""
    return jnp.where(top <= MASKED, 0.0, top)


def merge_softmaxes(a: PartialSoftmax, b: PartialSoftmax) -> PartialSoftmax:
    """Returns the softmax over what either has seen."""
    top = jnp.maximum(a.top, b.top)
    reference = finite_top(top)
    x, y = jnp.exp(a.top - reference), jnp.exp(b.top - reference)

    def both(of_a: jax.Array, of_b: jax.Array) -> jax.Array:
        minor = range(top.ndim, of_a.ndim)
        return of_a * jnp.expand_dims(x, minor) + of_b * jnp.expand_dims(y, minor)

    return PartialSoftmax(top, *map(both, a[1:], b[1:]))


def merge_in_order(
    running: RunningSoftmax, at: jax.Array, items: PartialSoftmax, is_token: jax.Array
) -> RunningSoftmax:
    """Merges items into the windows `at` one after another, so that the result depends on their order alone. An item
    that sees nothing changes no bit, nor do the places of a window that are no tokens of its item."""

    def merge(j, running: RunningSoftmax) -> RunningSoftmax:
        item, mine = jax.tree.map(lambda x: x[j], items), is_token[j]
        (num_kv_heads, width), minor = item.top.shape, item.values.shape[2:]
        top_at, total_at, values_at = (0, at[j]), (0, at[j] + running.size), (0, at[j], 0)
        have = PartialSoftmax(
            jax.lax.dynamic_slice(running.both, top_at, (num_kv_heads, width)),
            jax.lax.dynamic_slice(running.values, values_at, (num_kv_heads, width, *minor)),
            jax.lax.dynamic_slice(running.both, total_at, (num_kv_heads, width)),
        )
        top, values, total = jax.tree.map(
            lambda new, old: jnp.where(mine if new.ndim == 2 else mine[..., None], new, old),
            merge_softmaxes(have, item),
            have,
        )
        both = jax.lax.dynamic_update_slice(running.both, top, top_at)
        return RunningSoftmax(
            jax.lax.dynamic_update_slice(both, total, total_at),
            jax.lax.dynamic_update_slice(running.values, values, values_at),
        )

    return jax.lax.fori_loop(0, at.shape[0], merge, running)
