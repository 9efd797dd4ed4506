"""Speculation: who guesses the tokens to come, so that one step of the model can confirm several.

A guess counts if it is the token that the model itself chooses there, drawn with the same random numbers as without
guesses (see `sampling.choose`). So speculation changes no token, greedy or sampled, whoever guesses; a good guesser
only makes steps fewer. The idea is Leviathan et al.'s (https://arxiv.org/abs/2211.17192); that a draft which draws with
the model's own random numbers agrees with it nearly as often as their rejection sampling is Gumbel coupling
(https://arxiv.org/abs/2408.07978).
"""

import collections
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence as Several
from typing import Any, NamedTuple, Protocol

from jaxkv._core.numbers import integer, shown
from jaxkv._engine.scheduler import Sequence

NGRAMS = (4, 3, 2)  # how many last tokens must have been there before: the longest that is found decides


class Guesses(NamedTuple):
    """What may follow a sequence: a tree. Each token follows the one that its parent names; -1: the sequence."""

    tokens: list[int]
    parents: list[int]  # the place of an earlier one of these tokens

    @classmethod
    def chain(cls, tokens: list[int]) -> "Guesses":
        return cls(tokens, list(range(-1, len(tokens) - 1)))

    @classmethod
    def tree(cls, paths: Several[list[int]], count: int) -> "Guesses":
        """Paths that begin alike in one, in their order, up to `count` tokens."""
        places: dict[tuple[int, int], int] = {}  # a parent and a token -> the token's place
        for path in paths:
            place = -1
            for token in path:
                if (place, token) not in places and len(places) == count:
                    break
                place = places.setdefault((place, token), len(places))
        return cls([token for _, token in places], [parent for parent, _ in places])


class Drafter(Protocol):
    """Whoever guesses."""

    def guess(self, sequences: Several[Sequence], count: int) -> list[Guesses]:
        """For each sequence up to `count` tokens that may follow. All their tokens have been read."""

    def warm(self) -> list[Callable[[], Any]]:
        """What to call, one after another, to compile what is needed."""


class NGramDrafter:
    """What followed the same tokens before in the sequence (https://arxiv.org/abs/2304.04487), the last time or, as a
    tree (https://arxiv.org/abs/2305.09781), the last `branches` times."""

    def __init__(self, branches: int = 1) -> None:
        self._branches = branches
        self._known: weakref.WeakKeyDictionary[Sequence, NGrams] = weakref.WeakKeyDictionary()

    def guess(self, sequences: Several[Sequence], count: int) -> list[Guesses]:
        found = (self._known.setdefault(s, NGrams(self._branches)) for s in sequences)
        return [ngrams.guess(s.tokens, count) for ngrams, s in zip(found, sequences, strict=True)]

    def warm(self) -> list[Callable[[], Any]]:
        return []


class NGrams:
    """Where in a growing list of tokens each run of a few was seen, the last `branches` times.

    >>> bytes(NGrams().guess(list(b"abcabcab"), 4).tokens)
    b'cabc'
    >>> NGrams(2).guess(list(b"ab ac ax a"), 4)
    Guesses(tokens=[120, 32, 99, 32], parents=[-1, 0, -1, 2])
    """

    def __init__(self, branches: int = 1) -> None:
        self._next: dict[tuple[int, ...], collections.deque[int]] = {}  # a run of tokens -> the places behind it
        self._noted = 0  # runs that end before this place are there
        self._branches = branches
        # A guess by one token alone is seldom right: worth a branch, and no chain.
        self._runs = NGRAMS if branches == 1 else (*NGRAMS, 1)

    def guess(self, tokens: list[int], count: int) -> Guesses:
        """Up to `count` tokens that may follow `tokens`, which have only grown since the last call."""
        for end in range(max(self._noted, 1), len(tokens)):
            for n in self._runs:
                if n <= end:
                    places = self._next.setdefault(tuple(tokens[end - n : end]), collections.deque())
                    places.append(end)
                    if len(places) > self._branches:
                        places.popleft()
        self._noted = len(tokens)
        runs = (tuple(tokens[len(tokens) - n :]) for n in self._runs if n <= len(tokens))
        found = dict.fromkeys(place for run in runs for place in reversed(self._next.get(run, ())))  # each once
        length = -(-count // self._branches)
        paths = [self._onward(tokens, place, length) for place in itertools.islice(found, self._branches)]
        return Guesses.tree(paths, count)

    def _onward(self, tokens: list[int], place: int, count: int) -> list[int]:
        """So many tokens from a place on; what is guessed may go on from what has been guessed."""
        longer = list(tokens[place : place + count])
        while len(longer) < count:
            longer.append(longer[len(longer) - (len(tokens) - place)])
        return longer


def read_draft(
    draft: Any, draft_tokens: Any, draft_branches: Any, model: Any, hook: Any, steps_per_dispatch: int
) -> tuple[int, int]:  # fmt: skip
    """How many tokens are guessed at once, 0: none are; and how many branches they have. Raises ValueError."""
    branches = integer("draft_branches", draft_branches, least=1, most=64)
    if draft is None:
        return 0, 1
    count = integer("draft_tokens", draft_tokens, least=1, most=64)
    if steps_per_dispatch > 1:
        raise ValueError(
            f"draft guesses between steps, so steps_per_dispatch must be 1 with it, not {steps_per_dispatch}."
        )
    if isinstance(draft, str):
        if draft != "ngram":
            raise ValueError(f'draft must be a model, "ngram" or None, not {shown(draft)}.')
        if branches > 1:
            _check_branches(model, hook)
        return count, branches
    if not callable(draft) or not hasattr(draft, "layer_configs"):
        raise ValueError(f'draft must be a model, "ngram" or None, not {shown(draft)}.')
    if branches > 1:
        raise ValueError(f'draft_branches={branches} is for draft="ngram": a model guesses one token after another.')
    theirs, vocab_size = (getattr(getattr(x, "config", None), "vocab_size", None) for x in (draft, model))
    if None not in (theirs, vocab_size) and theirs != vocab_size:
        raise ValueError(
            f"draft has a vocabulary of {theirs} tokens, but the model one of {vocab_size}: a token must mean the same "
            "to both."
        )
    return count, 1


def _check_branches(model: Any, hook: Any) -> None:
    if hook is not None:
        raise ValueError("A logits_hook is told of one sequence a row, and not of branches: leave draft_branches out.")
    if "step" not in inspect.signature(model.__call__).parameters:
        raise ValueError(
            "draft_branches make a tree, of which step= tells a model, and this one takes no step: leave "
            "draft_branches out."
        )
