"""The model runner: sends steps to the device, and reads them when they are done."""

import collections
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.blocks.tables import extend
from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.checks import check
from jaxkv._core.state.device_arrays import abstract_array, delete
from jaxkv._core.state.multihost import put_replicated
from jaxkv._engine.programs.eviction import Remembered, make_memory, thin_program
from jaxkv._engine.programs.step import logits_at, step_program
from jaxkv._engine.programs.step_rows import (
    ADAPTER,
    COLUMN,
    COUNT,
    DUE,
    FROM_DEVICE,
    GUESSED,
    NUM_FIELDS,
    PROMPT,
    TOKEN,
    Hook,
    Result,
    StepVariant,
    new_memory,
    note_tokens,
)
from jaxkv._engine.requests.hook_args import Form, HookArgs
from jaxkv._engine.requests.request import RequestParams
from jaxkv._engine.requests.sampling import KINDS, Kind
from jaxkv._engine.requests.scheduler import ScheduledStep, Sequence
from jaxkv._engine.runner.cache_manager import CacheManager
from jaxkv._engine.runner.room import Mark

SMALLEST_STEP = 32  # tokens; smaller sizes would be more programs to compile, and hardly faster


class InFlightStep(NamedTuple):
    """One call of the step's program."""

    result: Result
    due: list[tuple[Sequence, int, int]]  # sequences, their rows, and numbers of new or of draft tokens
    steps: int
    verify: bool
    num_tokens: int
    mark: Mark  # of the room when it was sent
    began: float
    is_first: bool  # first of its shape: it may have been compiled
    # Of prompts that are scored: their requests, first positions, numbers of tokens, and where these are packed.
    scored: list[tuple[Any, int, int, int]]


class ModelRunner:
    """Sends the model's steps without waiting for the one before: tokens stay on the device, too."""

    def __init__(
        self,
        model: Any,
        cache_manager: CacheManager,
        hook: Hook | None,
        step_tokens: int,
        draft_tokens: int,
        branches: int = 1,
        hook_args: HookArgs | None = None,
        deterministic: bool = False,
    ):
        self.cache_manager, self.hook = cache_manager, hook
        self.hook_args = hook_args or HookArgs()
        # Flattening a model takes longer than a step.
        self.leaves, self.structure = jax.tree.flatten(model)
        self._program = step_program(
            jax.tree.structure(cache_manager.cache),
            self.structure,
            hook,
            cache_manager.prefix is None,
            deterministic,
            cache_manager.device.shared,
        )
        # Sizes of packed steps: few, since each is a program to compile. A step that fills a quarter of its slots takes
        # no longer on a chip, and on a CPU less than compiling another program.
        self.sizes = [step_tokens]
        while self.sizes[0] // 4 >= max(SMALLEST_STEP, cache_manager.config.max_seqs):
            self.sizes.insert(0, self.sizes[0] // 4)
        self._shapes: set[Any] = set()  # shapes called so far
        self._remembered = Remembered()
        if (eviction := cache_manager.eviction) is not None:
            self._remembered = make_memory(eviction, cache_manager.cache, self._one_token)
            self._thin = thin_program(jax.tree.structure(cache_manager.cache), eviction, self._remembered.asked)
        self.draft_tokens = draft_tokens  # the limit of draft tokens of a row
        self.guesses_trees = branches > 1
        self.steps = self.tokens = self.proposed = self.accepted = 0
        self.clear()

    def clear(self) -> None:
        """Forgets in-flight steps."""
        config = self.cache_manager.config
        self.flights: collections.deque[InFlightStep] = collections.deque()
        queries = self._remembered.zeros()
        memory = new_memory(config.max_seqs, config.max_seq_len, self.hook, queries)
        self._memory = put_replicated(memory, self.cache_manager.device.place)  # where steps return it, too
        self._fields = np.zeros((NUM_FIELDS, config.max_seqs), np.int32)  # of rows, see `_note`
        self._fields[TOKEN] = FROM_DEVICE
        self._packed: dict[int, Any] = {}  # of rows: see `_pack`
        self._idle_since = 0.0  # when the device was seen to finish

    def close(self) -> None:
        """Frees the device memory and the reference to the model."""
        self.release()
        self.leaves = []

    def release(self) -> None:
        """Frees the device memory until `clear`."""
        delete([[flight.result for flight in self.flights], self._memory])
        self.flights.clear()

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the model."""
        return self._model_leaves

    @leaves.setter
    def leaves(self, leaves: list[Any]) -> None:
        # Which of them are arrays is not asked in each step: that would take longer than looking at them.
        self._model_leaves, self._arrays = leaves, [x for x in leaves if isinstance(x, jax.Array)]
        self._are_dropped = False

    @property
    def has_parameters(self) -> bool:
        """Tells whether the model's parameters are there: a trainer may have donated them, or has them back."""
        return not self._are_dropped and not any(x.is_deleted() for x in self._arrays)

    def drop_parameters(self) -> None:
        """Lets go of the parameters; what programs are compiled for is remembered."""
        self.leaves = [abstract_array(x) if isinstance(x, jax.Array) else x for x in self.leaves]
        self._are_dropped = True

    @property
    def has_new_program(self) -> bool:
        """Tells whether the last step in flight may have been compiled for itself."""
        return bool(self.flights) and self.flights[-1].is_first

    def refuse_donated(self) -> None:
        """Raises RuntimeError if the parameters are gone, before anything is lost."""
        if not self.has_parameters:
            raise RuntimeError(
                "The parameters that this engine was given were donated to another program, or released, so it cannot "
                "go on with them; its requests and its cache are whole: engine.update(model) gives it the new ones."
            )

    def send(self, step: ScheduledStep, steps: int) -> list[tuple[Sequence, int, int]]:
        """Sends a step. Returns each sequence in it with its row and its number of tokens."""
        cache_manager = self.cache_manager
        cache_manager.make_room(step.blocks)
        work = [(s, s.row, n) for s, n in step.counts.items() if s.row is not None]
        work.sort(key=lambda item: item[1])  # packed tokens come row by row
        to_score = [s for s, _, _ in work if _is_scored(s)]
        is_decode = (steps > 1 or step.is_decode) and not to_score
        scored: list[tuple[Any, int, int, int]] = []
        tokens: list[int] = []
        parents: list[int] = []  # parent of each token, counted from its row's first
        # Of each row. Lists, for numpy takes longer for one number than for a list.
        size = cache_manager.config.max_seqs
        counts, is_due, next_tokens, num_guesses = [0] * size, [False] * size, [FROM_DEVICE] * size, [0] * size
        for sequence, row, count in work:
            if not sequence.is_noted:
                self._note(sequence, row)
            length = sequence.length
            end = min(sequence.cached + count, length)
            given = sequence.tokens[sequence.cached : end]
            given += [FROM_DEVICE] * (end - sequence.cached - len(given))
            guesses = sequence.guesses[: count - len(given)]
            if self.guesses_trees:
                parents += range(-1, len(given) - 1)
                parents += [len(given) + parent for parent in sequence.parents[: len(guesses)]]
            counts[row], is_due[row], num_guesses[row] = count, end == length, len(guesses)
            if sequence in to_score:
                scored.append((sequence.request, sequence.cached, len(given), len(tokens)))
            if is_decode:
                next_tokens[row] = given[0]
            else:
                tokens += given
                tokens += guesses
        form, rows = self.hook_args.form, self._rows()
        rows[COUNT], rows[DUE], rows[TOKEN] = counts, is_due, next_tokens
        if has_guesses := any(num_guesses):
            rows[GUESSED] = num_guesses
        if form is not None:
            for sequence, row, _ in work:
                rows[NUM_FIELDS:, row] = self._pack(sequence, row, form)
        packed = targets = None
        prompt_count = 0
        if not is_decode:
            packed = np.zeros(next(size for size in self.sizes if size >= len(tokens)), np.int32)
            packed[: len(tokens)] = tokens
            if self.guesses_trees and has_guesses:
                packed = np.stack([packed, np.full_like(packed, -1)])
                packed[1, : len(tokens)] = parents
        if scored:
            assert packed is not None
            targets = np.full(packed.shape[-1], -1, np.int32)
            for request, first, count, begin in scored:
                following = request.prompt[first + 1 : first + 1 + count]
                targets[begin : begin + len(following)] = following
            prompt_count = count_likeliest(*(request.shared_scores.num_likeliest or None for request, *_ in scored))
        variant = StepVariant(
            kind=KINDS[max(sequence.request.kind for sequence, _, _ in work)],
            count=count_likeliest(*(sequence.request.params.num_logprobs for sequence, _, _ in work)),
            steps=steps,
            verify=(verify := self.draft_tokens if has_guesses else 0),
            form=form,
            prompt_count=prompt_count,
        )
        began = time.perf_counter()
        shape = (packed is not None and packed.shape[-1], variant, targets is None)
        result = self._call(rows, packed, variant, targets)
        own = num_guesses if verify else counts if is_decode else [1] * size
        due = [(s, row, own[row]) for s, row, _ in work if is_due[row]]
        is_first, width = shape not in self._shapes, max(steps, verify + 1)
        self.flights.append(
            InFlightStep(
                result, due, width, verify > 0, step.num_tokens, cache_manager.room.mark(), began, is_first, scored
            )
        )
        self._shapes.add(shape)
        self.steps, self.tokens = self.steps + steps, self.tokens + step.num_tokens
        return work

    def thin(self, sequences: list[Sequence]) -> None:
        """Evicts tokens of the rows of sequences, after the step that was sent last."""
        if sequences:
            rows = [s.row for s in sequences if s.row is not None]
            due = np.isin(np.arange(self.cache_manager.config.max_seqs), rows)
            self.cache_manager.call(self._thin, due, self._memory.queries)

    def read(self) -> list[tuple[Sequence, list[tuple[int, dict[int, float] | None]]]]:
        """Waits for the oldest in-flight step; returns each sequence's new tokens and any log-probabilities."""
        flight = self.flights[0]
        has_waited = not flight.result.numbers.is_ready()
        numbers = np.asarray(flight.result.numbers).tolist()
        now = time.perf_counter()
        max_seqs = self.cache_manager.config.max_seqs
        size = flight.steps * max_seqs
        tokens, rest, due = numbers[:size], numbers[size:], flight.due
        if flight.verify:
            taken, rest = rest[:max_seqs], rest[max_seqs:]
            due = [self._note_accepted(*item, taken[item[1]]) for item in due]
        room = [rest[i : i + 2] for i in range(0, len(rest), 2)]
        # An upper bound: it is unknown when the device finished, if it was done before this.
        seconds = (now - max(flight.began, self._idle_since)) / flight.num_tokens
        self._idle_since = now if has_waited else 0.0
        self.cache_manager.note_computed(room, flight.mark, None if flight.is_first else seconds)
        if min(tokens) < 0:  # the scheduler counts blocks as the cache does: this would be a bug
            check(self.cache_manager.cache)
        likely: Any = flight.result.likeliest and [
            np.asarray(x).reshape(flight.steps, max_seqs, -1) for x in flight.result.likeliest
        ]
        scores = [np.asarray(x) for x in flight.result.scores]
        self.flights.popleft()
        for request, first, count, begin in flight.scored:
            request.shared_scores.note(first, *(x[begin : begin + count] for x in scores))
        return [
            (
                sequence,
                [
                    (tokens[i * max_seqs + row], likely and _logprobs(likely, i, row, sequence.request.params))
                    for i in range(count)
                ],
            )
            for sequence, row, count in due
        ]  # fmt: skip

    def _note_accepted(self, sequence: Sequence, row: int, guessed: int, taken: int) -> tuple[Sequence, int, int]:
        """Records how many of a sequence's draft tokens are accepted."""
        self.proposed, self.accepted = self.proposed + guessed, self.accepted + taken - 1
        sequence.cached, sequence.unread = sequence.cached + taken - 1, sequence.unread + taken - 1
        return sequence, row, taken

    def warm(self, kinds: tuple[Kind, ...], counts: tuple[int, ...], steps: tuple[int, ...]) -> list[Any]:
        """Returns functions that compile the programs of all steps when called in order."""
        form = self.hook_args.form
        rows = self._rows()
        shapes = [(None, n) for n in steps] + [(np.zeros(size, np.int32), 1) for size in self.sizes]
        programs = [(*shape, 0) for shape in shapes]
        if self.draft_tokens:
            lines = (2,) if self.guesses_trees else ()
            programs += [(np.zeros((*lines, size), np.int32), 1, self.draft_tokens) for size in self.sizes]
        calls: list[Any] = [
            functools.partial(self._call, rows, tokens, StepVariant(kind, count, steps, verify, form))
            for tokens, steps, verify in programs
            for kind in kinds
            for count in counts
        ]
        if self.hook is not None:
            no_row = self.cache_manager.config.max_seqs  # whose tokens go nowhere: others may be running
            calls.append(functools.partial(self._note_tokens, no_row, []))
        if self.cache_manager.eviction is not None:
            calls.append(lambda: self.cache_manager.call(self._thin, rows[COUNT] > 0, self._memory.queries))
        return calls

    def _call(
        self, rows: np.ndarray, tokens: np.ndarray | None, variant: StepVariant, targets: np.ndarray | None = None
    ) -> Result:
        numbers, *out = self.cache_manager.call(
            self._program, self.leaves, self._memory, rows, tokens, targets, variant=variant
        )
        structure: Any = jax.tree.structure(self._memory)
        memory, more = out[: structure.num_leaves], out[structure.num_leaves :]
        self._memory = jax.tree.unflatten(structure, memory)
        for x in (numbers, *more):
            x.copy_to_host_async()
        likely = (more.pop(0), more.pop(0)) if variant.count else None
        return Result(numbers, self._memory, likely, tuple(more))

    def _one_token(self, cache: Cache) -> Any:
        """Runs the model on one token of each row."""
        tokens = jnp.zeros((cache.config.max_seqs, 1), jnp.int32)
        cache = extend(cache, jnp.ones(cache.config.max_seqs, jnp.int32))
        model = jax.tree.unflatten(self.structure, self.leaves)
        return logits_at(model, tokens, cache, jnp.zeros(cache.config.max_seqs, jnp.int32))

    def _rows(self) -> np.ndarray:
        """Returns the step's input for idle rows; a new array, since JAX may keep it."""
        form = self.hook_args.form
        if form is None:
            return self._fields.copy()
        return np.concatenate([self._fields, np.zeros((len(form.pack(None)), self._fields.shape[1]), np.int32)])

    def _pack(self, sequence: Sequence, row: int, form: Form) -> np.ndarray:
        """Returns the numbers of a row's request for the hook, packed once for all of its steps."""
        request, known, bits = self._packed.get(row, (None, None, None))
        if request is not sequence.request or known is not form:
            bits = form.pack(sequence.request.params.hook_args)
            self._packed[row] = sequence.request, form, bits
        return bits

    def _note(self, sequence: Sequence, row: int) -> None:
        """Notes what is the same in all steps of a sequence while it has the row."""
        fields = self._fields
        fields[COLUMN, row] = sequence.request.column
        fields[PROMPT, row], fields[ADAPTER, row] = sequence.prompt, sequence.adapter
        if self.hook is not None:
            self._note_tokens(row, sequence.tokens)
        sequence.is_noted = True

    def _note_tokens(self, row: int, tokens: list[int]) -> None:
        padded = np.zeros(self.cache_manager.config.max_seq_len, np.int32)
        padded[: len(tokens)] = tokens
        self._memory = note_tokens(self._memory, np.int32(row), padded)


def _is_scored(sequence: Sequence) -> bool:
    """Tells whether log-probabilities of a prompt come from the next step of a sequence; not of a step in flight."""
    return sequence.needs_scores and sequence.cached < sequence.prompt - 1


def count_likeliest(*wanted: int | None) -> int:
    """Returns the number of likeliest tokens that a step computes: a power of 2, so that there are few programs; 0 if
    nobody wants log-probabilities, not even of the chosen tokens."""
    most = max((max(n, 1) for n in wanted if n is not None), default=0)
    return most and 1 << (most - 1).bit_length()


def _logprobs(likely: Any, step: int, row: int, params: RequestParams) -> dict[int, float] | None:
    if params.num_logprobs is None:
        return None
    values, tokens = (x[step, row, : 1 + params.num_logprobs].tolist() for x in likely)
    return dict(zip(tokens[1:], values[1:], strict=True)) | {tokens[0]: values[0]}
