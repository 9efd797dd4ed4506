"""The sums of `xla.recurrence.formulas.run_chunk` for a few heads of a chunk, in three stages, each of its own item.

`relate` needs no states and nothing of other chunks, `solve` nothing but what `relate` found, `advance` both and the
states. A grid step runs the three of items that follow each other, so that none waits for another. The matrix unit
keeps the program's order: products of a stage stand between those of the others, which wait long for each other.

Products are those of `products`. Two heads' triangles of 64 x 64 lie side by side in lanes, for arithmetic on whole
registers. Where each channel of keys has a gate of its own, it is `channel_gates` that relates tokens.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.channel_groups import SUBLANES
from pallas_kernels.tpu.pages import LANES, vector_bytes
from pallas_kernels.tpu.recurrence.channel_gates import relate_channels
from pallas_kernels.tpu.recurrence.chunk_tokens import ChunkTokens
from pallas_kernels.tpu.recurrence.products import (
    CHUNK,
    INNER,
    MINOR,
    OUTER,
    PAIR,
    dot,
    multiply,
    multiply_left,
    multiply_rows,
    ones,
    pack_left,
    split,
)

BLOCK = 16  # of a triangle's rows, which are substituted one after another; two are joined by products to a half
HALF = 2 * BLOCK  # of a triangle; the two halves' inverses are applied one after the other
STEP = 2.0**-11  # gates' first parts are multiples of it: sums of a chunk's have no more digits than float32
STAGES = 3
# In which stages' products stand in the program, by the stages' first letters; p: `spread_gates`. Each runs to its end.
ORDER = "rararapasrsaar"
ORDER_OF_SPACES = "rrrarpsasar"  # without delta
ORDER_BY_CHANNEL = "rarrarrsrrarrprrarrsrrarrar"


class Stages(NamedTuple):
    """What stages leave to those that follow, in vector memory; shapes and dtypes, and references.

    Two items' `queries`, `keys`, `ends` and `attention` are kept, by turns: `advance` reads them when `relate` is two
    items on. With gates by channel H' is H, and queries and keys have gates in them.
    """

    queries: Any  # bf16[2, H', parts, CHUNK, K]: what reads the states
    keys: Any  # as queries
    attention: Any  # bf16[2, H, parts - 1, CHUNK, 2 CHUNK]: of queries to keys, with gates; parts side by side
    lower: Any  # f32[pairs of heads, CHUNK, 2 CHUNK]: what keys have of earlier ones
    gates: Any  # bf16[4 padded_rows(H), spread]: three parts of each head's numbers, and zeros
    solver: Any  # bf16[H, parts - 1, 3 HALF, 2 HALF]: the first half's inverse, what lies below it, the second half's
    numbers: Any  # f32[m padded_rows(H), CHUNK]: a row for each of m numbers and each head
    # f32[H, spread, LANES]: the same in all lanes. Gates since the chunk's start, and those till its end times beta, of
    # CHUNK tokens each; with gates by channel those of the chunk, of K channels, and beta of CHUNK tokens.
    spread: Any
    # With gates by channel, else None:
    ends: Any = None  # as keys: with gates till the chunk's end
    reach: Any = None  # f32[H, 2, CHUNK, K]: gates of eight tokens, since their start and till their end
    near: Any = None  # f32[pairs of heads, 2, CHUNK, 2 CHUNK]: what keys and queries have of earlier ones of the eight
    turned: Any = None  # queries, keys and gates, heads first: f32[H', CHUNK, K] twice, and f32[H, CHUNK, K]

    @property
    def bytes(self) -> int:
        """What they take of vector memory."""
        return sum(vector_bytes(x.shape, x.dtype) for x in jax.tree.leaves(self))

    def slot(self, number: Any) -> "Stages":
        """Returns references to what is kept of an item."""
        names = ("queries", "keys", "attention", *["ends"] * (self.ends is not None))
        return self._replace(**{name: getattr(self, name).at[number] for name in names})


def stage_shapes(heads: int, keys: int, width: int, parts: int, by_channel: bool) -> Stages:
    """Returns the shapes for so many heads of values and of keys, these of a width."""
    shape, few = jax.ShapeDtypeStruct, jnp.bfloat16
    tokens = shape((2, heads if by_channel else keys, parts, CHUNK, width), few)
    numbers, pairs = (width + CHUNK if by_channel else PAIR), -(-heads // 2)
    stages = Stages(
        tokens,
        tokens,
        shape((2, heads, parts - 1, CHUNK, PAIR), few),
        shape((pairs, CHUNK, PAIR), jnp.float32),
        shape((4 * padded_rows(heads), numbers), few),
        shape((heads, parts - 1, 3 * HALF, 2 * HALF), few),
        shape(((1 if by_channel else 2) * padded_rows(heads), CHUNK), jnp.float32),
        shape((heads, numbers, LANES), jnp.float32),
    )
    if not by_channel:
        return stages
    reach, near = (heads, 2, CHUNK, width), (pairs, 2, CHUNK, PAIR)
    return stages._replace(ends=tokens, reach=shape(reach, jnp.float32), near=shape(near, jnp.float32))


def padded_rows(heads: int) -> int:
    """Returns how many rows numbers of so many heads take, 8 or 16."""
    return -(-heads // SUBLANES) * SUBLANES


def spread_keys(tokens: ChunkTokens, stages: Stages) -> None:
    """Makes what the first stage reads of tokens that have come."""
    stages.numbers[...] = tokens.numbers[:, 0, : stages.numbers.shape[0]].T
    for x in (tokens.q, tokens.k, tokens.gates):
        if x is not None:
            x.spread()


def run_stages(
    tokens: ChunkTokens, following: ChunkTokens, states, first, stages: Stages, scale, has_delta: bool
) -> None:
    """Runs the three stages, of which the last advances the states from `first` on. What they compute is written when
    all is read: memory's order keeps nothing waiting. Then come the tokens that the `following` step reads."""
    writes: list[tuple[Any, Any, Any]] = []
    if stages.ends is not None:
        order, related = ORDER_BY_CHANNEL, relate_channels(tokens, stages, scale, writes)
    else:
        order = ORDER if has_delta else ORDER_OF_SPACES
        related = relate(tokens, stages, has_delta, scale, writes)
    running = {
        "r": related,
        "s": solve(stages, has_delta, writes),
        "p": spread_gates(stages, writes),
        "a": advance(tokens, states, first, stages, has_delta, writes),
    }
    for name in order:
        next(running[name], None)
    for ref, place, x in writes:
        ref[place] = x
    spread_keys(following, stages)
    following.v.spread()


def relate(tokens: ChunkTokens, stages: Stages, has_delta: bool, scale, writes: list) -> Iterator[None]:
    """Multiplies queries and keys by keys, and by the gates that lie between them."""
    (own, digits), size = stages.keys.shape[:2], stages.spread.shape[0]
    key_of = [head // (size // own) for head in range(size)]
    pairs = [(head, min(head + 1, size - 1)) for head in range(0, size, 2)]
    rows = padded_rows(size)
    gates = _Gates(stages.numbers[...], rows, has_delta)
    yield
    q, k = ([x.head(i) for i in range(own)] for x in (tokens.q, tokens.k))
    if scale is not None:
        q = [x * scale[0] for x in q]
    queries, keys = ([split(x, digits) for x in some] for some in (q, k))
    for i in range(own):
        for part in range(digits):
            writes += [(stages.queries, (i, part), queries[i][part]), (stages.keys, (i, part), keys[i][part])]
    # Each product twice, side by side: heads of a pair mostly have one key. Keys that the matrix unit turns as it loads
    # them take it twice as long; these the permute units have turned.
    twice = [[jnp.concatenate([part, part], axis=0).T for part in k] for k in keys]
    read = [_stack(k, q) if has_delta else q for k, q in zip(keys, queries, strict=True)]
    products = []
    for some in (slice(own // 2), slice(own // 2, None)):
        products += [multiply(x, k, INNER) for x, k in zip(read[some], twice[some], strict=True)]
        yield
    at = gates.spread_sums(pairs)
    writes.append((stages.gates, slice(None), gates.factors()))
    yield
    for i, (a, b) in enumerate(pairs):
        product = products[key_of[a]]
        if key_of[a] != key_of[b]:
            is_first = lax.broadcasted_iota(jnp.int32, product.shape, 1) < CHUNK
            product = jnp.where(is_first, product, products[key_of[b]])
        between = gates.between(at, i, a, b)
        attention = split(product[-CHUNK:] * between, digits)
        for head in {a, b}:
            for part, x in enumerate(pack_left(_half(attention, head % 2 * CHUNK, CHUNK))):
                writes.append((stages.attention, (head, part), x))
        if has_delta:
            row, column = _places()
            writes.append((stages.lower, i, jnp.where(column < row, product[:CHUNK] * between, 0.0)))


def solve(stages: Stages, has_delta: bool, writes: list) -> Iterator[None]:
    """Inverts the halves of `I + lower` on its diagonal."""
    size, digits = stages.spread.shape[0], stages.keys.shape[1]
    lower = [stages.lower[i] for i in range(stages.lower.shape[0] if has_delta else 0)]
    corners = [split(x[HALF:], digits) for x in lower]
    blocks = invert_blocks(lower)
    joined = [first_product(*x, digits) for x in quads(lower, blocks)] if has_delta else []
    yield
    inverses = [split(x, digits) for x in join_blocks(blocks, joined, digits)] if has_delta else []
    for head in range(size if has_delta else 0):
        inverse, corner, begin = inverses[head // 2], corners[head // 2], head % 2 * CHUNK
        for i, (x, lane) in enumerate(((inverse, begin), (corner, begin), (inverse, begin + HALF))):
            for part, y in enumerate(pack_left(_half(x, lane, HALF))):
                writes.append((stages.solver, (head, part, slice(i * HALF, (i + 1) * HALF)), y))


def spread_gates(stages: Stages, writes: list) -> Iterator[None]:
    """Spreads the gates of the item that is solved over lanes."""
    size = stages.spread.shape[0]
    lines, rows = stages.gates[...], padded_rows(size)
    number, lane = (lax.broadcasted_iota(jnp.int32, (lines.shape[0], LANES * size), i) for i in range(2))
    spread = dot(lines, ones((number & (rows - 1)) == lane // LANES), OUTER)
    writes += [(stages.spread, i, spread[:, i * LANES : (i + 1) * LANES]) for i in range(size)]
    yield


def advance(tokens: ChunkTokens, states, first, stages: Stages, has_delta: bool, writes: list) -> Iterator[None]:
    """Computes outputs, and the states after the chunk."""
    (own, digits), heads = stages.keys.shape[:2], range(stages.spread.shape[0])
    key_of = [head // (len(heads) // own) for head in heads]
    parts = functools.partial(split, digits=digits)
    queries, keys = ([[x[i, part] for part in range(digits)] for i in range(own)] for x in stages[:2])
    read = [pack_left(_stack(k, q) if has_delta else q) for k, q in zip(keys, queries, strict=True)]
    by_channel, border = stages.ends is not None, stages.spread.shape[1] - CHUNK
    since_start, till_end = ([stages.spread[i, part] for i in heads] for part in (slice(border), slice(border, None)))

    def forget(x, i):
        """Returns what tokens read of the state, with gates since its time."""
        return x if by_channel else x * _widen(since_start[i], x.shape[1])

    contract = INNER if has_delta else MINOR
    found = [multiply_left(read[key_of[i]], parts(states[first + i]), contract) for i in heads]
    yield
    u = [tokens.v.head(i) for i in heads]
    width = u[0].shape[1]
    if has_delta:
        # What is yet to be multiplied by beta, which `between` and `till_end` have in them.
        wanted = [u[i] - forget(found[i][:CHUNK], i) for i in heads]

        def apply(place, xs):
            at = slice(place * HALF, (place + 1) * HALF)
            return [multiply_left([stages.solver[i, n, at] for n in range(digits - 1)], xs[i]) for i in heads]

        upper = apply(0, [parts(x[:HALF]) for x in wanted])
        yield
        upper_parts = [parts(x) for x in upper]
        below = apply(1, upper_parts)
        yield
        under = apply(2, [parts(x[HALF:] - y) for x, y in zip(wanted, below, strict=True)])
        yield
        u = [jnp.concatenate(x, axis=0) for x in zip(upper, under, strict=True)]
        u_parts = [_stack(x, parts(y)) for x, y in zip(upper_parts, under, strict=True)]
    else:
        u_parts = [parts(x) for x in u]
    inner = [multiply_left([stages.attention[i, n] for n in range(digits - 1)], u_parts[i]) for i in heads]
    yield
    later = [parts(u[i] * _widen(till_end[i], width)) for i in heads]
    if by_channel:
        keys = [[stages.ends[i, part] for part in range(digits)] for i in range(own)]
    if has_delta:
        added = []
        for key in range(own):  # two heads of a key in one product
            mine = [later[i] for i in heads if key_of[i] == key]
            for few in (mine[i : i + 2] for i in range(0, len(mine), 2)):
                side = [jnp.concatenate(x, axis=1) for x in zip(*few, strict=True)]
                x = multiply_rows(keys[key], side)
                added += [x[:, i * width : (i + 1) * width] for i in range(len(few))]
    else:
        added = [multiply_rows(later[i], keys[key_of[i]]) for i in heads]
    y = jnp.stack([(forget(found[i][-CHUNK:], i) + inner[i]).astype(tokens.y.dtype) for i in heads])
    writes.append((tokens.y, slice(None), jnp.swapaxes(y, 0, 1)))
    for i in heads:
        decay = _widen(since_start[i] if by_channel else since_start[i][CHUNK - 1 :], states.shape[2])
        writes.append((states, first + i, states[first + i] * decay + added[i]))


class _Gates:
    """Sums of logarithms of gates, of all heads: one row for each.

    Their differences are what lies between two tokens, and would lose digits: so sums are of two parts, multiples of
    `STEP`, which are exact, and the small rest.
    """

    def __init__(self, numbers, rows, has_delta):
        self.rows, self.has_delta = rows, has_delta
        first = jnp.round(numbers[:rows] * (1 / STEP)) * STEP
        parts = split(jnp.concatenate([first, numbers[:rows] - first], axis=0), 3)
        row, column = _places()
        lane = lax.broadcasted_iota(jnp.int32, row.shape, 1)
        till = ones((lane < CHUNK) & (row <= column) | (lane >= CHUNK) & (row > column))
        self.sums = sum(dot(part, till, INNER) for part in parts)  # since the start, and behind them till the end
        self.beta = jnp.concatenate([numbers[rows:]] * 2, axis=1) if has_delta else None

    def factors(self):
        """Returns parts of gates since the start, and till the end times beta."""
        x = jnp.exp(self.sums[: self.rows] + self.sums[self.rows :])
        if self.has_delta:
            x = x * jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < CHUNK, 1.0, self.beta)
        parts = [part.astype(jnp.float32) for part in split(x, 3)]
        return jnp.concatenate([*parts, jnp.zeros_like(x)], axis=0).astype(jnp.bfloat16)

    def spread_sums(self, pairs):
        """Returns each token's sums in the lanes of its head, of one pair after another."""
        parts = jnp.concatenate(split(self.sums[:, :CHUNK], 3), axis=0)
        number, lane = (lax.broadcasted_iota(jnp.int32, (parts.shape[0], 2 * PAIR * len(pairs)), i) for i in range(2))
        part, head = lane // PAIR & 1, jnp.minimum(lane // (2 * PAIR) * 2 + (lane // CHUNK & 1), pairs[-1][1])
        return dot(parts, ones((number & (2 * self.rows - 1)) == part * self.rows + head), OUTER)

    def between(self, at, pair, a, b):
        """Returns gates after a token (in lanes) till another (in rows), times the former's beta; 0 for later ones."""
        is_first = lax.broadcasted_iota(jnp.int32, (1, PAIR), 1) < CHUNK
        since_start = jnp.where(
            lax.broadcasted_iota(jnp.int32, self.sums.shape, 1) < CHUNK, self.sums, pltpu.roll(self.sums, CHUNK, 1)
        )

        def select_rows(x, start):
            return jnp.where(is_first, x[start + a : start + a + 1], x[start + b : start + b + 1])

        at = at[:, 2 * pair * PAIR : 2 * (pair + 1) * PAIR]
        total = (at[:, :PAIR] - select_rows(since_start, 0)) + (at[:, PAIR:] - select_rows(since_start, self.rows))
        row, column = _places()
        gates = jnp.exp(jnp.where(column <= row, total, -jnp.inf))
        return gates * select_rows(self.beta, 0) if self.has_delta else gates


def invert_blocks(lower):
    """Returns the inverses of the blocks on the diagonals of `I + lower`, side by side, a row at a time. Powers of
    `lower`, which are as fast, overflow where keys repeat."""
    place, lane = (lax.broadcasted_iota(jnp.int32, (BLOCK, PAIR), i) for i in range(2))
    begin, number = lane & -BLOCK, lane // BLOCK & (CHUNK // BLOCK - 1)
    blocks = [x[:BLOCK] for x in lower]
    for i in range(1, CHUNK // BLOCK):
        blocks = [jnp.where(number == i, x[i * BLOCK : (i + 1) * BLOCK], y) for x, y in zip(lower, blocks, strict=True)]
    start = jnp.where(place == lane - begin, 1.0, 0.0)
    tiles = [slice(i, i + SUBLANES) for i in range(0, BLOCK, SUBLANES)]
    inverse = [[start[tile] for tile in tiles] for _ in lower]
    for i in range(BLOCK - 1):
        for x, y in zip(blocks, inverse, strict=True):
            line = y[i // SUBLANES][i % SUBLANES : i % SUBLANES + 1]
            for n in range(i // SUBLANES, len(tiles)):  # tiles before it have no row that follows
                factors = jnp.take_along_axis(x[tiles[n]], begin[:SUBLANES] + i, axis=1, mode="promise_in_bounds")
                y[n] = y[n] - factors * line
    return [jnp.concatenate(x, axis=0) for x in inverse]


def quads(lower, blocks):
    """Yields, of two pairs of heads each, what lies between the two blocks of a half, and the inverses of the first and
    the second ones, side by side: of the former pair in even places, of the latter in odd ones."""
    is_even = _is_even()
    lane = lax.broadcasted_iota(jnp.int32, is_even.shape, 1)
    corners = [jnp.where((lane & HALF) == 0, x[BLOCK:HALF], x[HALF + BLOCK :]) for x in lower]
    for i in range(0, len(lower), 2):
        j = min(i + 1, len(lower) - 1)
        yield (
            jnp.where(is_even, corners[i], pltpu.roll(corners[j], BLOCK, 1)),
            jnp.where(is_even, blocks[i], pltpu.roll(blocks[j], BLOCK, 1)),
            jnp.where(is_even, pltpu.roll(blocks[i], PAIR - BLOCK, 1), blocks[j]),
        )


def first_product(corner, first, second, digits):
    """Returns the second blocks' inverses times the corners, and the first ones'. What the matrix unit loads is there
    early: the corners here, and in `join_blocks` the inverses."""
    return multiply(split(second, digits), make_diagonal(split(corner, digits)), INNER), first


def join_blocks(blocks, joined, digits):
    """Returns the inverses of halves, those of two heads side by side, `[HALF, PAIR]`."""
    products = [multiply(split(x, digits), make_diagonal(split(y, digits)), INNER) for x, y in joined]
    corners = [x for y in products for x in (y, pltpu.roll(y, PAIR - BLOCK, 1))]
    is_even = _is_even()
    return [
        jnp.concatenate([jnp.where(is_even, x, 0.0), jnp.where(is_even, -corner, x)], axis=0)
        for x, corner in zip(blocks, corners[: len(blocks)], strict=True)
    ]


def make_diagonal(parts):
    """Returns blocks that stand side by side as those of a diagonal."""
    lane = lax.broadcasted_iota(jnp.int32, (BLOCK, PAIR), 1)
    zero = jnp.zeros((), jnp.bfloat16)
    return [
        jnp.concatenate([jnp.where(lane // BLOCK == i, x, zero) for i in range(PAIR // BLOCK)], axis=0) for x in parts
    ]


def _places():
    """Returns the rows and the columns of two triangles side by side."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (CHUNK, PAIR), i) for i in range(2))
    return row, lane & (CHUNK - 1)


def _is_even():
    """Returns whether a lane is of a block that is the first of its half."""
    return (lax.broadcasted_iota(jnp.int32, (BLOCK, PAIR), 1) & BLOCK) == 0


def _half(parts, start, width):
    return [x[:, start : start + width] for x in parts]


def _stack(a, b):
    return [jnp.concatenate(x, axis=0) for x in zip(a, b, strict=True)]


def _widen(x, width):
    """Returns `x [., LANES]`, the same in all lanes, `width` lanes wide."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * (width // LANES), axis=1)
