"""A model that can be checked by hand: each next token is a checksum of everything that its row holds.

So one stale, missing or foreign token shows, at once and without a tolerance.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv

VOCAB, LONGEST, WINDOW = 97, 48, 7


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Checksum:
    """Stores tokens as keys and their positions as values. The next token depends on all that its layers see: by their
    windows, those and so many first tokens, or ("chunk", n). `indexed`: the first layer's tokens are its index keys
    instead."""

    windows: tuple[Any, ...] = (None, WINDOW)
    dtype: Any = "float32"
    indexed: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def layer_configs(self):
        layers = [jaxkv.LayerConfig(num_kv_heads=1, head_dim=1, **see(window)) for window in self.windows]
        return (dataclasses.replace(layers[0], index_dim=1 if self.indexed else None), *layers[1:])

    def __call__(self, tokens, *, cache, logits_at):
        """One place for each row is asked for: its last."""
        values = jaxkv.positions(cache, tokens.shape)
        rows, position = jnp.arange(cache.config.max_seqs)[:, None], jnp.arange(LONGEST)[None]
        total = jnp.zeros(cache.config.max_seqs, jnp.int32)
        for layer, window in enumerate(self.windows):
            k, v = (x.astype(jnp.float32)[..., None, None] for x in (tokens, values))
            cache = jaxkv.write(cache, k, v, layer=layer)
            end = cache.lengths[:, None]
            k, v = read_tokens(cache, layer, rows, position, end)
            if self.indexed and layer == 0:
                cache = jaxkv.write_index(cache, tokens.astype(jnp.float32)[..., None], layer=0)
                block, offset = cache.slots(rows, position, layer=0)
                k = cache.pool(0).index.keys[block, 0, 0, offset, 0].astype(jnp.int32)
            seen = (position < end) & is_seen(position, end, window)
            total += jnp.sum(jnp.where(seen, (k + 1) * weight(layer, v), 0), axis=1, dtype=jnp.int32)
        return jax.nn.one_hot(total % VOCAB, VOCAB)[: logits_at.shape[0]], cache


def read_tokens(cache, layer, rows, position, end, row=slice(None)):
    """Returns the keys and values that queries of rows `row` see of a layer, those before `end`: the newest ones in its
    residual layer, where it has one."""

    def read(layer):
        return [x[..., 0, 0].astype(jnp.int32)[row] for x in cache.read(layer, rows, position)]

    stored, residual = read(layer), cache.config.residual_layer(layer)
    if residual is None:
        return stored
    is_newest = position >= end - cache.config.residual_length
    return [jnp.where(is_newest, new, old) for new, old in zip(read(residual), stored, strict=True)]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Latent(Checksum):
    """Stores tokens and positions in latent rows."""

    @property
    def layer_configs(self):
        return tuple(jaxkv.LayerConfig.latent(1, 1, window=window) for window in self.windows)

    def __call__(self, tokens, *, cache, logits_at):
        row = jnp.stack([tokens, jaxkv.positions(cache, tokens.shape)], axis=-1).astype(jnp.float32)[..., None, :]
        rows, position = jnp.arange(cache.config.max_seqs)[:, None], jnp.arange(LONGEST)[None]
        total = jnp.zeros(cache.config.max_seqs, jnp.int32)
        for layer, window in enumerate(self.windows):
            cache = jaxkv.write(cache, row, None, layer=layer)
            stored = cache.read(layer, rows, position)[0][..., 0, :].astype(jnp.int32)
            end = cache.lengths[:, None]
            seen = (position < end) & is_seen(position, end, window)
            values = (stored[..., 0] + 1) * weight(layer, stored[..., 1])
            total += jnp.sum(jnp.where(seen, values, 0), axis=1, dtype=jnp.int32)
        return jax.nn.one_hot(total % VOCAB, VOCAB)[: logits_at.shape[0]], cache


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Several(Checksum):
    """Answers for any tokens of a step, each by what stands before it; a draft of it is wrong every `wrong`th time.
    Numbers are stored `width` times, for formats of groups of numbers."""

    wrong: int = 0
    width: int = dataclasses.field(default=1, kw_only=True)
    formats: tuple[str | None, ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def layer_configs(self):
        layers = super().layer_configs
        formats = self.formats or (None,) * len(layers)
        return tuple(
            dataclasses.replace(layer, head_dim=self.width, dtype=dtype)
            for layer, dtype in zip(layers, formats, strict=True)
        )

    def __call__(self, tokens, *, cache, logits_at):
        token = jaxkv.plan_step(cache, tokens.shape).token
        at = (jnp.arange(tokens.shape[0]), logits_at) if tokens.ndim == 2 else logits_at
        row, end = token.row[at], token.position[at][:, None] + 1
        rows, position = jnp.arange(cache.config.max_seqs)[:, None], jnp.arange(cache.config.max_seq_len)[None]
        total = jnp.zeros(row.shape, jnp.int32)
        for layer, window in enumerate(self.windows):
            k, v = (x.astype(jnp.float32)[..., None, None] for x in (tokens, token.position))
            cache = jaxkv.write(cache, *(jnp.repeat(x, self.width, axis=-1) for x in (k, v)), layer=layer)
            k, v = read_tokens(cache, layer, rows, position, end, row)
            seen = (position < end) & is_seen(position, end, window)
            total += jnp.sum(jnp.where(seen, (k + 1) * weight(layer, v), 0), axis=1, dtype=jnp.int32)
        if self.wrong:
            total += (total % self.wrong == 0).astype(jnp.int32)
        return jax.nn.one_hot(total % VOCAB, VOCAB), cache


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sum(Checksum):
    """The next token goes by the sum of all tokens, of the last few and the position: by attention to them, which a
    tree's tokens must have of their own branch alone."""

    def __call__(self, tokens, *, cache, logits_at, step=None):
        step = jaxkv.plan_step(cache, tokens.shape) if step is None else step
        x, total = tokens.astype(jnp.float32)[..., None, None], jnp.zeros(tokens.shape, jnp.int32)
        for layer, window in enumerate(self.windows):
            mean, cache = jaxkv.attention(jnp.zeros_like(x), x, x, cache, layer=layer, step=step)
            count = jnp.minimum(step.positions + 1, window or LONGEST).astype(jnp.float32)
            total += jnp.round(mean[..., 0, 0] * count).astype(jnp.int32)
        total = total[:, 0] if tokens.ndim == 2 else total[logits_at]
        return jax.nn.one_hot(total % 3, VOCAB), cache


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Divided(Checksum):
    """Stores tokens and positions in each of `heads` heads, and reads all of them: of what devices share, none may
    miss."""

    heads: int = dataclasses.field(default=4, kw_only=True)

    @property
    def layer_configs(self):
        return tuple(dataclasses.replace(layer, num_kv_heads=self.heads) for layer in super().layer_configs)

    def __call__(self, tokens, *, cache, logits_at):
        values = jaxkv.positions(cache, tokens.shape)
        rows, position = jnp.arange(cache.config.max_seqs)[:, None], jnp.arange(LONGEST)[None]
        total = jnp.zeros(cache.config.max_seqs, jnp.int32)
        for layer, window in enumerate(self.windows):
            k, v = (jnp.repeat(x.astype(jnp.float32)[..., None, None], self.heads, -2) for x in (tokens, values))
            cache = jaxkv.write(cache, k, v, layer=layer)
            k, v = (x[..., 0].astype(jnp.int32) for x in cache.read(layer, rows, position))
            end = cache.lengths[:, None]
            seen = ((position < end) & is_seen(position, end, window))[..., None]
            total += jnp.sum(jnp.where(seen, (k + 1) * weight(layer, v), 0), axis=(1, 2), dtype=jnp.int32) // self.heads
        return jax.nn.one_hot(total % VOCAB, VOCAB)[: logits_at.shape[0]], cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """A `Checksum` that lies on devices of its own. Its weights are a number: its keys and logits depend on it."""

    weights: jax.Array
    model: Checksum = dataclasses.field(metadata={"static": True}, default=Checksum())

    @property
    def layer_configs(self):
        return self.model.layer_configs

    @property
    def dtype(self):
        return self.model.dtype

    def __call__(self, tokens, *, cache, logits_at):
        tokens = tokens + 5 * self.weights.astype(jnp.int32)
        logits, cache = self.model(tokens, cache=cache, logits_at=logits_at)
        return logits + self.weights.astype(logits.dtype), cache


def see(window):
    """Returns the options of a layer that sees so much."""
    if isinstance(window, tuple):
        return {"chunk": window[1]} if window[0] == "chunk" else {"window": window[0], "sink_tokens": window[1]}
    return {"window": window}


def is_seen(position, end, window):
    """Whether what comes behind `end` tokens sees a position before that."""
    if isinstance(window, tuple) and window[0] == "chunk":
        return position >= (end - 1) // window[1] * window[1]
    window, first = window if isinstance(window, tuple) else (window or LONGEST, 0)
    return (position >= end - window) | (position < first)


def weight(layer, position):
    """What no two places of a row have in common, nearly."""
    return (position * position * 31 + position * (17 + layer) + 5) % 89


def continuation(windows, prompt, count, eos):
    """What the model adds to a prompt, computed from a list."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + count, LONGEST):
        end = len(tokens)
        total = sum(
            (tokens[p] + 1) * int(weight(layer, p))
            for layer, window in enumerate(windows)
            for p in range(end)
            if is_seen(p, end, window)
        )
        tokens.append(total % VOCAB)
        if tokens[-1] == eos:
            return tokens[len(prompt) : -1]
    return tokens[len(prompt) :]


def assert_streams(engine, prompts, counts, expected, leave_after, **options):
    """An engine's stream gives what is expected, or its beginning if it is left after so many tokens, and keeps
    nothing."""
    outputs = [[] for _ in prompts]
    stream = engine.stream(prompts, counts, **options)
    for index, token in stream:
        outputs[index].append(token)
        if sum(map(len, outputs)) == leave_after:
            stream.close()
            expected = [e[: len(output)] for e, output in zip(expected, outputs, strict=True)]
    assert outputs == expected
    jaxkv.check_invariants(engine.cache)
    assert engine.cache.is_empty


def finish(engine, requests, windows):
    """Work until all is done, and see that each of `requests`, with its prompt and the tokens it asked for, has those
    that it is to have."""
    for _ in engine.run():
        pass
    for request, prompt, count in requests:
        expected = continuation(windows, prompt, count, None)
        assert request.done
        assert request.tokens == (expected[: len(request.tokens)] if request.stopped else expected)
