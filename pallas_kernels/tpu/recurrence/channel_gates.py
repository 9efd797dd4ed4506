"""What tokens of a chunk are to each other where each channel of keys has a gate of its own; a stage of `state_chunk`.

That is a sum over channels, each with its own gates between the two tokens: no factor of the product. But where a
border lies between two tokens, keys times the gates from there to the later token, and from the earlier one to there,
have products with all gates that lie between, and no factor is above 1. So pairs of tokens are taken by how far they
are apart: of blocks of 1, 2, 4, ... 32 tokens each second one is multiplied by the one before.

Halves of registers cost as much as whole ones. So tokens stand twice: as they come, eight of a row in a register, for
blocks of 8 and more, and eight apart, where a register has the same places of all rows of eight, for those below.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.channel_groups import SUBLANES
from pallas_kernels.tpu.recurrence.products import CHUNK, LEAST_GATE, MINOR, PAIR, dot, pack_left, split


def relate_channels(tokens, stages, scale, writes: list) -> Iterator[None]:
    """Multiplies queries and keys by keys, and by the gates that lie between them, for two heads at a time."""
    size, num_keys, digits = stages.spread.shape[0], tokens.k.words.num_heads, stages.keys.shape[1]
    numbers = stages.numbers[...]
    pairs = [range(head, min(head + 2, size)) for head in range(0, size, 2)]
    key_of = [head // (size // num_keys) for head in range(size)]
    for i, pair in enumerate(pairs):
        near = Triangles()
        near_tokens = [_near_tokens(tokens, scale, head, key_of[head]) for head in pair]
        near.add_diagonal(near_tokens)
        near.add_blocks(near_tokens, digits)
        near.leave(stages.near.at[i])
        for head, own in zip(pair, near_tokens, strict=True):
            for place in range(SUBLANES):
                at = pl.ds(place, SUBLANES, stride=SUBLANES)
                stages.reach[head, 0, at], stages.reach[head, 1, at] = own.since[place], own.till[place]
        yield
    beta, decays = jnp.concatenate([numbers, numbers], axis=1), []
    for i, pair in enumerate(pairs):
        far = Triangles()
        far_tokens = [_far_tokens(tokens, stages, scale, head, key_of[head]) for head in pair]
        far.add_blocks(far_tokens, digits)
        factors = _beside(beta[pair[0] : pair[0] + 1], beta[pair[-1] : pair[-1] + 1])
        lower, attention = far.join(stages.near.at[i], factors)
        writes.append((stages.lower, i, lower))
        attention = split(attention, digits)
        for head, own in zip(pair, far_tokens, strict=True):
            begin = head % 2 * CHUNK
            for part, x in enumerate(pack_left([x[:, begin : begin + CHUNK] for x in attention])):
                writes.append((stages.attention, (head, part), x))
            for ref, x in zip((stages.queries, stages.keys, stages.ends), own.finish(), strict=True):
                writes += [(ref, (head, part), y) for part, y in enumerate(split(x, digits))]
            decays.append(own.total[0, :1])
        yield
    rows = numbers.shape[0]
    decays += [jnp.zeros_like(decays[0])] * (rows - size)
    lines = jnp.concatenate([jnp.concatenate(decays, axis=0), numbers], axis=1)
    parts = [part.astype(jnp.float32) for part in split(lines, 3)]
    lines = jnp.concatenate([*parts, jnp.zeros_like(lines)], axis=0)
    writes.append((stages.gates, slice(None), lines.astype(jnp.bfloat16)))


def _near_tokens(tokens, scale, head, key) -> "GatedTokens":
    """Tokens eight apart in a register."""

    def take(lines, i):
        return jnp.stack([lines.head(i, pl.ds(place, SUBLANES, stride=SUBLANES)) for place in range(SUBLANES)])

    gates = jnp.exp(jnp.maximum(take(tokens.gates, head), LEAST_GATE))
    return GatedTokens(take(tokens.q, key) * scale[0], take(tokens.k, key), gates, jnp.ones_like(gates), gates)


def _far_tokens(tokens, stages, scale, head, key) -> "GatedTokens":
    """Tokens as they come."""
    q, k, since, till = (
        x.reshape(SUBLANES, SUBLANES, x.shape[-1])
        for x in (tokens.q.head(key) * scale[0], tokens.k.head(key), stages.reach[head, 0], stages.reach[head, 1])
    )
    return GatedTokens(q, k, since, till, jnp.broadcast_to(since[:, SUBLANES - 1 :], since.shape))


class GatedTokens:
    """A head's tokens in blocks, `[8, 8, K]`, of which two at a time are joined."""

    def __init__(self, q, k, since, till, total):
        self.q, self.k = q, k
        self.since, self.till, self.total = since, till, total  # gates of a block: till a token, after it, and all

    def join(self, size: int) -> tuple[jax.Array, jax.Array]:
        """Returns keys of each first block of so many registers, and keys and behind them queries of each second one,
        with the gates to the border between the two, `[CHUNK / 2, K]` and `[CHUNK, K]`. Then both are one block."""
        since, till, q, k = (_halves(x, size) for x in (self.since, self.till, self.q, self.k))
        first, second = _halves(self.total, 1)
        earlier = k[0] * till[0]
        later = jnp.stack([k[1] * since[1], q[1] * since[1]])
        self.since, self.till = _join(since[0], since[1] * first), _join(till[0] * second, till[1])
        self.total = (first * second).reshape(-1, *self.total.shape[1:])
        return earlier, later.reshape(CHUNK, later.shape[-1])

    def finish(self):
        """Returns what reads the state before the chunk, queries and keys, and keys as they are at its end."""
        return [x.reshape(CHUNK, x.shape[-1]) for x in (self.q * self.since, self.k * self.since, self.k * self.till)]


def _halves(x, size):
    """Returns the first and the second ones of blocks of so many, `[blocks / 2, size, 8, K]`."""
    x = x.reshape(-1, 2, size, *x.shape[1:])
    return x[:, 0], x[:, 1]


def _join(first, second):
    return jnp.stack([first, second], axis=1).reshape(-1, *first.shape[2:])


class Triangles:
    """What tokens have of earlier keys, keys and queries, of two heads side by side: registers `[8, 2 CHUNK]`."""

    def __init__(self):
        self.rows = [[jnp.zeros((SUBLANES, PAIR), jnp.float32)] * SUBLANES for _ in range(2)]
        self.block = _column() // SUBLANES

    def add_diagonal(self, tokens):
        """What queries have of their own keys."""
        for place in range(SUBLANES):
            sums = [jnp.sum(own.q[place] * own.k[place], axis=1, keepdims=True) for own in tokens]
            self.rows[1][place] = jnp.where(self.block == place, _beside(sums[0], sums[-1]), self.rows[1][place])

    def add_blocks(self, tokens, digits):
        for size in (1, 2, 4):
            found = _multiply(*zip(*[own.join(size) for own in tokens], strict=True), digits)
            found = found.reshape(len(tokens), 2, -1, SUBLANES, found.shape[-1])
            later = [place for place in range(SUBLANES) if place & size]
            for kind, rows in enumerate(self.rows):
                for i, place in enumerate(later):
                    product = found[0, kind, i] if len(tokens) == 1 else _beside(found[0, kind, i], found[1, kind, i])
                    # First parts of keys stand in their own lanes, second ones in those of the block behind.
                    product += pltpu.roll(product, PAIR - SUBLANES * size, 1)
                    rows[place] = jnp.where(self.block // size == place // size - 1, product, rows[place])

    def leave(self, ref):
        """Puts triangles of tokens eight apart where they belong."""
        lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, PAIR), 1)
        column = lane & (CHUNK - 1)
        turned = lane - column + (column & (SUBLANES - 1)) * SUBLANES + column // SUBLANES
        for kind, rows in enumerate(self.rows):
            for place, x in enumerate(rows):
                x = jnp.take_along_axis(x, turned, axis=1, mode="promise_in_bounds")
                ref[kind, pl.ds(place, SUBLANES, stride=SUBLANES)] = x

    def join(self, near, beta):
        """Returns both, with what tokens of the same eight have of each other, times beta of the earlier ones."""
        found = []
        for kind, rows in enumerate(self.rows):
            tiles = [near[kind, i * SUBLANES : (i + 1) * SUBLANES] for i in range(SUBLANES)]
            rows = [jnp.where(self.block == i, tile, x) for i, (tile, x) in enumerate(zip(tiles, rows, strict=True))]
            found.append(jnp.concatenate([x * beta for x in rows], axis=0))
        return found


def _multiply(earlier, later, digits):
    """Returns the products of later keys and queries with earlier keys, of two heads in one: what the one head's have
    with the other's is of no use."""
    parts = []
    for _ in range(digits):
        parts.append([x.astype(jnp.bfloat16).astype(jnp.float32) for x in earlier])
        earlier = [x - y for x, y in zip(earlier, parts[-1], strict=True)]
    width = earlier[0].shape[-1]

    def side(first, second):
        found = [_join(x, y).reshape(CHUNK, width).astype(jnp.bfloat16) for x, y in zip(first, second, strict=True)]
        return jnp.concatenate(found * (PAIR // CHUNK // len(found)), axis=0)

    left = pack_left(split(jnp.concatenate(later, axis=0), digits))
    both = side(*parts[:2])
    found = dot(left[0], jnp.concatenate([both, both], axis=1), MINOR)
    if digits == 3:
        none = [jnp.zeros_like(x) for x in earlier]
        found += dot(left[1], jnp.concatenate([side(parts[2], none), side(parts[0], none)], axis=1), MINOR)
    return found


def _column():
    return lax.broadcasted_iota(jnp.int32, (SUBLANES, PAIR), 1) & (CHUNK - 1)


def _beside(a, b):
    """Returns the first half of lanes of `a` and the second of `b`."""
    is_first = lax.broadcasted_iota(jnp.int32, (SUBLANES, PAIR), 1) < CHUNK
    return jnp.where(is_first, a, b)
