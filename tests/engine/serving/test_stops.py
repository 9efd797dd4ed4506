"""Requests that stop at sequences of tokens or at strings, of which nothing is shown, and what is refused of them."""

import random

import pytest
from checksum_model import VOCAB
from nightly import NIGHTLY
from served import COUNT, PROMPT, SIZES, WAYS

import jaxkv
from jaxkv._engine.requests.stops import IdStops, TextStops
from jaxkv.text.tokenizer import TextStream


class Letters:
    """A tokenizer of which each token is a letter, or half of one."""

    def decode(self, tokens, special=False):
        return "".join("abcdefghijklmnop"[token % 16] for token in tokens)

    def stream(self, prompt=()):
        return TextStream(self, list(prompt))


def first_stop(output, stops):
    """Where the first stop sequence ends, and where it begins."""
    found = [(i + len(s), i) for i in range(len(output)) for s in stops if output[i : i + len(s)] == list(s)]
    return min(found, default=(len(output), len(output)))


@pytest.mark.parametrize("way", WAYS)
def test_stop_sequences(model, lone, way):
    output = lone(PROMPT, COUNT)
    draw = random.Random(1)
    with jaxkv.Engine(model, **(SIZES | WAYS[way])) as engine:
        for _ in range(8):
            begins = [draw.randrange(COUNT) for _ in range(2)]
            stops = [output[i : i + draw.randint(1, 4)] for i in begins] + [[VOCAB - 1] * 3, [*output[2:4], VOCAB - 1]]
            handed = []
            request = engine.submit(PROMPT, COUNT, stop=stops, logprobs=1, on_token=lambda _, t: handed.append(t))  # noqa: B023
            end, begin = first_stop(output, stops)
            assert list(request) == request.tokens == output[:begin] and handed == [*output[:begin], None]
            assert request.ended == "stop" and list(request.stop_sequence) in stops
            assert [max(found) >= 0 for found in request.logprobs] == [True] * begin
            kept = engine.submit(PROMPT, COUNT, stop=stops, include_stop=True)
            assert list(kept) == output[:end]
        never = engine.submit(PROMPT, 6, stop=[[*output[4:6], VOCAB - 1]])
        assert list(never) == output[:6] and never.ended == "length" and never.stop_sequence is None
        engine.wait()
        jaxkv.check_invariants(engine.cache)


def test_stop_strings(model, lone):
    output, letters = lone(PROMPT, COUNT), Letters()
    text = letters.decode(output)
    with jaxkv.Engine(model, **SIZES) as engine:
        for stop in (text[3:6], [text[5:7], text[9:12], "?"], [text[-2:]], "?", [text[4:6] + "?"], []):
            request = engine.submit(PROMPT, COUNT, stop=stop, tokenizer=letters)
            shown = []
            for _ in request:
                shown.append(request.text)
            stops = [stop] if isinstance(stop, str) else stop
            end = min((text.index(s) for s in stops if s in text), default=COUNT)
            assert request.text == text[:end] and request.tokens == output[:end]
            assert all(text[:end].startswith(part) for part in shown), "never half of a stop"
            assert request.ended == ("stop" if end < COUNT else "length")
        both = engine.submit(PROMPT, COUNT, stop=[output[5:8], "?"], tokenizer=letters)
        for _ in both:  # a sequence of ids is not shown as text either, nor half of it
            assert text[:5].startswith(both.text)
        assert both.text == text[:5] and both.tokens == output[:5]
        several = engine.submit(PROMPT, COUNT, n=2, stop=text[3:6], tokenizer=letters)
        assert several.result() == several.samples[1].tokens and several.text == several.samples[1].text == text[:3]
        assert several.times.first_token is not None
        kept = engine.submit(PROMPT, COUNT, stop=text[3:6], include_stop=True, tokenizer=letters)
        assert letters.decode(kept.result()) == kept.text == text[: text.index(text[3:6]) + 3]


class Pairs(Letters):
    """A tokenizer of which each token is two letters."""

    def decode(self, tokens, special=False):
        return "".join(2 * super(Pairs, self).decode([token]) for token in tokens)


def test_a_stop_string_that_ends_within_a_token(model, lone):
    """What comes behind it in the token is not part of the text, even where the stop string is."""
    output, pairs = lone(PROMPT, COUNT), Pairs()
    text = pairs.decode(output)
    with jaxkv.Engine(model, **SIZES) as engine:
        for is_kept in (False, True):
            request = engine.submit(PROMPT, COUNT, stop=text[6:9], tokenizer=pairs, include_stop=is_kept)
            request.result()
            assert request.text == text[: 9 if is_kept else 6] and request.tokens == output[: 5 if is_kept else 3]


class Halves(Letters):
    """A tokenizer of which two tokens are a letter, as bytes are of one beyond ASCII."""

    def decode(self, tokens, special=False):
        whole = len(tokens) // 2
        letters = super().decode([tokens[2 * i] + 3 * tokens[2 * i + 1] for i in range(whole)])
        return letters + "\N{REPLACEMENT CHARACTER}" * (len(tokens) % 2)

    def stream(self, prompt=()):
        return super().stream()


def test_half_a_letter_is_no_half_of_a_stop_string(model, lone):
    """It is handed out once it is known whether the stop begins with its letter."""
    output, halves = lone(PROMPT, COUNT), Halves()
    text = halves.decode(output)
    with jaxkv.Engine(model, **SIZES) as engine:
        for stop in (text[0], text[2], text[1:3], "?"):
            handed = []
            request = engine.submit(PROMPT, COUNT, stop=stop, tokenizer=halves, on_token=lambda _, t: handed.append(t))  # noqa: B023
            end = 2 * text.index(stop) if stop in text else COUNT
            assert list(request) == request.tokens == output[:end] and handed == [*output[:end], None]
            assert request.text == text[: end // 2]


def test_stops_survive_an_interrupted_call():
    """What was not looked at the first time is the second time."""
    stops = IdStops([(1, 2), (2, 3)])
    assert stops.find([5, 1, 2, 3], 1) == (1, (1, 2)) and stops.find([5, 1, 2, 3], 3) == (2, (2, 3))
    assert stops.count_safe([5, 1]) == 1 and stops.count_safe([5, 1, 4]) == 3 and stops.count_safe([2]) == 0
    text = TextStops(["cd"], Letters(), [])
    assert text.find([1, 2], 0) is None and text.count_safe([1, 2]) == 1
    text._soundness.begin()  # as after an interrupt
    assert text.find([1, 2, 3, 4], 1) == (1, "cd")
    for is_whole, shown in ((False, "b"), (True, "bc")):
        assert TextStops(["cd"], Letters(), []).read_text([1, 2], is_whole=is_whole) == shown


def test_many_stops_are_found_as_few_are():
    """Against every stop at every place: ends, what stands before them, and what may be the beginning of one."""
    draw, letters = random.Random(3), Letters()
    assert IdStops([(2,), (1, 2), (2,)]).find([1, 2], 0) == (1, (2,)), "of those that end together the first given"
    for _ in range(300 if NIGHTLY else 60):
        given = [tuple(draw.choices(range(3), k=draw.randint(1, 5))) for _ in range(draw.choice((1, 3, 30)))]
        output = draw.choices(range(3), k=draw.randint(1, 12))
        ends = [(end, n) for end in range(1, len(output) + 1) for n, stop in enumerate(given)
                if tuple(output[max(end - len(stop), 0) : end]) == stop]  # fmt: skip
        scanned = draw.randrange(min(ends, default=(len(output) + 1,))[0])  # nothing has ended there
        found = min(ends, default=None)
        assert IdStops(given).find(output, scanned) == (found and (found[0] - len(given[found[1]]), given[found[1]]))
        halves = [n for stop in given for n in range(1, len(stop)) if tuple(output[-n:]) == stop[:n]]
        assert IdStops(given).count_safe(output) == len(output) - max(halves, default=0)
        texts, text = [letters.decode(stop) for stop in given], letters.decode(output)
        begins = [(end - len(given[n]), texts[n]) for end, n in ends]
        assert TextStops(texts, letters, []).find(output, scanned) == min(begins, default=None)
        assert TextStops(texts, letters, []).show(text) == text[: len(text) - max(halves, default=0)]


def test_saved_with_their_stops(model, lone, tmp_path):
    output = lone(PROMPT, COUNT)
    with jaxkv.Engine(model, **SIZES) as engine:
        request = engine.submit(PROMPT, COUNT, stop=[output[8:10]])
        for _ in range(9):
            engine.step()
        engine.save(tmp_path / "engine")
        request.cancel()
    with jaxkv.Engine(model, **SIZES) as engine:
        (again,) = engine.load(tmp_path / "engine")
        end, begin = first_stop(output, [output[8:10]])
        assert again.result() == output[:begin] and again.ended == "stop" and end <= COUNT


def test_saved_with_their_text(model, lone, tmp_path):
    """No file holds a tokenizer: it is given again."""
    output, letters, path = lone(PROMPT, COUNT), Letters(), tmp_path / "engine"
    text = letters.decode(output)
    with jaxkv.Engine(model, **SIZES) as engine:
        ended = engine.submit(PROMPT, COUNT, stop=[text[3:6]], tokenizer=letters)
        ended.result()  # nobody has called `step`, which would hand out its tokens
        asked = [{"stop": [text[9:12], output[15:17]]}, {}, {"stop": text[9:12], "include_stop": True, "n": 2}]
        requests = [engine.submit(PROMPT, COUNT, tokenizer=letters, **options) for options in asked]
        plain = engine.submit(PROMPT, COUNT, stop=[output[15:17]])
        next(token for token in requests[0] if requests[0].text == text[:9])
        engine.save(path)
        wanted = [(sample.result(), sample.text) for r in (ended, *requests, plain) for sample in r.samples]
    with jaxkv.Engine(model, **SIZES) as engine:
        number = requests[0].number
        with pytest.raises(
            ValueError, match=rf"^Request {number} of .*engine was submitted with a tokenizer.*load\(path, tokenizer="
        ):
            engine.load(path)
        with pytest.raises(ValueError, match="tokenizer must be"):
            engine.load(path, tokenizer=5)
        assert engine.is_idle
        again = engine.load(path, tokenizer=letters)
        assert again[0].text == ended.text and again[1].text == text[:9]
        assert [(request.result(), request.text) for request in again] == wanted
        assert [request.ended for request in again] == ["stop", "stop", "length", "stop", "stop", "stop"]


class NoText:
    """A tokenizer whose stream keeps no text."""

    def stream(self, prompt):
        return self

    def add(self, token):
        return ""


REFUSED = {
    "a flat list": ({"stop": [1, 2]}, r"stop must be a list of stop sequences.*write stop=\[\[1\]\]"),
    "a number": ({"stop": 5}, "stop must be a list of stop sequences"),
    "bytes": ({"stop": b"x"}, "stop must be a list"),
    "an empty sequence": ({"stop": [[]]}, "stop has an empty sequence"),
    "an empty string": ({"stop": [""], "tokenizer": Letters()}, "stop has an empty string"),
    "a float": ({"stop": [[1.5]]}, "a token of stop must be an integer"),
    "a negative token": ({"stop": [[-1]]}, "a token of stop"),
    "text without a tokenizer": ({"stop": ["x"]}, "give tokenizer= too"),
    "no tokenizer": ({"tokenizer": 5}, "tokenizer must be a jaxkv.text.Tokenizer"),
    "no stream of text": (
        {"tokenizer": NoText()},
        r"tokenizer.stream\(prompt\) must return the text of tokens to come",
    ),
    "no function": ({"on_token": 5}, "on_token must be a function"),
    "no flag": ({"include_stop": 2}, "include_stop"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(lone, model, name):
    options, message = REFUSED[name]
    with jaxkv.Engine(model, **SIZES) as engine:
        with pytest.raises(ValueError, match=message):
            engine.submit(PROMPT, 3, **options)
        assert engine.is_idle
