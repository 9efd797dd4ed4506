"""What a step's program takes and returns: the host's fields of each row, and the state between steps."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import MOST_INDEX, show
from jaxkv._core.state.arguments import to_device
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
    # Of the requests, each leaf [S, ...]; of one without any those of `Engine(hook_args=)`, else zeros; None as long as
    # there are none.
    hook_args: Any
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
OF_HOOK = "It was raised by the engine's logits_hook."


class StepMemory(NamedTuple):
    """State on the device from step to step, beside the cache."""

    last: jax.Array  # i32[S]: the token chosen last for each row
    tokens: jax.Array | None  # i32[S, max_seq_len]: those of each row, where a hook wants them
    queries: tuple[jax.Array, ...] = ()  # [S, W, H, D] of each layer that evicts, if its score needs them
    scores: tuple[jax.Array, ...] = ()  # within a step: see `Result`


@dataclasses.dataclass(frozen=True)
class StepVariant:
    """What a step's program is compiled for, beside shapes."""

    kind: Kind  # what its rows need to choose tokens
    count: int  # likeliest tokens that are returned
    steps: int = 1  # of one token per row, in one call
    verify: int = 0  # last tokens of a row that may be drafts
    form: Form | None = None  # of the hook's numbers
    prompt_count: int = 0  # likeliest tokens at each position of a prompt that is scored


class Result(NamedTuple):
    """The result of n steps beside the cache."""

    # i32[n * S (+ S) + 2 * groups]: the tokens chosen, -1 where a row's tokens did not fit; of a step that verifies
    # also how many of them count; the room left.
    numbers: Any
    memory: StepMemory
    likeliest: tuple[jax.Array, jax.Array] | None  # f32 and i32 [n, S, 1 + count]: see `likeliest`
    # If there are targets, f32[N]: the log-probability of each packed token's, or what `likeliest` returns of them.
    scores: tuple[Any, ...] = ()


def new_memory(max_seqs: int, max_seq_len: int, hook: Hook | None, queries: tuple[jax.Array, ...] = ()) -> StepMemory:
    """Returns the memory of empty rows."""
    tokens = None if hook is None else to_device(np.zeros((max_seqs, max_seq_len), np.int32))
    return StepMemory(to_device(np.zeros(max_seqs, np.int32)), tokens, queries)


@functools.partial(jax.jit, donate_argnums=0)
def note_tokens(memory: StepMemory, row: jax.Array, tokens: jax.Array) -> StepMemory:
    """Returns memory in which a row has these `i32[max_seq_len]` tokens."""
    assert memory.tokens is not None
    return memory._replace(tokens=memory.tokens.at[row].set(tokens))


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


def apply_hook(hook: Hook, logits: jax.Array, rows: StepRows) -> jax.Array:
    """Applies a hook to logits. Raises what it raises, with a note, and ValueError if it returns no logits."""
    try:
        wanted = hook(logits, rows)
        if getattr(wanted, "shape", None) != logits.shape:
            raise ValueError(
                f"logits_hook must return logits {list(logits.shape)}, as it is given, not "
                f"{list(jnp.shape(wanted)) if hasattr(wanted, 'shape') else type(wanted).__name__}."
            )
    except Exception as error:
        if not is_of_hook(error):  # the same may be raised again
            error.add_note(OF_HOOK)
        raise
    return wanted.astype(jnp.float32)


def is_of_hook(error: BaseException) -> bool:
    """Tells whether a hook raised an error."""
    return OF_HOOK in getattr(error, "__notes__", ())


def column_of(
    choice: SamplingParams, number: int, prompt: int, adapter: int, leaves: list[np.ndarray] | None, hook_args: HookArgs
) -> tuple[np.ndarray, Form | None]:
    """Returns one column of a step's `rows`, for a request at its beginning, and the form of its last fields."""
    form = hook_args.form
    column = np.zeros(NUM_FIELDS, np.int32)
    column[COLUMN], column[PROMPT], column[ADAPTER] = choice.column(number), prompt, adapter
    return (column if form is None else np.concatenate([column, form.pack(leaves)])), form


class TokenChoice(NamedTuple):
    """How the token after each row's last one is chosen."""

    hook: Hook | None
    asked: Asked
    kind: Kind
    num_likeliest: int  # tokens there that are returned, too

    def choose(self, logits: jax.Array, memory: StepMemory, lengths: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the tokens chosen after some lengths of each row, and the likeliest ones there.

        There are `n * S` of them, n lengths of every row: those of all rows lie one behind the other.
        """
        asked, tokens, logits = self.asked, memory.tokens, logits.astype(jnp.float32)
        if (n := lengths.shape[0] // asked.prompt_lengths.shape[0]) > 1:
            asked, tokens = jax.tree.map(lambda x: jnp.concatenate([x] * n), (asked, tokens))
        wanted = logits
        if self.hook is not None:
            assert tokens is not None
            wanted = apply_hook(self.hook, logits, rows_so_far(tokens, lengths, asked))
        chosen = choose(self.kind, wanted, asked.sampling, lengths)
        return chosen, likeliest(logits, chosen, self.num_likeliest) if self.num_likeliest else None
