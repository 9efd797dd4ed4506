"""Speculation: who guesses the tokens to come, so that one step of the model can confirm several.

A guess counts if it is the token that the model itself chooses there, drawn with the same random numbers as without
guesses (see `sampling.choose`). So speculation changes no token, greedy or sampled, whoever guesses; a good guesser
only makes steps fewer. The idea is Leviathan et al.'s (https://arxiv.org/abs/2211.17192); that a draft which draws with
the model's own random numbers agrees with it nearly as often as their rejection sampling is Gumbel coupling
(https://arxiv.org/abs/2408.07978).
"""

import weakref
from collections.abc import Callable, Sequence as Several
from typing import Any, Protocol

from jaxkv._core.numbers import integer, shown
from jaxkv._engine.scheduler import Sequence

NGRAMS = (4, 3, 2)  # how many last tokens must have been there before: the longest that is found decides


class Drafter(Protocol):
    """Whoever guesses."""

    def guess(self, sequences: Several[Sequence], count: int) -> list[list[int]]:
        """For each sequence up to `count` tokens that may follow. All their tokens have been read."""

    def warm(self) -> list[Callable[[], Any]]:
        """What to call, one after another, to compile what is needed."""


class NGramDrafter:
    """What followed the same tokens before in the sequence (https://arxiv.org/abs/2304.04487)."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Sequence, NGrams] = weakref.WeakKeyDictionary()

    def guess(self, sequences: Several[Sequence], count: int) -> list[list[int]]:
        return [self._known.setdefault(s, NGrams()).guess(s.tokens, count) for s in sequences]

    def warm(self) -> list[Callable[[], Any]]:
        return []


class NGrams:
    """Where in a growing list of tokens each run of a few was last seen.

    >>> NGrams().guess(list(b"abcabcab"), 4) == list(b"cabc")
    True
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  # a run of tokens -> the place behind it
        self._noted = 0  # runs that end before this place are there

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`, which have only grown since the last call."""
        for end in range(max(self._noted, 1), len(tokens)):
            for n in NGRAMS:
                if n <= end:
                    self._next[tuple(tokens[end - n : end])] = end
        self._noted = len(tokens)
        for n in NGRAMS:
            place = self._next.get(tuple(tokens[len(tokens) - n :])) if n <= len(tokens) else None
            if place is not None:
                longer = list(tokens[place:])  # what is guessed may go on from what has been guessed
                while len(longer) < count:
                    longer.append(longer[len(longer) - (len(tokens) - place)])
                return longer[:count]
        return []


def read_draft(draft: Any, draft_tokens: Any, vocab_size: int | None, steps_per_dispatch: int) -> int:
    """How many tokens are guessed at once; 0: none are. Raises ValueError."""
    if draft is None:
        return 0
    count = integer("draft_tokens", draft_tokens, least=1, most=64)
    if steps_per_dispatch > 1:
        raise ValueError(
            f"draft guesses between steps, so steps_per_dispatch must be 1 with it, not {steps_per_dispatch}."
        )
    if isinstance(draft, str):
        if draft != "ngram":
            raise ValueError(f'draft must be a model, "ngram" or None, not {shown(draft)}.')
        return count
    if not callable(draft) or not hasattr(draft, "layer_configs"):
        raise ValueError(f'draft must be a model, "ngram" or None, not {shown(draft)}.')
    theirs = getattr(getattr(draft, "config", None), "vocab_size", None)
    if None not in (theirs, vocab_size) and theirs != vocab_size:
        raise ValueError(
            f"draft has a vocabulary of {theirs} tokens, but the model one of {vocab_size}: a token must mean the same "
            "to both."
        )
    return count
