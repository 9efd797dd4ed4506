"""Completions over HTTP as lm-evaluation-harness's `local-completions` asks for them, and what it reads of answers."""

import math

import numpy as np
import pytest
from dense_logprobs import make_logprobs
from http_server import httpx

from jaxkv import models
from jaxkv._cli.http.openai_format import Completion

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

# Contexts and continuations: the second is the beginning of the first, so that a prefix cache has it.
PAIRS = [
    ("What is the capital of France? ", "Paris"),
    ("What is the capital", " of 東京?"),
    ("?", "!"),
    ("Why", " not so"),
]
LONG = ("Tell me a story. " * 5, "Once upon a time. " * 5)  # more than one step's tokens


def write_body(prompt, **options):
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True, **options}  # fmt: skip


def write(text, token):
    """A token's text, or its bytes where that is half a character."""
    own = text.token_bytes(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def read_scores(answer, counts):
    """The sum of a continuation's log-probabilities, and whether each token of it was the likeliest: of each choice, in
    their order; all that stands behind a context but for the token that is generated."""
    found = []
    for choice, count in zip(sorted(answer["choices"], key=lambda choice: choice["index"]), counts, strict=True):
        own = choice["logprobs"]["token_logprobs"][count:-1]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][count:-1]]
        found.append((sum(own), own == best))
    return found


@pytest.fixture(scope="module")
def logprobs(folder):
    """The log-probabilities of all tokens at each position, of a forward pass without a cache."""
    return make_logprobs(models.load(folder), 256)


@pytest.fixture(scope="module")
def asked(served, logprobs):
    """Tokens of contexts and continuations, and what is to be read of their scores: some are greedy, some are not."""
    text, found = served[1], []
    pairs = [(c := text.encode(context), text.encode(context + more)[len(c) :]) for context, more in [*PAIRS, LONG]]
    for context, count in ((text.encode("Why"), 4), (text.encode("Tell me a story. "), 9)):  # as the model goes on
        tokens = list(context)
        for _ in range(count):
            tokens.append(int(logprobs(tokens)[-1].argmax()))
        pairs += [(context, tokens[len(context) :]), (context, [*tokens[len(context) : -1], 5])]  # but for the last
    for context, more in pairs:
        table = logprobs([*context, *more])[len(context) - 1 : -1]
        own = table[np.arange(len(more)), more]
        found.append((context, more, float(own.sum()), bool((table.argmax(1) == more).all())))
    assert [is_greedy for *_, is_greedy in found[-4:]] == [True, False] * 2
    return found


def check_scores(found, wanted):
    assert [is_greedy for _, is_greedy in found] == [is_greedy for *_, is_greedy in wanted]
    np.testing.assert_allclose([total for total, _ in found], [total for *_, total, _ in wanted], atol=1e-3)


def post(served, **body):
    found = httpx.post(served[2] + "/v1/completions", json=write_body(**body), timeout=120)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.parametrize("way", ["token ids", "a batch of token ids", "token ids alone", "again"])
def test_continuations_of_token_ids(served, asked, way):
    prompts, counts = [c + m for c, m, *_ in asked], [len(c) for c, *_ in asked]
    if way == "token ids alone":
        answers = [(post(served, prompt=prompt), [count]) for prompt, count in zip(prompts, counts, strict=True)]
    else:
        size = len(prompts) if way == "a batch of token ids" else 1
        cuts = range(0, len(prompts), size)
        answers = [(post(served, prompt=prompts[i : i + size]), counts[i : i + size]) for i in cuts]
    check_scores([x for answer, counts in answers for x in read_scores(answer, counts)], asked)


def test_continuations_of_texts(served, asked):
    """One text, or several."""
    texts, counts = [c + m for c, m in PAIRS], [len(c) for c, *_ in asked[: len(PAIRS)]]
    alone = [found for t, n in zip(texts, counts, strict=True) for found in read_scores(post(served, prompt=t), [n])]
    check_scores(alone, asked[: len(PAIRS)])
    check_scores(read_scores(post(served, prompt=texts), counts), asked[: len(PAIRS)])


def test_of_each_token_the_likeliest_are_told(served, asked, logprobs):
    """As many as are asked for, and the prompt's own; offsets are those of the text."""
    text = served[1]
    tokens = text.encode("What is the capital? Of 東京?")
    for count, most in ((0, 0), (1, 0), (3, 2), (20, 1)):
        (choice,) = post(served, prompt=tokens, logprobs=count, max_tokens=most)["choices"]
        told, size = choice["logprobs"], len(tokens)
        assert told["top_logprobs"][0] is None and told["token_logprobs"][0] is None
        assert len(told["tokens"]) == len(told["top_logprobs"]) == len(told["text_offset"]) == size + most
        wanted = logprobs(tokens)
        for i in range(1, size):
            row, top = wanted[i - 1], told["top_logprobs"][i]
            best = np.argsort(-row)[:count].tolist()
            names = {write(text, token): row[token] for token in [*best, tokens[i]]}
            assert top == pytest.approx(names, abs=1e-4) and told["token_logprobs"][i] == top[told["tokens"][i]]
        at = told["text_offset"]
        for i, token in enumerate(told["tokens"][:20]):  # each is a character, but for the first
            assert choice["text"][at[i] : at[i + 1]] == (token if i else "")


def test_a_stop_token_is_told_too(served, asked, logprobs, monkeypatch):
    """As vLLM's: else the prompt's last token would be taken for what was generated."""
    engine, text, _ = served
    submit = engine.submit
    context, more, *_ = asked[0]
    end = int(logprobs([*context, *more])[-1].argmax())
    monkeypatch.setattr(engine, "submit", lambda *a, **given: submit(*a, **given | {"eos": (end,)}))
    answer = post(served, prompt=[context + more])
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["text"] == text.decode(
        context + more
    )
    check_scores(read_scores(answer, [len(context)]), asked[:1])
    (last,) = answer["choices"][0]["logprobs"]["top_logprobs"][-1].values()
    assert last == answer["choices"][0]["logprobs"]["token_logprobs"][-1] and answer["usage"]["completion_tokens"] == 0


def test_of_tokens_of_one_text_the_likeliest_is_told():
    """Else a token would seem to be greedy beside a likelier one that is written alike. JSON has no infinities."""

    class Text:
        def token_bytes(self, token):
            return b"A" if token < 2 else b"%d" % token

    form = Completion({"prompt": "A", "logprobs": 2, "echo": True, "max_tokens": 1}, Text())
    assert form._describe(1, {0: -0.5, 5: -1.0, 1: -3.0}) == (1, -3.0, {"A": -0.5, "5": -1.0})
    assert form._describe(0, {0: -0.5, 1: -1.0}) == (0, -0.5, {"A": -0.5})
    endless = {3: 0.0, 4: -math.inf, 7: -math.inf}
    assert form._describe(7, endless) == (7, -9999.0, {"3": 0.0, "4": -9999.0, "7": -9999.0})
