"""The programs that an engine runs on the device: one step of every row, or several decode steps at once."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.attention.plan import plan_step, positions
from jaxkv._core.blocks.speculative import keep_guesses, revert_guesses, revert_tokens
from jaxkv._core.blocks.state_slots import drop_guesses
from jaxkv._core.blocks.tables import extend, release_windows
from jaxkv._core.config.validation import MOST_INDEX, show
from jaxkv._core.state.arguments import to_device
from jaxkv._engine.programs.cache_program import cache_program
from jaxkv._engine.programs.eviction import record_queries_of_step
from jaxkv._engine.programs.maintenance import measure_room
from jaxkv._engine.programs.model import ADAPTERS, takes
from jaxkv._engine.programs.program_cache import share_programs
from jaxkv._engine.requests.hook_args import Form, HookArgs
from jaxkv._engine.requests.sampling import FIELDS, Kind, Sampling, SamplingParams, choose, likeliest

# The host's fields of each row, as one array: its tokens in this step, whether the token after them is wanted, its next
# token (FROM_DEVICE: the one chosen last), `SamplingParams.column`, its number of draft tokens, the length of its
# prompt, and its adapter. Then come the numbers of a request for the hook, as its `Form` packs them.
COUNT, DUE, TOKEN, COLUMN, GUESSED, PROMPT = 0, 1, 2, slice(3, 3 + FIELDS), 3 + FIELDS, 4 + FIELDS
ADAPTER = PROMPT + 1
NUM_FIELDS = ADAPTER + 1
FROM_DEVICE = -1


class StepRows(NamedTuple):
    """The input of a logits hook for each row.

    A row's tokens are padded with a number that is no token: JAX drops scatters to indices out of range.
    """

    tokens: jax.Array  # i32[S, max_seq_len]: prompt and output so far
    lengths: jax.Array  # i32[S]
    numbers: jax.Array  # i32[S]: of their requests
    prompt_lengths: jax.Array  # i32[S]: how many of the tokens are the prompt
    hook_args: Any  # of the requests, each leaf [S, ...]; zeros for requests without any; None if none has any
    adapters: Any = None  # i32[S]: of the requests; 0 of who named none


class Asked(NamedTuple):
    """The host's fields of each row, unpacked."""

    sampling: Sampling
    prompt_lengths: jax.Array  # i32[S]
    hook_args: Any
    adapters: jax.Array  # i32[S]

    @classmethod
    def unpack(cls, rows: jax.Array, form: Form | None) -> "Asked":
        """Unpacks `rows`, the argument of a step's program."""
        hook_args = None if form is None else form.unpack(rows[NUM_FIELDS:])
        return cls(Sampling.unpack(rows[COLUMN]), rows[PROMPT], hook_args, rows[ADAPTER])


Hook = Callable[[jax.Array, StepRows], jax.Array]


class StepMemory(NamedTuple):
    """State on the device from step to step, beside the cache."""

    last: jax.Array  # i32[S]: the token chosen last for each row
    tokens: jax.Array | None  # i32[S, max_seq_len]: those of each row, where a hook wants them
    queries: tuple[jax.Array, ...] = ()  # [S, W, H, D] of each layer that evicts, if its score needs them
    scores: jax.Array | None = None  # within a step: see `Result`


class Result(NamedTuple):
    """The result of n steps beside the cache."""

    # i32[n * S (+ S) + 2 * groups]: the tokens chosen, -1 where a row's tokens did not fit; of a step that verifies
    # also how many of them count; the room left.
    numbers: Any
    memory: StepMemory
    likeliest: tuple[jax.Array, jax.Array] | None  # f32 and i32 [n, S, 1 + count]: see `likeliest`
    scores: Any = None  # f32[N]: the log-probability of each packed token's target, if there are targets


@share_programs
def step_program(structure: Any, model: Any, hook: Hook | None, leave: bool, deterministic: bool = False) -> Any:
    """Compiles the step of a model and a cache given as structures of pytrees: engines with equal ones share it.

    A `cache_program` with the arguments `leaves, memory, rows, tokens, kind=, count=, steps=`: the model's leaves,
    `rows` i32[NUM_FIELDS + n, S] with the hook's n numbers by their `form`, packed `tokens` i32[N], or None for one or
    several steps of one token per row; `count` likeliest tokens are returned. The memory is donated too, and the result
    is a `Result`. With `verify`, up to `verify` last tokens of a row may be drafts; the result is that of `verify + 1`
    steps. For trees, `tokens` is i32[2, N], with each token's parent, counted from its row's first, below it. With
    `targets` i32[N], negative for none, packed tokens are scored: the logits of all of them are computed then.
    """

    def program(
        cache, leaves, memory, rows, tokens, targets=None, *, kind: Kind, count: int, steps: int, verify: int = 0,
        form=None,
    ):  # fmt: skip
        inner = functools.partial(_verify, verify, rows[GUESSED]) if verify else _step
        if tokens is not None and tokens.ndim == 2:
            tokens, parents = tokens
            inner = functools.partial(_verify_trees, verify, rows[GUESSED], parents)
        asked = Asked.unpack(rows, form)
        answer = functools.partial(
            logits_at, jax.tree.unflatten(model, leaves), cascade=not (leave or deterministic), adapters=asked.adapters,
            deterministic=deterministic,
        )  # fmt: skip
        run = functools.partial(_run, answer, targets=targets)
        step = functools.partial(inner, run, hook, asked, kind, count, leave)
        counts, due, given = rows[COUNT], rows[DUE] != 0, rows[TOKEN]
        if tokens is None:
            memory = memory._replace(last=jnp.where(given == FROM_DEVICE, memory.last, given))

            def decode(carry, i):
                cache, memory = carry
                active = i < counts
                out, cache, memory = step(cache, memory, memory.last[:, None], active.astype(jnp.int32), active)
                return (cache, memory), out

            if steps > 1:
                (cache, memory), out = jax.lax.scan(decode, (cache, memory), jnp.arange(steps, dtype=jnp.int32))
            else:
                (cache, memory), out = decode((cache, memory), jnp.int32(0))
        else:
            row = row_of(counts, tokens.shape[0])
            tokens = jnp.where(tokens == FROM_DEVICE, memory.last[jnp.minimum(row, counts.shape[0] - 1)], tokens)
            out, cache, memory = step(cache, memory, tokens, counts, due)
        chosen, likely = out
        numbers = jnp.concatenate([*(x.ravel() for x in jax.tree.leaves(chosen)), measure_room(cache).ravel()])
        return Result(numbers, memory._replace(scores=None), likely, memory.scores), cache

    return cache_program(structure, program, donate=(2,), static=("kind", "count", "steps", "verify", "form"))


def _step(run, hook, asked, kind, count, leave, cache, memory, tokens, counts, due):
    """Computes one step of every row: the token after each row's last, and the likeliest ones there."""
    places = jnp.zeros_like(counts) if tokens.ndim == 2 else jnp.maximum(jnp.cumsum(counts) - 1, 0)
    logits, cache, memory = run(cache, memory, tokens, counts, places)
    chosen, likely = _chosen(logits, hook, asked, kind, count, memory, cache.lengths)
    cache, memory = _ended(cache, memory, chosen, due, leave)
    return (jnp.where(cache.failed, -1, chosen), likely), cache, memory


def _verify(most, guessed, run, hook, asked, kind, count, leave, cache, memory, tokens, counts, due):
    """Computes one step of every row, whose last `guessed[s]` tokens are drafts. Accepts them up to the first that
    differs from the token chosen there, and rolls the others back. Then comes the token chosen instead of the first
    wrong one, or after all."""
    number = jnp.arange(most + 1, dtype=jnp.int32)[:, None]
    behind = jnp.maximum(guessed[None] - number, 0)  # i32[most + 1, S]: guesses that follow each token
    places = jnp.maximum(jnp.cumsum(counts)[None] - 1 - behind, 0)
    logits, cache, memory = run(cache, memory, tokens, counts, places.ravel(), guesses=guessed > 0)
    lengths = (cache.lengths[None] - behind).ravel()
    wide, known = jax.tree.map(lambda x: jnp.concatenate([x] * (most + 1)), (asked, memory))
    chosen, likely = _chosen(logits, hook, wide, kind, count, known, lengths)
    chosen = chosen.reshape(places.shape)
    guesses = tokens[jnp.minimum(places + 1, tokens.shape[0] - 1)]
    is_right = (number < guessed[None]) & (chosen == guesses)
    accepted = jnp.sum(jnp.cumprod(is_right.astype(jnp.int32), axis=0), axis=0, dtype=jnp.int32)
    last = jnp.take_along_axis(chosen, accepted[None], axis=0)[0]
    cache = _take_back(run, cache, memory, tokens, counts, guessed, accepted, most)
    cache, memory = _ended(cache, memory, last, due, leave)
    if likely is not None:
        likely = jax.tree.map(lambda x: x.reshape(*places.shape, -1), likely)
    return ((jnp.where(cache.failed[None], -1, chosen), accepted + 1), likely), cache, memory


def _take_back(run, cache, memory, tokens, counts, guessed, accepted, most):
    """Drops the guesses of each row that were not accepted. A model that writes states itself computes what such rows
    keep once more, from the states before the step."""
    if cache.state_slots is None:
        return revert_tokens(cache, guessed - accepted)
    if not cache.state_slots.guesses.written_by_hand:
        return revert_guesses(cache, guessed - accepted, most + 1)  # a row has one token that is no guess
    again = guessed > 0
    kept = jnp.where(again, counts - guessed + accepted, 0)
    row = row_of(kept, min(tokens.shape[0], kept.shape[0] * (most + 1)))
    starts, begin = (jnp.cumsum(x, dtype=jnp.int32) - x for x in (kept, counts))
    places = jnp.arange(row.shape[0], dtype=jnp.int32) + (begin - starts)[jnp.minimum(row, kept.shape[0] - 1)]
    cache = drop_guesses(revert_tokens(cache, jnp.where(again, counts, 0)))
    return run(cache, memory, tokens.at[places].get(mode="clip"), kept, jnp.zeros_like(kept), targets=None)[1]


def _verify_trees(most, guessed, parents, run, hook, asked, kind, count, leave, cache, memory, tokens, counts, due):
    """Does `_verify` for trees of draft tokens: accepts the path of each row along which every token is the one chosen
    after its parent. Numbers count from the row's last given token, which is 0."""
    number = jnp.arange(most + 1, dtype=jnp.int32)[:, None]
    first = jnp.maximum(jnp.cumsum(counts) - 1 - guessed, 0)[None]
    places = first + jnp.minimum(number, guessed[None])
    parent = jnp.clip(parents[places] - (counts - 1 - guessed)[None], 0, most)
    logits, cache, memory = run(cache, memory, tokens, counts, places.ravel(), tree=parents)

    def at(x, numbers):
        return jnp.take_along_axis(x, numbers, axis=0)

    def climb(i, depth):
        return depth.at[i].set(at(depth, parent[i][None])[0] + 1)

    depth = jax.lax.fori_loop(1, most + 1, climb, jnp.zeros_like(places))
    lengths = ((cache.lengths - guessed)[None] + depth).ravel()
    wide = jax.tree.map(lambda x: jnp.concatenate([x] * (most + 1)), asked)
    chosen, likely = _chosen(logits, hook, wide, kind, count, memory, lengths)
    chosen = chosen.reshape(places.shape)
    is_right = (number > 0) & (number <= guessed[None]) & (at(chosen, parent) == tokens[places])

    def follow(i, on_path):
        return on_path.at[i].set(is_right[i] & at(on_path, parent[i][None])[0])

    on_path = jax.lax.fori_loop(1, most + 1, follow, jnp.broadcast_to(number == 0, places.shape))
    accepted = jnp.sum(on_path, axis=0, dtype=jnp.int32) - 1
    path = jnp.sort(jnp.where(on_path, number, most + 1), axis=0)  # numbers grow along it
    there = number <= accepted[None]
    path = jnp.where(there, path, 0)
    chosen = at(chosen, path)
    last = at(chosen, accepted[None])[0]
    cache = keep_guesses(cache, jnp.where(there, path - 1, -1)[1:].T, guessed)
    cache, memory = _ended(cache, memory, last, due, leave)
    if likely is not None:
        likely = jax.tree.map(lambda x: at(x.reshape(*places.shape, -1), path[..., None]), likely)
    return ((jnp.where(cache.failed[None], -1, chosen), accepted + 1), likely), cache, memory


def _run(answer, cache, memory, tokens, counts, places, tree=None, guesses=None, targets=None):
    """Computes and records a step of every row, some of which guess; returns the logits at some tokens."""
    asked = places if targets is None else jnp.arange(tokens.shape[0], dtype=jnp.int32)
    cache = extend(cache, counts, guesses=guesses)
    rows = rows_of(tokens, counts)
    if memory.tokens is not None:
        noted = memory.tokens.at[rows, positions(cache, tokens.shape)].set(tokens, mode="drop")
        memory = memory._replace(tokens=noted)
    (logits, cache), queries = record_queries_of_step(
        memory.queries, cache, lambda: answer(tokens, cache, asked, tree=tree), rows, tokens.shape
    )
    if targets is not None:
        memory, logits = memory._replace(scores=_score(logits, targets)), logits[places]
    return logits, cache, memory._replace(queries=queries)


def _score(logits, targets):
    """Returns `f32[N]`: the log-probabilities of `targets` i32[N]; of those that are negative any number."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)


def _ended(cache, memory, last, due, leave):
    """Returns the state for the next step."""
    cache = release_windows(cache) if leave else cache
    return cache, memory._replace(last=jnp.where(due, last, memory.last))


def _chosen(logits, hook, asked, kind, count, memory, lengths):
    """Chooses the token after each of some lengths, and returns the likeliest ones there."""
    logits = wanted = logits.astype(jnp.float32)
    if hook is not None:
        wanted = hooked(hook, logits, rows_so_far(memory.tokens, lengths, asked))
    chosen = choose(kind, wanted, asked.sampling, lengths)
    return chosen, likeliest(logits, chosen, count) if count else None


def logits_at(model, tokens, cache, places, cascade=False, tree=None, adapters=None, deterministic=False):
    """Returns the logits of some tokens, one of each row if padded; computes only these if the model can, since those
    of a prompt are large. `cascade`: rows of a common prefix read it once, if the model takes a planned step.
    `adapters` i32[S]: those of the rows, for a model that takes them."""
    planned: dict = {"deterministic": True} if deterministic else {}
    if takes(model, ADAPTERS):
        planned[ADAPTERS] = jnp.zeros_like(cache.lengths) if adapters is None else adapters
    if (cascade or tree is not None) and takes(model, "step"):
        planned["step"] = plan_step(cache, tokens.shape, cascade=cascade, tree=tree)
    if takes(model, "logits_at"):
        return model(tokens, cache=cache, logits_at=places, **planned)
    logits, cache = model(tokens, cache=cache, **planned)
    return (logits[:, 0] if tokens.ndim == 2 else logits[places]), cache


def row_of(counts: jax.Array, num_tokens: int) -> jax.Array:
    """Returns `i32[N]`: the row of each packed token; S behind them all."""
    i = jnp.arange(num_tokens, dtype=jnp.int32)
    return jnp.searchsorted(jnp.cumsum(counts), i, side="right", method="compare_all").astype(jnp.int32)


def rows_of(tokens: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns i32, the row of each padded or packed token, `[S, 1]` or `[N]`; S for padding."""
    if tokens.ndim == 1:
        return row_of(counts, tokens.shape[0])
    return jnp.where(counts > 0, jnp.arange(counts.shape[0], dtype=jnp.int32), counts.shape[0])[:, None]


def read_hook(hook: Any) -> Any:
    """Returns a `Hook`, or None. Raises ValueError."""
    if hook is not None and not (callable(hook) and isinstance(hook, Hashable)):
        raise ValueError(f"logits_hook must be a function, hashable as functions are, or None, not {show(hook)}.")
    return hook


def rows_so_far(tokens: jax.Array, lengths: jax.Array, asked: Asked) -> StepRows:
    """Returns the hook's input for rows whose `tokens` i32[S, L] may hold anything behind their lengths."""
    known = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    return StepRows(jnp.where(known, tokens, MOST_INDEX), lengths, asked.sampling.numbers, *asked[1:])


def hooked(hook: Hook, logits: jax.Array, rows: StepRows) -> jax.Array:
    """Applies a hook to logits. Raises ValueError if the result is no logits."""
    wanted = hook(logits, rows)
    if getattr(wanted, "shape", None) != logits.shape:
        raise ValueError(
            f"logits_hook must return logits {list(logits.shape)}, as it is given, not "
            f"{list(jnp.shape(wanted)) if hasattr(wanted, 'shape') else type(wanted).__name__}."
        )
    return wanted.astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def note_tokens(memory: StepMemory, row: jax.Array, tokens: jax.Array) -> StepMemory:
    """Returns memory in which a row has these `i32[max_seq_len]` tokens."""
    assert memory.tokens is not None
    return memory._replace(tokens=memory.tokens.at[row].set(tokens))


def new_memory(max_seqs: int, max_seq_len: int, hook: Hook | None, queries: tuple[jax.Array, ...] = ()) -> StepMemory:
    """Returns the memory of empty rows."""
    tokens = None if hook is None else to_device(np.zeros((max_seqs, max_seq_len), np.int32))
    return StepMemory(to_device(np.zeros(max_seqs, np.int32)), tokens, queries)


@share_programs
def recompute_program(model: Any, hook: Hook | None, width: int) -> Any:
    """Compiles a program for the token that follows each of `i32[T]`, computed without a cache."""

    def program(leaves, tokens, column, *, kind, form):
        whole = jax.tree.unflatten(model, leaves)
        own = {ADAPTERS: column[ADAPTER][None]} if takes(whole, ADAPTERS) else {}
        logits, _ = whole(tokens[None], cache=None, **own)
        logits, count = logits[0].astype(jnp.float32), tokens.shape[0]
        lengths = jnp.arange(1, count + 1, dtype=jnp.int32)
        asked = Asked.unpack(jnp.broadcast_to(column[:, None], (column.shape[0], count)), form)
        if hook is not None:
            padded = jnp.pad(tokens, (0, max(0, width - count)))[:width]
            known = jnp.broadcast_to(padded[None], (count, padded.shape[0]))
            logits = hooked(hook, logits, rows_so_far(known, lengths, asked))
        return choose(kind, logits, asked.sampling, lengths)

    return jax.jit(program, static_argnames=("kind", "form"))


def column_of(
    choice: SamplingParams, number: int, prompt: int, adapter: int, leaves: list[np.ndarray] | None, hook_args: HookArgs
) -> tuple[np.ndarray, Form | None]:  # fmt: skip
    """Returns one column of a step's `rows`, for a request at its beginning, and the form of its last fields."""
    form = hook_args.form
    column = np.zeros(NUM_FIELDS, np.int32)
    column[COLUMN], column[PROMPT], column[ADAPTER] = choice.column(number), prompt, adapter
    return (column if form is None else np.concatenate([column, form.pack(leaves)])), form


def recompute(
    model: Any, leaves: list[Any], hook: Hook | None, width: int, tokens: list[int], column: np.ndarray, kind: Kind,
    form: Form | None = None,
) -> list[int]:  # fmt: skip
    """Computes the token that the model chooses after each of `tokens`, without any cache.

    Args:
      width: the engine's max_seq_len. column: one of a step's `rows`.
    """
    padded = np.zeros(1 << (len(tokens) - 1).bit_length(), np.int32)  # few shapes; padding is not seen
    padded[: len(tokens)] = tokens
    chosen = recompute_program(model, hook, width)(leaves, padded, column, kind=kind, form=form)
    return np.asarray(chosen)[: len(tokens)].tolist()
