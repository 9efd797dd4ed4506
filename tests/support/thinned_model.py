"""A model of one attention layer and one with a window, small enough to be compiled often; and what a row of it that
gives tokens up must become, computed alone, its whole prompt at once."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._core.attention.query_capture import capture_queries
from jaxkv.scores import ada

VOCAB, LONGEST, HEADS, KV_HEADS, DIM = 61, 48, 4, 2, 4
_draw = np.random.default_rng(7)
EMBED = _draw.normal(size=(VOCAB, HEADS * DIM)).astype(np.float32)
PLACES = _draw.normal(size=(LONGEST, HEADS * DIM)).astype(np.float32)
QUERY, KEY, VALUE = (
    _draw.normal(size=(2, HEADS * DIM, n, DIM)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS)
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tiny:
    """Attends twice: to everything, and to a window."""

    windows: tuple[int | None, ...] = (None, 5)
    dtype: Any = "float32"

    @property
    def layer_configs(self):
        return tuple(jaxkv.LayerConfig(num_kv_heads=KV_HEADS, head_dim=DIM, window=window) for window in self.windows)

    def __call__(self, tokens, *, cache, logits_at):
        x = jnp.asarray(EMBED)[tokens] + jnp.asarray(PLACES)[jaxkv.positions(cache, tokens.shape)]
        for i in range(len(self.windows)):
            q, k, v = (jnp.tensordot(x, jnp.asarray(w[i]), axes=1) for w in (QUERY, KEY, VALUE))
            out, cache = jaxkv.attention(q, k, v, cache, layer=i)
            x = x + 3 * out.reshape(x.shape)
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True) * 4
        x = x[:, 0] if tokens.shape[1:] == (1,) else x[logits_at] if tokens.ndim == 1 else x[jnp.arange(1), logits_at]
        return x @ jnp.asarray(EMBED).T, cache


class Alone:
    """One row of a cache, thinned by hand."""

    def __init__(self, eviction, model, block_size=3):
        layers = eviction.layer_configs(model.layer_configs)
        sizes = dict(max_seqs=1, max_seq_len=LONGEST, num_blocks=LONGEST, block_size=block_size, dtype="float32")
        self.eviction, self.empty = eviction, jaxkv.init(jaxkv.CacheConfig(layers=layers, **sizes))
        self.layers = [i for i, layer in enumerate(layers) if layer.evict]

        @jax.jit
        def step(cache, tokens, count):
            with capture_queries() as found:
                logits, cache = model(tokens[None], cache=jaxkv.extend(cache, count[None]), logits_at=count - 1)
            return jnp.argmax(logits[0]), {i: found[i].q[0] for i in self.layers}, cache

        @functools.partial(jax.jit, static_argnames="layer")
        def evict(cache, budget, options, layer):
            score = eviction.score(cache, layer=layer, **options)
            budget = ada(score, budget) if eviction.budget == "ada" else budget[None]
            return jaxkv.evict(cache, scores=score, budget=budget, layer=layer)

        self.step, self.evict = step, evict

    def continuation(self, prompt, count, eos=None):
        """What the model adds to a prompt."""
        cache, given, out = self.empty, list(prompt), []
        past = {i: [] for i in self.layers}
        while len(out) < min(count, LONGEST - len(prompt)):
            padded = np.zeros(LONGEST, np.int32)  # one program
            padded[: len(given)] = given
            token, queries, cache = self.step(cache, padded, jnp.int32(len(given)))
            for i, q in queries.items():
                past[i] += list(np.asarray(q)[: len(given)])
            cache = self.thinned(cache, past, len(prompt))
            given = [int(token)]
            if given == [eos]:
                break
            out += given
        return out

    def thinned(self, cache, past, prompt):
        length, every = int(cache.lengths[0]), self.eviction.every
        if length != prompt and (every is None or (length - prompt) % every):
            return cache
        for i in self.layers:
            options = {}
            if most := self.eviction.num_queries(LONGEST):
                q = np.zeros((1, LONGEST, HEADS, DIM), np.float32)
                count = min(most, len(past[i]))
                q[0, :count] = past[i][-count:]
                options = dict(q=q, num_tokens=jnp.array([count]))
                past[i] = []
            budget = self.eviction.kept(cache.config, i)[length]
            cache = self.evict(cache, jnp.int32(budget), options, layer=i)
        return cache
