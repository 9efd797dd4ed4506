"""Stop sequences of a request, as token ids or as text: where its output ends, and what of it may be shown already."""

import bisect
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from jaxkv._core.config.validation import integer, show
from jaxkv._core.state.interrupts import Soundness


class TextStreamLike(Protocol):
    """The text of tokens that come one by one: `jaxkv.text.Tokenizer.stream`."""

    text: str

    def add(self, token: int) -> str: ...


class TokenizerLike(Protocol):
    """What turns tokens into text: a `jaxkv.text.Tokenizer`, say."""

    def stream(self, prompt: Sequence[int]) -> TextStreamLike: ...


class StopIndex:
    """Stop sequences, tuples or strings, found in a time that depends on their lengths, hardly on their number."""

    def __init__(self, stops: Sequence[Any]):
        self._numbers = {stop: n for n, stop in reversed(list(enumerate(stops)))}  # of equal ones the first
        self._lengths = sorted({len(stop) for stop in stops})
        self._sorted, self._firsts = sorted(self._numbers), {stop[0] for stop in stops}
        self.longest = max(self._lengths, default=0)

    def find_ends(self, given: Any, scanned: int) -> Iterator[tuple[int, int, Any]]:
        """Yields where stop sequences end in a sequence behind its first `scanned` items, their numbers and themselves,
        in the order of their ends."""
        for end in range(scanned + 1, len(given) + 1):
            for length in self._lengths[: bisect.bisect_right(self._lengths, end)]:
                if (number := self._numbers.get(stop := given[end - length : end])) is not None:
                    yield end, number, stop

    def count_partial_match(self, given: Any) -> int:
        """Returns how much of the end of a sequence may be the beginning of a stop sequence: the most of any."""
        for count in range(min(self.longest - 1, len(given)), 0, -1):
            if given[-count] in self._firsts:
                beginning = given[-count:]
                behind = bisect.bisect_right(self._sorted, beginning)  # the first that may begin so and go on
                if self._sorted[behind : behind + 1] and self._sorted[behind][:count] == beginning:
                    return count
        return 0


class IdStops:
    """Stop sequences of token ids."""

    def __init__(self, stops: Collection[tuple[int, ...]]):
        self.stops = tuple(stops)
        self._index = StopIndex(self.stops)

    def restart(self) -> None:
        """Forgets the output so far."""

    def find(self, output: list[int], scanned: int) -> tuple[int, tuple[int, ...]] | None:
        """Returns how many tokens come before the first stop sequence that ends behind `scanned` tokens, and the stop
        sequence; None: there is none."""
        first = max(scanned - self._index.longest, 0)
        found = min(self._index.find_ends(tuple(output[first:]), scanned - first), default=None)
        return None if found is None else (first + found[0] - len(found[2]), found[2])

    def count_safe(self, output: list[int]) -> int:
        """Returns how many tokens can be shown: the others may be the beginning of a stop sequence."""
        return len(output) - self._index.count_partial_match(tuple(output[-self._index.longest :]))


class TextStops:
    """Stop strings, and the text of a request."""

    def __init__(self, stops: Collection[str], tokenizer: TokenizerLike, prompt: Sequence[int]):
        self.stops, self._tokenizer, self._prompt = tuple(stops), tokenizer, prompt
        self._index = StopIndex(self.stops)
        self._soundness = Soundness(is_kept=False)
        self._ends: list[int] = []  # after each token, the length of the text
        self._follow([])

    def restart(self) -> None:
        """Forgets the output so far."""
        self._soundness.begin()
        self._follow([])

    def _follow(self, output: Sequence[int]) -> None:
        """Decodes tokens that have come. After an interrupt all are decoded again."""
        if not self._soundness.is_kept:
            self._stream, self._ends = self._open_stream(), []
            self._start = len(self._stream.text)
        with self._soundness:
            for token in output[len(self._ends) :]:
                self._stream.add(token)
                self._ends.append(len(self._stream.text) - self._start)

    def _open_stream(self) -> TextStreamLike:
        stream = self._tokenizer.stream(self._prompt)
        if not (callable(getattr(stream, "add", None)) and isinstance(getattr(stream, "text", None), str)):
            raise ValueError(
                f"tokenizer.stream(prompt) must return the text of tokens to come, with add(token) and text, a str, "
                f"not {show(stream)}."
            )
        return stream

    def _text(self, output: list[int]) -> str:
        """Returns the text of an output, or of its beginning if more tokens have been decoded already."""
        self._follow(output)
        end = self._ends[len(output) - 1] if output else 0
        return self._stream.text[self._start : self._start + end]

    def _count_tokens(self, length: int) -> int:
        """Returns how many tokens lie in the first `length` characters, without one that only begins a character."""
        count = bisect.bisect_right(self._ends, length)
        while count and self._ends[count - 1] == (self._ends[count - 2] if count > 1 else 0):
            count -= 1
        return count

    def find(self, output: list[int], scanned: int) -> tuple[int, str] | None:
        """Returns how many tokens come before the first stop string, and the string; None: there is none."""
        text = self._text(output)
        ends = self._index.find_ends(text, self._ends[scanned - 1] if scanned else 0)
        found = [(end - len(stop), stop) for end, _, stop in ends]
        if not found:
            return None
        at, stop = min(found)
        return self._count_tokens(at), stop

    def count_safe(self, output: list[int]) -> int:
        """Returns how many tokens can be shown: the text of the others may be the beginning of a stop string, and so
        may a character be that the last ones only begin."""
        return self._count_tokens(len(self.show(self._text(output)))) if self.stops else len(output)

    def show(self, text: str) -> str:
        """Returns what of a text can be shown: the rest may be the beginning of a stop string."""
        return text[: len(text) - self._index.count_partial_match(text)]

    def read_text(self, output: list[int], *, is_whole: bool, stop: Any = None, is_included: bool = False) -> str:
        """Returns the text of the output as far as it can be shown, up to the stop string that ended it, or with it."""
        text = self._text(output)
        if isinstance(stop, str) and stop in text:
            return text[: text.index(stop) + (len(stop) if is_included else 0)]
        return text if is_whole else self.show(text)


Stops = IdStops | TextStops


class StopSearch:
    """Looks for the stop sequences of a request in its output as it grows, and says what of that can be shown."""

    def __init__(self, stops: Sequence[Stops], *, is_included: bool):
        self.stops, self.is_included = tuple(stops), is_included
        self._begin()

    def _begin(self) -> None:
        self.match: tuple[int, ...] | str | None = None  # the stop sequence that has come
        self.text = ""  # of what can be shown
        self.num_safe = 0  # tokens that are not the beginning of a stop sequence
        self._scanned = 0  # tokens in which they were looked for

    def restart(self) -> None:
        """Forgets the output so far."""
        for stops in self.stops:
            stops.restart()
        self._begin()

    def find(self, output: list[int], limit: int) -> bool:
        """Tells whether a stop sequence has come in an output of at most `limit` tokens."""
        found = [match for stops in self.stops if (match := stops.find(output, self._scanned)) is not None]
        if found:
            end, stop = min(found, key=lambda both: both[0])
            self.num_safe = len(output) if self.is_included else end
            self.match = stop
            self.settle_text(output, is_whole=True)
            return True
        self._scanned = len(output)
        hidden = () if self.is_included else self.stops
        self.num_safe = min((stops.count_safe(output) for stops in hidden), default=self._scanned)
        self.settle_text(output, is_whole=self.is_included or len(output) >= limit)
        return False

    def settle_text(self, output: list[int], *, is_whole: bool) -> None:
        """Decodes the text of what can be shown; `is_whole` tells that no more tokens come."""
        end = len(output)
        if isinstance(self.match, tuple):
            end = self.num_safe
        elif not is_whole:
            end = min((s.count_safe(output) for s in self.stops if isinstance(s, IdStops)), default=end)
        for stops in self.stops:
            if isinstance(stops, TextStops):
                self.text = stops.read_text(
                    output[:end], is_whole=is_whole, stop=self.match, is_included=self.is_included
                )


def read_stops(stop: Any, tokenizer: TokenizerLike | None, prompt: Sequence[int]) -> list[Stops]:
    """Returns the matchers of `submit(stop=, tokenizer=)`. Raises ValueError."""
    check_tokenizer(tokenizer)
    stop = [stop] if isinstance(stop, str) else stop
    if stop is None:
        stop = []
    if isinstance(stop, bytes | dict) or not isinstance(stop, Collection) or getattr(stop, "shape", None) == ():
        raise ValueError(
            f"stop must be a list of stop sequences, each a list of token ids or a string, not {show(stop)}; single "
            "tokens are given as eos=."
        )
    strings = [x for x in stop if isinstance(x, str)]
    ids = [_read_ids(x) for x in stop if not isinstance(x, str)]
    if "" in strings:
        raise ValueError("stop has an empty string, which would end every text at once: leave it out.")
    if strings and tokenizer is None:
        raise ValueError(
            f"stop={strings[0]!r} is text, and the engine computes tokens: give tokenizer= too, a jaxkv.text.Tokenizer "
            "of the model, or stop sequences of token ids."
        )
    found: list[Stops] = [IdStops(ids)] if ids else []
    return found if tokenizer is None else [*found, TextStops(strings, tokenizer, prompt)]


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError for what is no tokenizer, and not None."""
    if tokenizer is not None and not callable(getattr(tokenizer, "stream", None)):
        raise ValueError(f"tokenizer must be a jaxkv.text.Tokenizer, or have its stream(), not {show(tokenizer)}.")


def _read_ids(sequence: Any) -> tuple[int, ...]:
    if isinstance(sequence, bytes | dict) or not hasattr(sequence, "__len__") or getattr(sequence, "shape", (1,)) == ():
        raise ValueError(
            f"stop must be a list of stop sequences, each a list of token ids, but one is {show(sequence)}: write "
            f"stop=[[{show(sequence)}]], or give single tokens as eos=."
        )
    if not len(sequence):
        raise ValueError("stop has an empty sequence, which would end every request at once: leave it out.")
    return tuple(integer("a token of stop", token, least=0) for token in sequence)
