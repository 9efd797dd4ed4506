"""A model of attention and recurrent layers that can be checked by hand, as `checksum_model` can.

Its recurrent layer sums up the same numbers as an attention layer would, so one token too many, too few or of another
row in a state shows, at once and without a tolerance.
"""

import dataclasses

import jax
import jax.numpy as jnp
from checksum_model import VOCAB, Checksum, weight

import jaxkv

WIDTH = 3  # of the convolution
SEEN = (None, WIDTH, None)  # what attention, convolution and state see: for `continuation`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hybrid(Checksum):
    """Answers for any tokens of a step. A draft of it is wrong every `wrong`th time; `by_hand`: its states are read and
    written by the model itself."""

    windows: tuple = SEEN
    wrong: int = 0
    by_hand: bool = False

    @property
    def layer_configs(self):
        states = {"conv": ((1, WIDTH - 1), "float32"), "state": ((1, 1, 1), "float32")}
        return jaxkv.LayerConfig(num_kv_heads=1, head_dim=1), jaxkv.LayerConfig.recurrent(**states)

    def __call__(self, tokens, *, cache, logits_at):
        token = jaxkv.plan_step(cache, tokens.shape).token
        at = (jnp.arange(tokens.shape[0]), logits_at) if tokens.ndim == 2 else logits_at
        row, end = token.row[at], token.position[at][:, None] + 1
        k, v = (x.astype(jnp.float32)[..., None, None] for x in (tokens, token.position))
        cache = jaxkv.write(cache, k, v, layer=0)
        rows, position = jnp.arange(cache.config.max_seqs)[:, None], jnp.arange(cache.config.max_seq_len)[None]
        k, v = (x[..., 0, 0].astype(jnp.int32)[row] for x in cache.read(0, rows, position))
        total = jnp.sum(jnp.where(position < end, (k + 1) * weight(0, v), 0), axis=1, dtype=jnp.int32)
        x = [((tokens + 1) * weight(i, token.position)).astype(jnp.float32)[..., None] for i in (1, 2)]
        conv, state, cache = (_sum_by_hand if self.by_hand else _sum_up)(*x, cache, token)
        total += (conv[at] + state[at]).astype(jnp.int32)
        if self.wrong:
            total += (total % self.wrong == 0).astype(jnp.int32)
        return jax.nn.one_hot(total % VOCAB, VOCAB), cache


def _sum_up(x, y, cache, token):
    """Returns, for each token, the sum of the last x and that of all y, by the library's mixers."""
    conv, cache = jaxkv.causal_conv(x, jnp.ones((1, WIDTH)), cache, 1)
    one, y = jnp.ones_like(y)[..., None], y[..., None]
    state, cache = jaxkv.state_space(y, one[..., 0], jnp.zeros(1), one, one, cache, 1)
    return conv[..., 0], state[..., 0, 0], cache


def _sum_by_hand(x, y, cache, token):
    """Returns what `_sum_up` does, from states that are read and written as arrays."""
    states = jaxkv.read_states(cache, layer=1)
    count = cache.config.max_seqs
    place = (jnp.where(token.valid, token.row, count), token.position)
    new, shape = cache.new > 0, (count, cache.config.max_seq_len)
    x, y = (jnp.zeros(shape).at[place].set(value[..., 0], mode="drop") for value in (x, y))
    begin = (cache.lengths - cache.new)[:, None]
    for i in range(WIDTH - 1):
        behind = begin + i - (WIDTH - 1)
        x = x.at[jnp.arange(count), jnp.where(behind >= 0, behind, shape[1])[:, 0]].set(
            states["conv"][:, 0, i], mode="drop"
        )
    conv = sum(jnp.pad(x, ((0, 0), (i, 0)))[:, : shape[1]] for i in range(WIDTH))
    state = jnp.cumsum(y, axis=1) + states["state"][:, 0, 0]
    last = cache.lengths[:, None] + jnp.arange(1 - WIDTH, 0)[None]
    kept = jnp.where(last >= 0, jnp.take_along_axis(x, jnp.maximum(last, 0), axis=1), 0)
    end = jnp.take_along_axis(state, jnp.maximum(cache.lengths - 1, 0)[:, None], axis=1)
    written = {"conv": jnp.where(new[:, None], kept, 0)[:, None], "state": end[..., None, None]}
    cache = jaxkv.write_states(cache, written, layer=1)
    return *(found.at[place].get(mode="fill", fill_value=0) for found in (conv, state)), cache
