"""Speculative decoding: drafters guess the next tokens, so that one step of the model can verify several.

A guess counts if it is the token that the model itself chooses there, drawn with the same random numbers as without
guesses (see `sampling.choose`). So speculation changes no token, greedy or sampled, with any drafter; a good drafter
only makes steps fewer. The idea is Leviathan et al.'s (https://arxiv.org/abs/2211.17192); that a draft which draws with
the model's own random numbers agrees with it nearly as often as their rejection sampling is Gumbel coupling
(https://arxiv.org/abs/2408.07978).
"""

import collections
import heapq
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence as Several
from typing import Any, NamedTuple, Protocol

from jaxkv._core.config.validation import integer, show
from jaxkv._engine.requests.scheduler import Sequence

NGRAMS = (4, 3, 2, 1)  # lengths of the n-grams looked up: the longest that occurred before decides
TIMES = 8  # most recent occurrences of an n-gram that count


class DraftTokens(NamedTuple):
    """A tree of draft tokens. Each token follows the one that its parent names; -1: the sequence."""

    tokens: list[int]
    parents: list[int]  # the index of an earlier one of these tokens

    @classmethod
    def chain(cls, tokens: list[int]) -> "DraftTokens":
        return cls(tokens, list(range(-1, len(tokens) - 1)))


class Drafter(Protocol):
    """The interface of a drafter."""

    def guess(self, sequences: Several[Sequence], count: int) -> list[DraftTokens]:
        """Returns up to `count` draft tokens per sequence. All their tokens have been read."""

    def warm(self) -> list[Callable[[], Any]]:
        """Returns functions that compile all programs when called in order."""

    def release(self) -> None:
        """Frees the memory of its cache until it is used again."""

    def close(self) -> None:
        """Frees the device memory."""


class NGramDrafter:
    """Drafts the tokens that followed the same n-gram earlier in the sequence (https://arxiv.org/abs/2304.04487); with
    several `branches` as a tree (https://arxiv.org/abs/2305.09781)."""

    def __init__(self, branches: int = 1) -> None:
        self._branches = branches
        self._known: weakref.WeakKeyDictionary[Sequence, NGrams] = weakref.WeakKeyDictionary()

    def guess(self, sequences: Several[Sequence], count: int) -> list[DraftTokens]:
        found = (self._known.setdefault(s, NGrams(self._branches)) for s in sequences)
        return [ngrams.guess(s.tokens, count) for ngrams, s in zip(found, sequences, strict=True)]

    def warm(self) -> list[Callable[[], Any]]:
        return []

    def release(self) -> None:
        pass

    def close(self) -> None:
        self._known.clear()


class NGrams:
    """An index of the tokens that most recently followed each n-gram of a growing token list.

    >>> bytes(NGrams().guess(list(b"abcabcab"), 4).tokens)
    b'cabc'
    >>> NGrams(2).guess(list(b"ab ac a"), 5)
    DraftTokens(tokens=[99, 32, 97, 99, 98], parents=[-1, 0, 1, 2, -1])
    """

    def __init__(self, branches: int = 1) -> None:
        self._next: dict[tuple[int, ...], collections.deque[int]] = {}
        self._noted = 0  # n-grams that end before this position are indexed
        self._branches = branches

    def guess(self, tokens: list[int], count: int) -> DraftTokens:
        """Returns the up to `count` likeliest tokens to follow, as a tree with a bounded number of branches. `tokens`
        must extend the list of the last call."""
        self._note(tokens)
        guesses = DraftTokens([], [])
        waiting: list[tuple[float, int, int, tuple[int, ...]]] = []  # least likely last; a parent; what it ends in
        order = itertools.count()

        def reach(parent: int, share: float, tail: tuple[int, ...]) -> None:
            for token, of_it in self._shares(tail):
                heapq.heappush(waiting, (-share * of_it, next(order), parent, (*tail[1 - NGRAMS[0] :], token)))

        reach(-1, 1.0, tuple(tokens[-NGRAMS[0] :]))
        while waiting and len(guesses.tokens) < count:
            less, _, parent, tail = heapq.heappop(waiting)
            guesses.tokens.append(tail[-1])
            guesses.parents.append(parent)
            reach(len(guesses.tokens) - 1, -less, tail)
        return guesses

    def _note(self, tokens: list[int]) -> None:
        for end in range(max(self._noted, 1), len(tokens)):
            for n in NGRAMS:
                if n <= end:
                    followed = self._next.setdefault(tuple(tokens[end - n : end]), collections.deque(maxlen=TIMES))
                    followed.append(tokens[end])
        self._noted = len(tokens)

    def _shares(self, tail: tuple[int, ...]) -> list[tuple[int, float]]:
        """Returns the likeliest tokens and their estimated probabilities. An unseen token counts as half an occurrence
        and is left to shorter n-grams, as in prediction by partial matching
        (https://doi.org/10.1109/TCOM.1984.1096090)."""
        shares: dict[int, float] = {}
        left = 1.0
        for n in NGRAMS:
            followed = self._next.get(tail[-n:]) if n <= len(tail) else None
            if followed:
                for token, times in collections.Counter(reversed(followed)).most_common():  # of equals the last first
                    shares.setdefault(token, left * times / (len(followed) + 0.5))
                left *= 0.5 / (len(followed) + 0.5)
                if len(shares) >= self._branches:
                    break
        return list(shares.items())[: self._branches]  # those of longer runs are likelier


def read_draft(
    draft: Any,
    draft_tokens: Any,
    draft_branches: Any,
    model: Any,
    hook: Any,
    steps_per_dispatch: int,
    residual_length: Any = None,
) -> tuple[int, int]:
    """Returns the draft tokens of a step (0: no drafting) and their branches. Raises ValueError."""
    branches = integer("draft_branches", draft_branches, least=1, most=64)
    count = integer("draft_tokens", draft_tokens, least=1, most=64)
    if draft is None:
        return 0, 1
    if steps_per_dispatch > 1:
        raise ValueError(
            f"draft guesses between steps, so steps_per_dispatch must be 1 with it, not {steps_per_dispatch}."
        )
    if getattr(model, "scan", False) and any(layer.is_recurrent for layer in model.layer_configs):
        raise ValueError(
            "Draft tokens are rolled back in layers that keep a state one by one, but this model scans over its "
            "layers: make it, or load it, with scan=False, or leave draft out."
        )
    if isinstance(draft, str):
        if draft != "ngram":
            raise ValueError(f'draft must be a model, "ngram" or None, not {show(draft)}.')
        if branches > 1:
            _check_branches(model, hook)
            _check_trees(model, residual_length)
        return count, branches
    if not callable(draft) or not hasattr(draft, "layer_configs"):
        raise ValueError(f'draft must be a model, "ngram" or None, not {show(draft)}.')
    if any(layer.is_recurrent for layer in draft.layer_configs) and _has_windows(draft):
        raise ValueError(
            "draft has layers with a window and layers with a state, which no draft can have yet, for guesses are "
            "rolled back in them in two ways: take a draft with one of the two."
        )
    if branches > 1:
        raise ValueError(f'draft_branches={branches} is for draft="ngram": a model guesses one token after another.')
    return count, 1


def _has_windows(model: Any) -> bool:
    return any(layer.retention.visible_tokens is not None for layer in model.layer_configs)


def _check_trees(model: Any, residual_length: Any) -> None:
    if residual_length is not None:
        raise ValueError(
            f"draft_branches make a tree, and residual_length={residual_length} goes by positions in a row: leave one "
            "of them out."
        )
    for i, layer in enumerate(model.layer_configs):
        if layer.index_dim is not None:
            raise ValueError(
                f"draft_branches make a tree, but layer {i} of the model chooses its tokens by index keys, which go by "
                "positions: leave draft_branches out."
            )
        if layer.compress_ratio is not None:
            raise ValueError(
                f"draft_branches make a tree, but layer {i} of the model stores entries of {layer.compress_ratio} "
                "tokens one after another: leave draft_branches out."
            )
        if layer.is_recurrent:
            raise ValueError(
                f"draft_branches make a tree, but layer {i} of the model is one {layer.retention}, which takes one "
                "token after another: leave draft_branches out."
            )


def _check_branches(model: Any, hook: Any) -> None:
    if hook is not None:
        raise ValueError("A logits_hook gets one sequence per row, and no branches: leave draft_branches out.")
    if "step" not in inspect.signature(model.__call__).parameters:
        raise ValueError(
            "draft_branches make a tree, of which step= tells a model, and this one takes no step: leave "
            "draft_branches out."
        )
