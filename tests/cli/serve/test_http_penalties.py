"""Penalties, biases and a least number of tokens over HTTP, against vLLM's formulas on logits without a cache."""

import concurrent.futures

import jax
import numpy as np
import pytest
from http_server import QUESTIONS, httpx, listen

import jaxkv
from jaxkv import models
from jaxkv._cli.http.app import make_app
from jaxkv._cli.http.penalties import read_penalties

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves
EOS = 257
ASKED = {
    "nothing": {},
    "zeros": {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}},
    "presence": {"presence_penalty": 2},
    "frequency": {"frequency_penalty": 1.5},
    "less than nothing": {"frequency_penalty": -2, "presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.8},
    "repetition, asked for": {"repetition_penalty": 0.6},
    "never": {"logit_bias": {"116": -100, "32": -100.0, "101": -100}},
    "always": {"logit_bias": {"65": 100}},
    "the end": {"logit_bias": {"257": 100}},
    "the end, later": {"logit_bias": {"257": 100}, "min_tokens": 7},
    "a stop token, later": {"logit_bias": {"65": 100}, "stop_token_ids": [65], "min_tokens": 4},
    "everything": {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.2, "logit_bias": {"66": 3},
                   "min_tokens": 11},
}  # fmt: skip


def generate(logits_of, prompt, count, asked):
    """What is chosen of logits that are computed anew for each token."""
    out, stops = [], {EOS, *asked.get("stop_token_ids", [])}
    while len(out) < count:
        logits = logits_of([*prompt, *out])
        if len(out) < asked.get("min_tokens", 0):
            logits[[*stops]] = -np.inf
        for token, bias in asked.get("logit_bias", {}).items():
            logits[int(token)] += bias
        rate, seen = asked.get("repetition_penalty", 1), sorted({*prompt, *out})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / rate, logits[seen] * rate)
        times = np.bincount(out, minlength=len(logits))
        logits -= asked.get("frequency_penalty", 0) * times + asked.get("presence_penalty", 0) * (times > 0)
        if (token := int(np.argmax(logits))) in stops:
            break
        out.append(token)
    return out


def write(text, prompt, tokens):
    """The text of an answer, without half a character at its end."""
    stream = text.stream(prompt)
    return "".join(map(stream.add, tokens))


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


@pytest.fixture(scope="module")
def logits_of(model):
    """The logits behind some tokens, by one program for all of their numbers."""
    run = jax.jit(lambda tokens: model(tokens, cache=None)[0][0])

    def compute(tokens):
        padded = np.zeros((1, 128), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.array(run(padded)[len(tokens) - 1], np.float32)

    return compute


@pytest.fixture(scope="module")
def prompts(served):
    return [served[1].encode(text) for text in QUESTIONS[:2]]


def complete(served, prompt, asked):
    body = {"prompt": prompt, "max_tokens": 12, "logprobs": 0} | asked
    found = httpx.post(served[2] + "/v1/completions", json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def test_answers_are_those_of_the_formulas(served, logits_of, prompts):
    """All at once, beside one another."""
    with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as pool:
        told = {name: pool.submit(complete, served, prompts[0], asked) for name, asked in ASKED.items()}
    tokens = {}
    for name, asked in ASKED.items():
        tokens[name] = generate(logits_of, prompts[0], 12, asked)
        assert told[name].result()["text"] == write(served[1], prompts[0], tokens[name]), name
    assert tokens["nothing"] == tokens["zeros"] and len({*map(tuple, tokens.values())}) >= len(ASKED) - 2
    assert tokens["always"] == [65] * 12 and tokens["the end"] == [] and len(tokens["the end, later"]) == 7
    assert len(tokens["a stop token, later"]) == 4


def test_a_server_has_defaults(served, model, logits_of, prompts):
    """What a model's makers, or the command, recommend; a request's own numbers win, also those that change nothing."""
    sizes = {"max_seqs": 2, "max_seq_len": 256}
    defaults = {"repetition_penalty": 1.8}
    hook = {"logits_hook": jaxkv.hooks.penalize, "hook_args": jaxkv.hooks.penalties(**defaults)}
    with jaxkv.Engine(model, **sizes, **hook) as engine, engine.serve():
        app = make_app(engine, served[1], ["tiny"], (EOS,), {"temperature": 0.0}, penalties=defaults)
        with listen(app) as url:
            for asked in ({}, {"repetition_penalty": 1}, {"presence_penalty": 1}):
                told = complete((engine, served[1], url), prompts[1], asked)
                wanted = generate(logits_of, prompts[1], 12, defaults | asked)
                assert told["text"] == write(served[1], prompts[1], wanted), asked


def test_several_samples_and_streams_have_them_too(served, logits_of, prompts):
    body = {"prompt": prompts[0], "max_tokens": 12, "n": 2, "stream": True} | ASKED["frequency"]
    with httpx.stream("POST", served[2] + "/v1/completions", json=body, timeout=60) as found:
        lines = [line.removeprefix("data: ") for line in found.iter_lines() if line.startswith("data: {")]
    pieces = ["", ""]
    for choice in (choice for line in lines for choice in httpx.Response(200, text=line).json()["choices"]):
        pieces[choice["index"]] += choice["text"]
    assert pieces == [write(served[1], prompts[0], generate(logits_of, prompts[0], 12, ASKED["frequency"]))] * 2


WRONG = {
    "presence_penalty": (2.5, -3, "x", True, [1], 10**400), "frequency_penalty": (2.5, "x"),
    "repetition_penalty": (0, -1, "x", 1e300), "min_tokens": (-1, 1.5, "x", True, 13),
    "logit_bias": ([1], "x", {"x": 1}, {"-1": 1}, {"999999": 1}, {"5": "x"}, {"5": 101}, {"5": None}, {"": 1},
                   {"\u0665": 1}, {str(i): 1 for i in range(301)}),
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_wrong_ones_are_named(served, field):
    for value in WRONG[field]:
        body = {"prompt": "a", "max_tokens": 12, field: value}
        found = httpx.post(served[2] + "/v1/completions", json=body)
        message = found.json()["error"]["message"]
        assert found.status_code == 400 and field in message and len(message) < 400, found.text
    assert served[0].is_served and served[0].num_waiting == 0


def test_a_least_number_of_tokens_is_for_tokens_that_end(served):
    with pytest.raises(ValueError, match="a stop string could be there before"):
        read_penalties({"min_tokens": 2}, {}, {"max_new_tokens": 5, "stop": ["x", [5]]}, (EOS,), 300)
    found = read_penalties({"min_tokens": 2}, {}, {"max_new_tokens": 5, "stop": [[5]], "eos": ()}, (EOS,), 300)
    assert found["hook_args"]["stop_tokens"].tolist() == [5] + [-1] * 63


def test_answers_that_go_on_for_ever_have_none():
    for body in ({"min_tokens": 2}, {"logit_bias": {"5": 1}}, {"presence_penalty": 1}):
        with pytest.raises(ValueError, match=f"^{min(body)} is not supported .* start the server with --repetition-p"):
            read_penalties(body, None, {}, (), 300)
    assert read_penalties({"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": None}, None, {}, (), 9) == {}
