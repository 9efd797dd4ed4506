"""Whether a model computes the same whatever steps its tokens come in."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.plan import plan_step
from jaxkv._core.blocks.tables import extend
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.validation import integer
from jaxkv._engine.programs.model import PAGE, Model, check_form, check_shapes, no_adapters, takes

ROWS, OWN = 3, 1  # rows of the cache, and the one that is compared
BESIDE = (5, 11)  # tokens of the rows before and behind it
CHUNK = 16  # tokens of a step where the row comes in chunks
MOST_APART = 0.03  # of the largest logit: rounding in bfloat16, or of a chip's float32 products, over some layers
POSITIONS = "take positions from jaxkv.positions(cache, tokens.shape), not from arange or a count of your own"
HANDED_ON = "give each layer the cache that the layer before it returned, and return the last one"
APART = "let tokens meet in jaxkv.attention alone, which knows where a row begins: no cumsum, mask or roll over them"


def check_model(model: Model, *, length: int = 37, seed: int = 0) -> None:
    """Checks that a model gives a row the same logits however its tokens come: in one long step, in chunks, one by one,
    packed beside other rows, and padded.

    This finds what shapes cannot tell: positions by `arange`, a cache that is not handed on, a layer left out, an
    `extend` in the model, rows that see each other, `logits_at` that is not followed. It compiles three programs.

    Args:
      length: tokens of the row that is compared.
      seed: the seed of the random tokens.

    Raises:
      AssertionError: the logits differ; it says in which steps, and what to look at.
      ValueError: the model is none, or what it returns has the wrong form: see `jaxkv.Model`.

    >>> import jaxkv, jaxkv.testing
    >>> jaxkv.testing.check_model(jaxkv.models.small())
    """
    check_form(model)
    most = getattr(getattr(model, "config", None), "max_seq_len", None)
    length = integer("length", length, least=CHUNK + 1, most=most)
    config = CacheConfig.from_model(model, max_seqs=ROWS, max_seq_len=max(length, *BESIDE), block_size=8)
    check_shapes(model, config)
    run = _Run(model, config, length)
    rng = np.random.default_rng(integer("seed", seed, least=0))
    rows = [rng.integers(0, run.vocab_size, size) for size in (BESIDE[0], length, BESIDE[1])]
    wanted = run.run_alone(rows[OWN])
    for name, ways in (
        ("in chunks", run.run_in_chunks),
        ("one by one", run.run_one_by_one),
        ("packed beside other rows", run.run_packed),
        ("padded", run.run_padded),
    ):
        for position, is_first, logits in ways(rows):
            _compare(logits, wanted[position], position, name, APART if is_first else f"{POSITIONS}, and {HANDED_ON}")


class _Run:
    """Runs steps of a model over a cache of its own. Yields `(position, is_first, logits)` of the row's tokens:
    `is_first` tells whether the row begins in that step."""

    def __init__(self, model: Any, config: CacheConfig, length: int):
        self.model, self.config, self.size = model, config, length + sum(BESIDE)
        self._packed, self._padded = jax.jit(self._packed_step), jax.jit(self._padded_step)
        shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (self.size, ROWS, self.size)]
        cache = jax.eval_shape(lambda: init(config))
        self.vocab_size = jax.eval_shape(self._packed_step, model, *shapes, cache)[0].shape[-1]

    def run_alone(self, tokens: np.ndarray) -> np.ndarray:
        """Returns `[length, V]`: the logits of one long row in one step."""
        counts = np.array([0, len(tokens), 0], np.int32)
        logits, cache = self._pack(tokens, counts, init(self.config))
        for i, pool in enumerate(cache.pools):
            if pool is not None and not np.asarray(pool.kv, np.float32)[1:].any():
                raise AssertionError(
                    f"The model stores nothing in layer {i}: call attention with layer={i}, and {HANDED_ON}. {PAGE}"
                )
        if takes(self.model, "logits_at"):
            places = np.arange(self.size, dtype=np.int32)[::-1]
            turned, _ = self._pack(tokens, counts, init(self.config), places)
            hint = "return the logits of the tokens that logits_at names, in its order"
            _compare(turned[::-1][: len(tokens)], logits[: len(tokens)], 0, "in another order of logits_at", hint)
        return logits[: len(tokens)]

    def run_in_chunks(self, rows: list[np.ndarray]) -> Iterator[tuple[int, bool, np.ndarray]]:
        cache, done = init(self.config), 0
        while done < len(rows[OWN]):
            chunk = rows[OWN][done : done + (1 if done == CHUNK else CHUNK)]
            logits, cache = self._pack(chunk, np.array([0, len(chunk), 0], np.int32), cache)
            yield from ((done + i, done == 0, logits[i]) for i in range(len(chunk)))
            done += len(chunk)

    def run_one_by_one(self, rows: list[np.ndarray]) -> Iterator[tuple[int, bool, np.ndarray]]:
        """Decodes beside a shorter row, after a first chunk."""
        counts = np.array([0, CHUNK, 0], np.int32)
        _, cache = self._pack(rows[OWN][:CHUNK], counts, init(self.config))
        for position in range(CHUNK, min(CHUNK + 6, len(rows[OWN]))):
            tokens = np.zeros((ROWS, 1), np.int32)
            tokens[OWN], tokens[2] = rows[OWN][position], rows[2][position - CHUNK]
            logits, cache = self._step(self._padded, tokens, np.array([0, 1, 1], np.int32), cache)
            yield position, False, logits[OWN]

    def run_packed(self, rows: list[np.ndarray]) -> Iterator[tuple[int, bool, np.ndarray]]:
        counts = np.array([len(row) for row in rows], np.int32)
        logits, _ = self._pack(np.concatenate(rows), counts, init(self.config))
        yield from ((i, True, logits[counts[0] + i]) for i in range(counts[OWN]))

    def run_padded(self, rows: list[np.ndarray]) -> Iterator[tuple[int, bool, np.ndarray]]:
        """Takes the last token of each padded chunk of a row beside others."""
        cache, done = init(self.config), 0
        while done < len(rows[OWN]):
            chunks = [row[done : done + CHUNK] for row in rows]
            tokens = np.stack([_pad(chunk, CHUNK) for chunk in chunks])
            counts = np.array(list(map(len, chunks)), np.int32)
            logits, cache = self._step(self._padded, tokens, counts, cache)
            done += int(counts[OWN])
            yield done - 1, done <= CHUNK, logits[OWN]

    def _pack(self, tokens: Any, counts: Any, cache: Cache, places: Any = None) -> tuple[np.ndarray, Cache]:
        """Runs a step of packed tokens, with padding behind them; returns the logits at some places, or all."""
        places = np.arange(self.size, dtype=np.int32) if places is None else places
        return self._step(self._packed, _pad(tokens, self.size), counts, cache, places)

    def _step(self, run: Any, tokens: Any, counts: Any, cache: Cache, *places: Any) -> tuple[np.ndarray, Cache]:
        held = np.asarray(cache.lengths) + counts
        logits, cache = run(self.model, jnp.asarray(tokens, jnp.int32), jnp.asarray(counts), *places, cache)
        if (np.asarray(cache.lengths) != held).any():
            raise AssertionError(
                f"After a step rows should hold {held.tolist()} tokens, but the model returns a cache with "
                f"{cache.lengths.tolist()}: do not call jaxkv.extend in it, its caller does. {PAGE}"
            )
        return np.asarray(logits, np.float32), cache

    def _packed_step(self, model: Any, tokens: Any, counts: Any, places: Any, cache: Cache) -> Any:
        """Computes the logits at some packed tokens."""
        cache = extend(cache, counts)
        planned: dict[str, Any] = no_adapters(model, cache)
        if takes(model, "step"):
            planned["step"] = plan_step(cache, tokens.shape)
        if takes(model, "logits_at"):
            return model(tokens, cache=cache, logits_at=places, **planned)
        logits, cache = model(tokens, cache=cache, **planned)
        return logits[places], cache

    def _padded_step(self, model: Any, tokens: Any, counts: Any, cache: Cache) -> Any:
        """Computes the logits of each row's last token."""
        last, cache = jnp.maximum(counts - 1, 0), extend(cache, counts)
        if takes(model, "logits_at"):
            return model(tokens, cache=cache, logits_at=last, **no_adapters(model, cache))
        logits, cache = model(tokens, cache=cache, **no_adapters(model, cache))
        return jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0], cache


def _pad(tokens: np.ndarray, size: int) -> np.ndarray:
    return np.pad(tokens, (0, size - len(tokens)))


def _compare(logits: np.ndarray, wanted: np.ndarray, position: int, name: str, hint: str) -> None:
    """Raises AssertionError if logits differ by more than rounding does."""
    apart = float(np.max(np.abs(logits - wanted))) / (float(np.max(np.abs(wanted))) or 1.0)
    if not apart <= MOST_APART:
        raise AssertionError(
            f"The model's logits after token {position} of a row whose tokens come {name} differ from those of one "
            f"long row, by {apart:.2g} of the largest: {hint}. {PAGE}"
        )
