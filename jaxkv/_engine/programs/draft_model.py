"""Speculative decoding by a draft model with its own cache."""

import functools
import math
from collections.abc import Callable, Sequence as Several
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxkv._core.blocks.sharing import truncate
from jaxkv._core.blocks.tables import extend
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.config.block_size import BLOCK_SIZE
from jaxkv._core.config.cache_config import CacheConfig
from jaxkv._core.config.layer_config import count_tokens_of_entries
from jaxkv._core.config.mesh_shape import find_mesh
from jaxkv._core.state.device_arrays import delete
from jaxkv._core.state.interrupts import Soundness
from jaxkv._core.state.multihost import find_shared_placement
from jaxkv._core.state.sharding import share
from jaxkv._engine.programs.cache_program import cache_program
from jaxkv._engine.programs.model import check_shapes
from jaxkv._engine.programs.step import logits_at
from jaxkv._engine.requests.drafters import Drafter, DraftTokens, NGramDrafter
from jaxkv._engine.requests.sampling import FIELDS, KINDS, Kind, Sampling, choose
from jaxkv._engine.requests.scheduler import Sequence

# What programs are told of each row: how many tokens stay, how many are new, its adapter and its `Choice`.
LENGTH, FED, ADAPTER, COLUMN = 0, 1, 2, slice(3, 3 + FIELDS)


class DraftRow:
    """The contents of a row of the draft's cache: the first tokens of a sequence, then draft tokens."""

    def __init__(self, can_roll_back: bool = True) -> None:
        self._can_roll_back = can_roll_back
        self.tokens: list[int] = []  # the sequence's own list, which only grows
        self.adapter = 0  # with which they were computed
        self.count = 0  # how many of these are held
        self.guesses: list[int] = []

    def __len__(self) -> int:
        return self.count + len(self.guesses)

    def follow(self, tokens: list[int], adapter: int = 0) -> None:
        """Truncates to the common prefix with a sequence's tokens, if its adapter is the same. The last token is always
        fed again: the drafts follow from its logits. Tokens that were compared before are not compared again."""
        most = len(tokens) - 1
        held = len(self)
        if adapter != self.adapter:
            self.adapter, self.count, self.guesses = adapter, 0, []
        if tokens is not self.tokens:  # another sequence has come into this row
            common = _common(self.tokens[: self.count], tokens)
            self.guesses = self.guesses if common == self.count else []
            self.tokens, self.count = tokens, common
        ahead = tokens[self.count : self.count + len(self.guesses)]
        count = min(most, self.count + _common(self.guesses, ahead))
        self.count, self.guesses = count if self._can_roll_back or count == held else 0, []


class ModelDrafter:
    """Drafts tokens by running a smaller model ahead.

    Its rows follow the engine's: before drafting, each is truncated to the common prefix with its sequence, and fed the
    missing tokens. So it needs no notice of rows that are freed, forked, swapped or preempted; wrong contents cost
    time, never a token. It has room for all rows at their longest. Rows with states of recurrent layers cannot be
    truncated: they forget their drafts at once, and begin anew where a sequence is another.
    """

    def __init__(self, model: Any, *, max_seqs: int, max_seq_len: int, step_tokens: int, count: int):
        sizes: dict[str, Any] = {"max_seqs": max_seqs, "max_seq_len": max_seq_len + count}
        # Drafts are rolled back further than windows would allow: a contiguous cache keeps everything.
        if any(layer.retention.visible_tokens is not None for layer in model.layer_configs):
            # Kernels read no block of any size.
            size = math.lcm(BLOCK_SIZE, count_tokens_of_entries(model.layer_configs))
            whole = -(-sizes["max_seq_len"] // size) * size
            sizes |= {"layout": "contiguous", "max_seq_len": whole}
        self.config = CacheConfig.from_model(model, **sizes)
        self._can_roll_back = not self.config.recurrent_layers
        # The tokens that it lacks after a step in which all drafts were accepted.
        self.few = 2 if self._can_roll_back else count + 1
        self.leaves, self.structure = jax.tree.flatten(model)
        self.step_tokens, self.count, self.mesh = step_tokens, count, find_mesh(self.leaves)
        empty = jax.eval_shape(lambda: init(self.config, mesh=self.mesh))
        place = find_shared_placement(self.mesh)
        self._program = draft_program(jax.tree.structure(empty), self.structure, place)
        self._soundness = Soundness(is_kept=False)  # of what follows: the cache is allocated with the first call
        self._cache: list[jax.Array] = []
        self._draft_rows: list[DraftRow] = []  # of each row

    def guess(self, sequences: Several[Sequence], count: int) -> list[DraftTokens]:
        if not sequences:
            return []
        self._make_sound()
        with self._soundness:
            for sequence in sequences:
                self._find_row(sequence).follow(sequence.tokens, sequence.adapter)
            while self._feed(sequences):
                pass
            rows = self._rows()
            tokens = np.zeros((self.config.max_seqs, self.few), np.int32)
            for sequence in sequences:
                row, missing = sequence.row, sequence.tokens[len(self._find_row(sequence)) :]
                tokens[row, : len(missing)] = missing
                rows[FED, row], rows[COLUMN, row] = len(missing), sequence.request.column
            kind = KINDS[max(sequence.request.kind for sequence in sequences)]
            chosen = np.asarray(self._call(rows, tokens, kind, self.count))
            guesses = [chosen[:, sequence.row].tolist() for sequence in sequences]
            for sequence, guessed in zip(sequences, guesses, strict=True):
                of_row = self._find_row(sequence)
                of_row.count, of_row.guesses = len(sequence.tokens), guessed[:-1] if self._can_roll_back else []
        return [DraftTokens.chain(guessed[:count]) for guessed in guesses]

    def warm(self) -> list[Callable[[], Any]]:
        def call(shape: tuple[int, ...], kind: Kind, count: int) -> None:
            self._make_sound()
            self._call(self._rows(), np.zeros(shape, np.int32), kind, count)

        shapes = [((self.config.max_seqs, self.few), kind, self.count) for kind in KINDS]
        return [functools.partial(call, *arguments) for arguments in [((self.step_tokens,), KINDS[0], 0), *shapes]]

    def update(self, leaves: list[Any]) -> None:
        """Goes on with other weights: rows are empty, since drafts by what older ones computed would be refused."""
        self._draft_rows = self._make_rows()
        self.leaves = leaves

    def release(self) -> None:
        delete(self._cache)
        self._soundness.begin()
        self._cache, self._draft_rows = [], []

    def close(self) -> None:
        self.release()
        self.leaves = []

    def _find_row(self, sequence: Sequence) -> DraftRow:
        assert sequence.row is not None
        return self._draft_rows[sequence.row]

    def _make_sound(self) -> None:
        if not self._soundness.is_kept:
            self._cache = jax.tree.leaves(init(self.config, mesh=self.mesh))
            self._draft_rows = self._make_rows()
            self._soundness.end()

    def _make_rows(self) -> list[DraftRow]:
        return [DraftRow(self._can_roll_back) for _ in range(self.config.max_seqs)]

    def _feed(self, sequences: Several[Sequence]) -> bool:
        """Feeds rows that lack many tokens some of them; tells whether there were any."""
        rows, packed = self._rows(), list[int]()
        for sequence in sorted(sequences, key=lambda s: s.row or 0):
            row = sequence.row
            assert row is not None
            held = len(self._draft_rows[row])
            count = min(len(sequence.tokens) - 1 - held, self.step_tokens - len(packed))
            if len(sequence.tokens) - held > self.few and count:
                packed += sequence.tokens[held : held + count]
                rows[FED, row] = count
        if not packed:
            return False
        tokens = np.zeros(self.step_tokens, np.int32)
        tokens[: len(packed)] = packed
        self._call(rows, tokens, KINDS[0], 0)
        for sequence in sequences:
            self._find_row(sequence).count += int(rows[FED, sequence.row])
        return True

    def _rows(self) -> np.ndarray:
        rows = np.zeros((COLUMN.stop, self.config.max_seqs), np.int32)
        rows[LENGTH] = [len(row) for row in self._draft_rows]
        rows[ADAPTER] = [row.adapter for row in self._draft_rows]
        return rows

    def _call(self, rows: np.ndarray, tokens: np.ndarray, kind: Kind, count: int) -> jax.Array:
        (chosen,), self._cache = self._program(self._cache, self.leaves, rows, tokens, kind=kind, count=count)
        return chosen


def make_drafter(draft: Any, config: CacheConfig, step_tokens: int, count: int, branches: int) -> Drafter | None:
    """Makes the drafter of an engine with a cache like this; see `check_draft`."""
    if draft is None:
        return None
    if isinstance(draft, str):
        return NGramDrafter(branches)
    return ModelDrafter(
        draft, max_seqs=config.max_seqs, max_seq_len=config.max_seq_len, step_tokens=step_tokens, count=count
    )


def check_draft(drafter: Drafter | None, draft: Any, vocab_size: int | None) -> None:
    """Raises ValueError for a draft model that fails, or has other tokens than a model with so many."""
    if not isinstance(drafter, ModelDrafter):
        return
    try:
        theirs = check_shapes(draft, drafter.config, is_divided=drafter.mesh is not None)
    except ValueError as error:
        raise ValueError(f"draft cannot guess tokens: {error}") from error
    if None not in (theirs, vocab_size) and theirs != vocab_size:
        raise ValueError(
            f"draft has a vocabulary of {theirs} tokens, but the model one of {vocab_size}: a token must mean the same "
            "to both."
        )


def _common(known: list[int], tokens: list[int]) -> int:
    """Returns the length of the common prefix of two lists."""
    if known[: len(tokens)] == tokens[: len(known)]:
        return min(len(known), len(tokens))
    return next(i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b)


@functools.lru_cache(maxsize=16)
def draft_program(structure: Any, model: Any, place: NamedSharding | None = None) -> Any:
    """Compiles a program that truncates rows, feeds tokens, packed or `[S, few]`, and drafts `count` tokens, whole on
    `place` as in `share`."""

    def program(cache: Cache, leaves, rows, tokens, *, kind: Kind, count: int):
        draft, sampling = jax.tree.unflatten(model, leaves), Sampling.unpack(rows[COLUMN])
        fed, adapters = rows[FED], rows[ADAPTER]

        def guess(logits: jax.Array, cache: Cache) -> jax.Array:  # where there is no choice, any token does
            return jnp.maximum(choose(kind, logits.astype(jnp.float32), sampling, cache.lengths), 0)

        cache = extend(truncate(cache, rows[LENGTH]), fed)
        places = jnp.maximum((jnp.cumsum(fed) if tokens.ndim == 1 else fed) - 1, 0)
        logits, cache = logits_at(draft, tokens, cache, places, adapters=adapters)
        if not count:
            return share(jnp.zeros((0, fed.shape[0]), jnp.int32), place), cache
        first = guess(logits, cache)

        def go_on(carry, _):
            cache, last = carry
            cache = extend(cache, (fed > 0).astype(jnp.int32))
            logits, cache = logits_at(draft, last[:, None], cache, jnp.zeros_like(last), adapters=adapters)
            chosen = guess(logits, cache)
            return (cache, chosen), chosen

        (ahead, _), others = jax.lax.scan(go_on, (cache, first), length=count - 1)
        # States have no way back: of the drafts nothing stays but what they wrote into blocks that are free again.
        cache = ahead if cache.state_slots is None else cache.replace(pools=ahead.pools)
        return share(jnp.concatenate([first[None], others]), place), cache

    return cache_program(structure, program, static=("kind", "count"))
