"""`prompt_logprobs` as vLLM has it: what a model holds of each token of a prompt, against a pass without a cache."""

import numpy as np
import pytest
from dense_logprobs import make_logprobs
from http_server import ask, httpx

from jaxkv import models
from jaxkv._cli.http import openai_format
from jaxkv._cli.http.openai_format import PromptLogprobs

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves

CHAT = [{"role": "user", "content": "Why 東?"}]


@pytest.fixture(scope="module")
def logprobs(folder):
    """The log-probabilities of all tokens at each position, of a forward pass without a cache."""
    return make_logprobs(models.load(folder), 256)


def post(served, path, **body):
    found = httpx.post(f"{served[2]}/v1/{path}", json={"max_tokens": 2, "temperature": 0} | body, timeout=120)
    return found.status_code, found.json()


def check(found, tokens, logprobs, text, count):
    """Each token's own entry comes first, then those of so many likeliest ones."""
    assert found[0] is None and len(found) == len(tokens)
    ranks = []
    for row, token, entry in zip(logprobs(tokens), tokens[1:], found[1:], strict=False):
        order = np.argsort(-row, kind="stable").tolist()
        wanted = dict.fromkeys([token, *order[:count]])
        assert list(map(int, entry)) == list(wanted)
        for key, told in entry.items():
            place = order.index(int(key)) + 1
            assert told["rank"] == (place if place <= 20 else None)
            assert told["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-4)
            assert told["decoded_token"] == text.decode([int(key)], special=True)
        ranks.append(entry[str(token)]["rank"])
    return ranks


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_a_completion_s_prompts(served, logprobs, count):
    """In each choice, with and without the answer's own, and again where a prefix cache has the prompt."""
    text, prompts = served[1], ["What is the capital? Of 東京?", "Tell me."]
    for more in ({}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1, "n": 2}, {"max_tokens": 0}):
        status, found = post(served, "completions", prompt=prompts, prompt_logprobs=count, **more)
        assert status == 200 and "prompt_logprobs" not in found, found
        assert len(found["choices"]) == 2 * more.get("n", 1)
        for choice in found["choices"]:
            tokens = text.encode(prompts[choice["index"] // more.get("n", 1)])
            ranks = check(choice["prompt_logprobs"], tokens, logprobs, text, count)
            assert len(tokens) < 20 or (None in ranks and any(ranks))
            assert (choice["logprobs"] is None) == ("logprobs" not in more)
        assert found["usage"]["completion_tokens"] <= 2 * len(found["choices"])


def test_a_chat_s_prompt(served, client, logprobs):
    """Beside the choices, as all have the same."""
    text = served[1]
    status, found = post(
        served, "chat/completions", messages=CHAT, prompt_logprobs=3, n=2, logprobs=True, top_logprobs=1
    )
    assert status == 200 and len(found["choices"]) == 2
    assert all("prompt_logprobs" not in choice and choice["logprobs"] for choice in found["choices"])
    check(found["prompt_logprobs"], text.chat(CHAT), logprobs, text, 3)
    through_client = ask(client, CHAT[0]["content"], max_tokens=1, extra_body={"prompt_logprobs": 3})
    check(through_client.model_extra["prompt_logprobs"], text.chat(CHAT), logprobs, text, 3)
    status, found = post(served, "chat/completions", messages=CHAT, prompt_logprobs=0, max_tokens=0)
    assert status == 200 and found["usage"]["completion_tokens"] == 0
    check(found["prompt_logprobs"], text.chat(CHAT), logprobs, text, 0)


def test_a_prompt_of_a_token_has_none(served):
    assert post(served, "completions", prompt=[5], prompt_logprobs=2)[1]["choices"][0]["prompt_logprobs"] == [None]


def test_none_are_told_where_none_are_wanted(served):
    for more in ({}, {"prompt_logprobs": None}, {"echo": True, "logprobs": 1}):
        assert "prompt_logprobs" not in post(served, "completions", prompt="a", **more)[1]["choices"][0]
    assert "prompt_logprobs" not in post(served, "chat/completions", messages=CHAT, prompt_logprobs=None)[1]


WRONG = {
    "all of a vocabulary": {"prompt_logprobs": -1}, "more than are computed": {"prompt_logprobs": 21},
    "a switch": {"prompt_logprobs": True}, "text": {"prompt_logprobs": "1"}, "half": {"prompt_logprobs": 1.5},
    "a list": {"prompt_logprobs": [1]}, "a stream": {"prompt_logprobs": 1, "stream": True},
    "a stream of none": {"prompt_logprobs": 0, "stream": True},
}  # fmt: skip


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_told_is_refused_by_a_sentence(served, path, name):
    status, found = post(served, path, prompt="a", messages=CHAT, **WRONG[name])
    assert status == 400 and found["error"]["message"].startswith("prompt_logprobs "), found


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 19}, {"echo": True, "logprobs": 19}, {"prompt_logprobs": 9}])
def test_no_request_is_told_more_than_memory_holds(served, monkeypatch, wanted):
    """Each sample is told its whole prompt: of 128 samples of a long one that would be gigabytes."""
    told = 10 if wanted == {"prompt_logprobs": 9} else 20
    monkeypatch.setattr(openai_format, "MOST_TOLD", 3 * 10 * told)
    for prompt, n, status in (
        ([[5] * 10], 3, 200),
        ([[5] * 10], 4, 400),
        ([[5] * 10, [6] * 21], 1, 400),
        ([[5] * 31], 1, 200),
    ):
        found = post(served, "completions", prompt=prompt, n=n, max_tokens=1, **wanted)
        assert found[0] == status, found
        assert status == 200 or f"at most {3 * 10 * told:,}" in found[1]["error"]["message"]
    assert post(served, "completions", prompt=[[5] * 40], n=9, max_tokens=1, logprobs=19)[0] == 200
    assert post(served, "chat/completions", messages=CHAT, n=40, max_tokens=1, prompt_logprobs=19)[0] == 200


def test_infinities_are_no_json():
    class Text:
        def decode(self, tokens, special):
            return str(tokens)

    class Asked:
        prompt, prompt_top_logprobs = [5, 6], [{6: -float("inf"), 1: 0.0}]

    assert PromptLogprobs({"prompt_logprobs": 1}, Text()).describe(Asked()) == [
        None,
        {
            6: {"logprob": -9999.0, "rank": 2, "decoded_token": "[6]"},
            1: {"logprob": 0.0, "rank": 1, "decoded_token": "[1]"},
        },
    ]
