"""Needles: numbers hidden in a long text, asked for at its end, by whatever a cache kept or a model reads of it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import _thinning
import jax
import jax.numpy as jnp
import numpy as np
from _models import Windowed, read_chosen_blocks, unroll

import jaxkv

CITIES = ("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Rome", "Seoul")
ROWS, CHUNK, ASKED, ANSWER, BLOCK = len(CITIES), 256, 64, 6, 16  # each of ASKED tokens ends in a row's question
LENGTHS, SHARES = (1024, 4096, 8192), (0.5, 0.25)
# How keys and values are stored: a dtype, and of quantized ones how many of the newest tokens are read as bfloat16.
KINDS = {name: {"dtype": name} for name in ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")}
for _name in ("int4", "k5v3"):
    KINDS |= {_name: {"dtype": _name}, f"{_name}, residual 32": {"dtype": _name, "residual_length": 32}}
WINDOW, SINKS = 1024, 4


@dataclasses.dataclass
class Haystack:
    """A text with a needle for each row: what all rows share, i32[N]; their ends, i32[ROWS, ASKED]; the numbers."""

    shared: np.ndarray
    ends: np.ndarray
    numbers: list[str]


def hide(text: Any, bos: int, words: list[int], length: int, seed: int) -> Haystack:
    """Returns a haystack of `length` tokens: needles evenly apart in `words`, in an order that the seed shuffles."""
    draw = np.random.default_rng(seed)
    numbers = [str(number) for number in draw.integers(10_000, 100_000, ROWS)]
    needles = [
        text.encode(f"\nThe secret number of {city} is {number}.\n", special=False)
        for city, number in zip(CITIES, numbers, strict=True)
    ]
    room = length - ASKED - 1 - sum(map(len, needles))
    shared = [bos]
    for i, row in enumerate(draw.permutation(ROWS)):
        shared += words[room * i // ROWS : room * (i + 1) // ROWS] + needles[row]
    questions = [text.encode(f"\nThe secret number of {city} is", special=False) for city in CITIES]
    ends = [words[room : room + ASKED - len(question)] + question for question in questions]
    return Haystack(np.array(shared, np.int32), np.array(ends, np.int32), numbers)


@functools.partial(jax.jit, donate_argnames="cache")
def read_shared(model: Any, cache: jaxkv.Cache, tokens: jax.Array, count: jax.Array) -> jaxkv.Cache:
    """Feeds row 0 with the first `count` of the tokens, i32[CHUNK]."""
    cache = jaxkv.extend(cache, jnp.zeros(ROWS, jnp.int32).at[0].set(count))
    return model(tokens, cache=cache, logits_at=jnp.zeros(1, jnp.int32))[1]


@functools.partial(jax.jit, donate_argnames="cache")
def read_ends(model: Any, cache: jaxkv.Cache, tokens: jax.Array) -> jaxkv.Cache:
    cache = jaxkv.extend(cache, jnp.full(ROWS, tokens.shape[1], jnp.int32))
    return model(tokens, cache=cache, logits_at=jnp.zeros(ROWS, jnp.int32))[1]


@jax.jit
def answer(model: Any, cache: jaxkv.Cache, last: jax.Array) -> tuple[jax.Array, jaxkv.Cache]:
    """Returns each row's next tokens, i32[ROWS, ANSWER], greedily, after its last one."""

    def step(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
        cache, token = carry
        logits, cache = model(token[:, None], cache=jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32)))
        token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        return (cache, token), token

    (cache, _), tokens = jax.lax.scan(step, (cache, last), length=ANSWER)
    return tokens.T, cache


def prepare(model: Any, config: jaxkv.CacheConfig, hay: Haystack) -> jaxkv.Cache:
    """Returns a cache whose rows have all read what they share."""
    cache = jaxkv.init(config)
    for begin in range(0, len(hay.shared), CHUNK):
        part = hay.shared[begin : begin + CHUNK]
        cache = read_shared(model, cache, np.pad(part, (0, CHUNK - len(part))), np.int32(len(part)))
    cache = jaxkv.fork(cache, 0, list(range(1, ROWS)))
    jaxkv.check(cache)
    return cache


def count_found(model: Any, text: Any, cache: jaxkv.Cache, hay: Haystack) -> int:
    """Returns how many rows give their number."""
    tokens, cache = answer(model, cache, hay.ends[:, -1])
    jaxkv.check(cache)
    said = [text.decode(row) for row in tokens.tolist()]
    return sum(x.strip().startswith(number) for x, number in zip(said, hay.numbers, strict=True))


def make_config(layers: Any, **stored: Any) -> jaxkv.CacheConfig:
    """Returns the config of a cache for the longest rows that share all but their ends, or of which each keeps half."""
    room, apart = max(LENGTHS) + ANSWER + BLOCK, ASKED + ANSWER + 2 * BLOCK
    if any(layer.evict for layer in layers):
        apart += room // 2
    return jaxkv.CacheConfig(layers=tuple(layers), max_seqs=ROWS, max_seq_len=room, block_size=BLOCK,
                             **{"dtype": "float32"} | stored, max_tokens=room + ROWS * apart)  # fmt: skip


class Search:
    """What the searches share: Gemma 3, and a haystack of each length."""

    def __init__(self, model: Any, text: Any, words: list[int]):
        self.model, self.text, self.plain = model, text, model.layer_configs
        self.hays = {length: hide(text, model.config.bos_id, words, length, length) for length in LENGTHS}

    def find_stored(self, only: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields how many needles are found at each length, for each kind of storage, or only one, and for windows with
        sinks."""
        narrow = Windowed(self.model, tuple(
            layer if layer.window else dataclasses.replace(layer, window=WINDOW, sink_tokens=SINKS)
            for layer in self.plain
        ))  # fmt: skip
        ways: list[tuple[str, Any, jaxkv.CacheConfig]] = [
            *((f"stored as {kind}", self.model, make_config(self.plain, **stored)) for kind, stored in KINDS.items()),
            (f"window of {WINDOW}, {SINKS} sink tokens", narrow, make_config(narrow.layer_configs)),
        ]
        for name, model, config in ways:
            if only is not None and name != only:
                continue
            row: dict[str, Any] = {"way": name}
            for length, hay in self.hays.items():
                cache = read_ends(model, prepare(model, config, hay), hay.ends[:, :-1])
                row[f"found at {length}"] = count_found(model, self.text, cache, hay)
            yield row

    def find_chosen(self) -> Iterator[dict[str, Any]]:
        """Yields how many are found while Quest chooses the blocks that each token of an answer reads."""
        layers = [dataclasses.replace(layer, bounds=layer.window is None) for layer in self.plain]
        rows = {share: {"way": "quest", "share": share} for share in SHARES}
        for length, hay in self.hays.items():
            cache = read_ends(self.model, prepare(self.model, make_config(layers), hay), hay.ends[:, :-1])
            for share, row in rows.items():
                model = read_chosen_blocks(self.model, int(length * share) // BLOCK)
                row[f"found at {length}"] = count_found(model, self.text, cache, hay)
        yield from rows.values()

    def find_kept(self) -> Iterator[dict[str, Any]]:
        """Yields how many are found after an eviction by each score, which saw the question but for its last token."""
        score_step, unrolled = jax.jit(_thinning.score_step, donate_argnames="cache"), unroll(self.model)
        config = make_config(_thinning.evicting(self.plain, "layer"))
        counts = np.full(ROWS, ASKED - 1, np.int32)
        rows: dict[tuple[str, float], dict[str, Any]] = {}
        for length, hay in self.hays.items():
            cache = prepare(self.model, config, hay)
            _, cache, worth = score_step(unrolled, cache, hay.ends[:, :-1], counts)
            for name, score in worth.items():
                for share in SHARES:
                    thinned = _thinning.thin(cache, score, jnp.int32(length * share))
                    jaxkv.check(thinned)
                    row = rows.setdefault((name, share), {"way": name, "share": share})
                    row[f"found at {length}"] = count_found(self.model, self.text, thinned, hay)
        yield from rows.values()
