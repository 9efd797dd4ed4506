"""`python -m jaxkv serve`: OpenAI's client over HTTP, against what the library answers."""

import asyncio
import concurrent.futures
import functools
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from cli.test_chat import folder  # noqa: F401
from nightly import NIGHTLY

import jaxkv
import jaxkv.text
from jaxkv import models
from jaxkv._cli.http import serve
from jaxkv._cli.http.answers import finish
from jaxkv._cli.http.app import make_app
from jaxkv._cli.http.openai_format import MOST_LOGPROBS, ChatCompletion, Completion, read_options
from jaxkv._cli.main import main

uvicorn = pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx2", reason="OpenAI's client is not installed")

QUESTIONS = ["What is the capital of France?", "And of 東京?", "Why?", "Tell me a story."]
# Sockets that a client leaves are closed by its garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server(uvicorn.Server):
    def install_signal_handlers(self):
        """It is not in the main thread."""


@pytest.fixture(scope="module")
def served(folder):  # noqa: F811
    """An engine, its tokenizer, and the address of a server in a thread."""
    model, text, port = models.load(folder), jaxkv.text.Tokenizer(folder), free_port()
    engine = jaxkv.Engine(model, max_seqs=4, max_seq_len=256, max_waiting=40, prefix_cache=True)
    app = make_app(engine, text, ["tiny"], (257,), {"temperature": 0.0})
    server = Server(uvicorn.Config(app, port=port, log_level="critical"))
    with engine, engine.serve():
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield engine, text, f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(60)


@pytest.fixture(scope="module")
def openai():
    """OpenAI's client, which takes two seconds to import: not where tests are only collected."""
    return pytest.importorskip("openai", reason="the extra 'test' is not installed")


@pytest.fixture(scope="module")
def client(served, openai):
    with openai.OpenAI(base_url=served[2] + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, question, **options):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": question}], **options)


@pytest.fixture(scope="module")
def expected(served):
    """The text of an answer of so many tokens."""
    engine, text, _ = served
    known = {}

    def answer(question, count):
        if question not in known:
            prompt = text.chat([{"role": "user", "content": question}])
            known[question] = len(prompt), engine.submit(prompt, 40, eos=(257,)).result(60)
        stream = text.stream(text.chat([{"role": "user", "content": question}]))
        return "".join(map(stream.add, known[question][1][:count]))

    return answer


def test_answers(served, client, expected):
    for question in QUESTIONS:
        found = ask(client, question, max_tokens=20)
        (choice,) = found.choices
        assert choice.message.content == expected(question, 20) and choice.finish_reason == "length"
        assert found.usage.completion_tokens == 20 and found.usage.total_tokens == 20 + found.usage.prompt_tokens
        events = list(
            ask(client, question, max_completion_tokens=20, stream=True, stream_options={"include_usage": True})
        )
        pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
        assert "".join(pieces) == expected(question, 20)
        assert events[-1].usage == found.usage and events[-2].choices[0].finish_reason == "length"
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_stream_is_told_what_there_is(served, client, expected, monkeypatch):
    """Not only at its end: the engine waits in the middle until the client has the first half."""
    engine, _, _ = served
    submit, half = engine.submit, expected(QUESTIONS[0], 9)
    has_half, waits = threading.Event(), []

    def hold(request, token):
        if len(request.output) == 10 and not waits:
            waits.append(has_half.wait(60))

    monkeypatch.setattr(engine, "submit", lambda *args, **options: submit(*args, **options, on_token=hold))
    shown = ""
    for event in ask(client, QUESTIONS[0], max_tokens=20, stream=True):
        shown += event.choices[0].delta.content or ""
        if shown.startswith(half):  # or one token more
            has_half.set()
    assert shown == expected(QUESTIONS[0], 20) != half != "" and waits == [True]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_what_has_stopped_an_answer_is_told(served, client, path):
    """As vLLM's `stop_reason`: the stop string, the token of stop_token_ids, or nothing."""
    engine, text, url = served
    said = {"messages": [{"role": "user", "content": QUESTIONS[0]}]} if path.startswith("chat") else {"prompt": "abc"}
    body = said | {"max_tokens": 12, "logprobs": True if path.startswith("chat") else 1}
    ask_again = functools.partial(httpx.post, f"{url}/v1/{path}", timeout=60)
    choice = ask_again(json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    whole = choice["message"]["content"] if path.startswith("chat") else choice["text"]
    prompt = text.chat(said["messages"]) if path.startswith("chat") else text.encode("abc")
    token = engine.submit(prompt, 3, eos=()).result(60)[2]
    for given, reason in (({"stop": ["?!", whole[4:6]]}, whole[4:6]), ({"stop_token_ids": [token]}, token)):
        choice = ask_again(json=body | given).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        events = ask_again(json=body | given | {"stream": True}).text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["stop_reason"] == reason


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_usage_in_a_stream(served, path):
    """A field of all chunks where it is asked for, null but in the last; with vLLM's switch it counts on."""
    said = {"messages": [{"role": "user", "content": "?"}]} if path.startswith("chat") else {"prompt": ["?", "!"]}
    body = {**said, "max_tokens": 6, "stream": True, "ignore_eos": True}

    def read(**options):
        found = httpx.post(f"{served[2]}/v1/{path}", json=body | {"stream_options": options}).text
        return [json.loads(line.removeprefix("data: ")) for line in found.split("\n\n")[:-2]]

    assert not any("usage" in chunk for chunk in read(include_usage=False))
    *chunks, last = read(include_usage=True)
    assert chunks and all(chunk["usage"] is None for chunk in chunks)
    count = 6 * len(chunks[0]["choices"]) * len(said.get("prompt", "?"))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == count
    *chunks, again = read(include_usage=True, continuous_usage_stats=True)
    assert again["usage"] == last["usage"]
    own = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    counts = [usage["completion_tokens"] for usage in own]
    assert counts == sorted(counts) and counts[-1] == 6
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in own)
    assert {usage["prompt_tokens"] for usage in own} == {last["usage"]["prompt_tokens"] // len(said.get("prompt", "?"))}


def test_stops_samples_and_log_probabilities(client, expected):
    whole = expected(QUESTIONS[0], 20)
    stop = whole[8:10]
    found = ask(client, QUESTIONS[0], max_tokens=20, stop=stop).choices[0]
    assert found.message.content == whole[: whole.index(stop)] and found.finish_reason == "stop"
    streamed = ask(client, QUESTIONS[0], max_tokens=20, stop=[stop, "?!"], stream=True)
    assert "".join(e.choices[0].delta.content or "" for e in streamed) == whole[: whole.index(stop)]
    options = dict(max_tokens=6, n=2, temperature=1.0, seed=5, logprobs=True, top_logprobs=2)
    found = ask(client, QUESTIONS[0], **options)
    again = ask(client, QUESTIONS[0], **options)
    assert [c.message.content for c in found.choices] == [c.message.content for c in again.choices]
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice in found.choices:
        assert len(choice.logprobs.content) == 6
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 2 and token.logprob <= 0
            assert bytes(token.bytes).decode(errors="replace") == token.token
    streamed = [e.choices[0] for e in ask(client, QUESTIONS[0], stream=True, **options) if e.choices]
    for choice in found.choices:
        own = [e for e in streamed if e.index == choice.index]
        assert "".join(e.delta.content or "" for e in own) == choice.message.content
        told = [t.token for e in own if e.logprobs for t in e.logprobs.content]
        assert told == [t.token for t in choice.logprobs.content]


WRONG = {
    "no JSON": "{", "no object": "[]", "no messages": {}, "messages of another form": {"messages": [5]},
    "a negative temperature": {"temperature": -1}, "top_p of text": {"top_p": "x"}, "no tokens": {"max_tokens": 0},
    "stops of numbers": {"stop": [1]}, "an empty stop": {"stop": ""}, "tools": {"tools": [{"type": "function"}]},
    "json_object": {"response_format": {"type": "json_object"}}, "logprobs of text": {"logprobs": "yes"},
    "half a sample": {"n": 1.5}, "many samples": {"n": 129},
    "a seed of text": {"seed": "x"}, "penalties": {"presence_penalty": 1.0},
    "deep": "[" * 100_000, "options of a stream in a text": {"stream": True, "stream_options": "x"},
    "a stream of text": {"stream": "yes"}, "fewer than no log-probabilities": {"logprobs": True, "top_logprobs": -1},
    "more log-probabilities than are compiled": {"logprobs": True, "top_logprobs": 21},
    "log-probabilities of nothing": {"top_logprobs": 2}, "min_p beyond 1": {"min_p": 2},
    "top_k of text": {"top_k": "x"},
    "other penalties": {"repetition_penalty": 1.1}, "a least number of tokens": {"min_tokens": 2},
    "tokens of text": {"max_tokens": "5"},
    "no content": {"messages": [{"role": "user"}]},
    "null for a content": {"messages": [{"role": "user", "content": None}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "a part of another kind": {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]},
    "a part without a form": {"messages": [{"role": "user", "content": ["x"]}]},
    "half a character": {"messages": [{"role": "user", "content": "\ud800"}]},
    "a prompt that is too long": {"messages": [{"role": "user", "content": "x" * 2000}]},
    "stop tokens of text": {"stop_token_ids": ["x"]}, "an empty salt": {"cache_salt": ""},
    "template arguments of text": {"chat_template_kwargs": "x"}, "end of a text": {"ignore_eos": "yes"},
    "more stops than a step has time for": {"stop": [f"no {i}" for i in range(129)]},
    "more stop tokens": {"stop_token_ids": [5] * 129}, "a stop that is a book": {"stop": "x" * 1025},
    "messages twice": {"chat_template_kwargs": {"messages": []}}, "itself": {"chat_template_kwargs": {"self": 1}},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_answered_by_a_sentence(served, name):
    body = WRONG[name]
    if isinstance(body, dict):
        message = [{"role": "user", "content": "?"}]
        body = json.dumps({"messages": message, "max_tokens": 3} | body if body else body)
    found = httpx.post(served[2] + "/v1/chat/completions", content=body)
    error = found.json()["error"]
    assert found.status_code == 400 and error["type"] == "invalid_request_error" and len(error["message"]) < 400
    assert served[0].is_served and served[0].num_waiting == 0


def test_parts_of_text_are_one_text(client, expected):
    first, second = QUESTIONS[0][:10], QUESTIONS[0][10:]
    parts = [{"type": "text", "text": text} for text in (first, second)]
    for given, same in ((parts, f"{first}\n{second}"), (parts[:1], first), ([], "")):
        assert ask(client, given, max_tokens=9).choices[0].message.content == expected(same, 9)


def test_a_body_beyond_all_use_is_refused(served, client, expected):
    """A text of megabytes would keep the tokenizer, and all others, for seconds."""
    for size, status in ((100_000, 400), (1_070_000, 413), (20_000_000, 413)):
        found = httpx.post(served[2] + "/v1/completions", json={"prompt": " " * size}, timeout=60)
        assert found.status_code == status and len(found.json()["error"]["message"]) < 400, found.text
    assert ask(client, QUESTIONS[0], max_tokens=5).choices[0].message.content == expected(QUESTIONS[0], 5)


def test_who_goes_away_in_its_body_leaves_no_traceback(served, caplog):
    engine, _, url = served
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
    with socket.create_connection(address) as half:
        half.sendall(head + b'{"messages"')
        assert httpx.get(url + "/health").text == "ok"
    for _ in range(3):
        assert httpx.get(url + "/health").text == "ok"
    assert engine.is_idle and not caplog.records, caplog.text


def test_completions(served, client):
    """Texts and lists of tokens are continued as they are, several at once."""
    engine, text, _ = served
    prompts = ["Tell me", "Why is"]
    wanted = [engine.submit(text.encode(p), 6, eos=(257,), tokenizer=text) for p in prompts]
    engine.wait(60)
    texts = [request.text for request in wanted]
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=6)
    assert [choice.text for choice in found.choices] == texts and [choice.index for choice in found.choices] == [0, 1]
    assert found.object == "text_completion" and {choice.finish_reason for choice in found.choices} <= {
        "stop",
        "length",
    }
    assert found.usage.prompt_tokens == sum(len(request.prompt) for request in wanted)
    for given in (text.encode(prompts[1]), [text.encode(prompts[1])]):
        assert client.completions.create(model="tiny", prompt=given, max_tokens=6).choices[0].text == texts[1]
    pieces = ["", ""]
    for event in client.completions.create(model="tiny", prompt=prompts, max_tokens=6, echo=True, stream=True):
        pieces[event.choices[0].index] += event.choices[0].text
    assert pieces == [prompt + more for prompt, more in zip(prompts, texts, strict=True)]
    assert len(client.completions.create(model="tiny", prompt="?").choices[0].text) > 0


def test_echo_gives_the_prompts_log_probabilities(served, client):
    engine, text, _ = served
    tokens = text.encode("Tell me why")
    scored = engine.submit(tokens, 0, prompt_logprobs=True)
    engine.wait(60)
    options = dict(prompt=tokens, max_tokens=2, logprobs=2, echo=True, n=2, temperature=1.0, seed=1)
    found = client.completions.create(model="tiny", **options)
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice in found.choices:
        own = choice.logprobs
        count = len(tokens)
        assert own.token_logprobs[0] is None and own.top_logprobs[0] is None
        assert own.token_logprobs[1:count] == pytest.approx(scored.prompt_logprobs.tolist(), abs=1e-5)
        assert all(2 <= len(best) <= 3 for best in own.top_logprobs[1:]) and len(own.tokens) == len(own.text_offset)
        assert "".join(own.tokens[:count]) == text.decode(tokens, special=True)
    alone = client.completions.create(model="tiny", prompt=tokens, max_tokens=0, logprobs=0, echo=True).choices[0]
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(scored.prompt_logprobs.tolist(), abs=1e-5)
    assert alone.text == text.decode(tokens) == "Tell me why" and alone.finish_reason == "length"


WRONG_COMPLETIONS = {
    "no prompt": {"prompt": None}, "an empty list": {"prompt": []}, "a prompt that is a number": {"prompt": 5},
    "tokens of text": {"prompt": [[1, "x"]]}, "a token that there is not": {"prompt": [1, 10**6]},
    "true as a token": {"prompt": [[True]]}, "a suffix": {"suffix": "x"}, "best_of": {"best_of": 3},
    "logprobs of a switch": {"logprobs": True}, "no tokens": {"max_tokens": 0}, "echo of text": {"echo": "yes"},
    "a stream of scored prompts": {"echo": True, "logprobs": 1, "stream": True},
    "one of several": {"prompt": ["fine", "x" * 2000]},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_COMPLETIONS)
def test_a_wrong_completion_is_answered_by_a_sentence(served, name):
    engine = served[0]
    body = {"prompt": "x", "max_tokens": 3} | WRONG_COMPLETIONS[name]
    found = httpx.post(served[2] + "/v1/completions", json=body)
    assert found.status_code == 400 and len(found.json()["error"]["message"]) < 400, found.text
    engine.wait(60)
    assert engine.is_served and engine.is_idle


# What vLLM takes, and OpenAI; a value that would change an answer.
FOREIGN = {
    "guided_json": {"type": "object"}, "guided_choice": ["a"], "guided_regex": "a+", "guided_grammar": "a",
    "structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}, "bad_words": ["a"],
    "allowed_token_ids": [1], "logits_processors": ["a"], "min_tokens": 2, "logit_bias": {"1": 5},
    "frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.1, "use_beam_search": True,
    "length_penalty": 2.0, "best_of": 3, "truncate_prompt_tokens": 5, "prompt_logprobs": 1,
    "skip_special_tokens": False, "return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_embeds": "a",
    "tools": [{"type": "function"}], "functions": [{}], "tool_choice": "required", "function_call": {"name": "a"},
    "chat_template": "{{ messages }}", "continue_final_message": True, "documents": [{"text": "a"}], "echo": True,
    "add_special_tokens": True, "thinking_token_budget": 5, "audio": {}, "modalities": ["text", "audio"],
    "prediction": {"content": "a"}, "web_search_options": {}, "lora_path": "a", "regex": "a", "json_schema": {},
}  # fmt: skip


@pytest.mark.parametrize("field", FOREIGN)
def test_what_is_not_done_is_refused_by_name(served, field):
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2, field: FOREIGN[field]}
    found = httpx.post(served[2] + "/v1/chat/completions", json=body)
    assert found.status_code == 400 and found.json()["error"]["message"].startswith(field), found.text


def test_fields_of_vllm_are_done(served, client, expected, monkeypatch):
    engine, text, _ = served
    told = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *a, **given: told.append((a, given)) or submit(*a, **given))
    own = {"priority": 3, "cache_salt": "me", "top_k": -1, "ignore_eos": True}
    ask(client, QUESTIONS[0], max_tokens=2, extra_body=own)
    assert told[-1][1]["priority"] == 3 and told[-1][1]["salt"] == "me" and told[-1][1]["eos"] == ()
    assert told[-1][1]["top_k"] == 0, "-1: all"
    tokens = engine.submit(text.chat([{"role": "user", "content": QUESTIONS[0]}]), 20).result(60)
    at = next(i for i in range(5, 20) if tokens[i] not in tokens[:i])
    own = {"stop_token_ids": [tokens[at]], "include_stop_str_in_output": True, "priority": None}
    found = ask(client, QUESTIONS[0], max_tokens=20, stop=["no such text"], extra_body=own)
    assert found.choices[0].message.content == expected(QUESTIONS[0], at + 1)
    assert found.choices[0].finish_reason == "stop" and found.usage.completion_tokens == at + 1
    alone = ask(client, QUESTIONS[0], max_tokens=20, extra_body={"stop_token_ids": [tokens[at]]}).choices[0]
    assert alone.message.content == expected(QUESTIONS[0], at)
    message = [{"role": "user", "content": QUESTIONS[0]}]
    ask(client, QUESTIONS[0], max_tokens=2, extra_body={"add_generation_prompt": False})
    assert told[-1][0][0] == text.chat(message, add_generation_prompt=False) != text.chat(message)
    given = []
    monkeypatch.setattr(text, "chat", lambda *a, **more: given.append(more) or [1])
    more = {"chat_template_kwargs": {"enable_thinking": False}}
    ask(client, QUESTIONS[0], max_tokens=2, reasoning_effort="low", extra_body=more)
    assert given == [{"enable_thinking": False, "reasoning_effort": "low"}]


def test_another_model_is_not_served(served):
    url, body = served[2] + "/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
    found = httpx.post(url, json=body | {"model": "my-lora"})
    assert found.status_code == 404 and "'my-lora'" in found.text and "tiny" in found.text and "leave" in found.text
    for fine in ({}, {"model": None}, {"model": "tiny"}):
        assert httpx.post(url, json=body | fine, timeout=60).json()["model"] == "tiny"
    assert httpx.post(url, json=body | {"model": 5}).status_code == 404


def test_what_is_no_json_is_said_in_our_words(served):
    for body, says in (
        (b"", "The body is no JSON"), (b"{", "The body is no JSON"), (b'{"a": "\xff"}', "The body is no JSON"),
        (b"[" * 100_000, "The body is nested too deeply"), (b'{"seed": ' + b"9" * 5000 + b"}", "The body is no JSON"),
        (b'{"messages": [{"role": "user", "content": "a\\ud800"}]}', "The text has half a character"),
    ):  # fmt: skip
        found = httpx.post(served[2] + "/v1/chat/completions", content=body)
        assert found.status_code == 400 and found.json()["error"]["message"].startswith(says), found.text
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404)):
        found = httpx.request(method, served[2] + path)
        assert found.status_code == status and "/v1/chat/completions" in found.json()["error"]["message"]


def test_bytes_of_half_a_character_are_its_own(served, client):
    """A character of several tokens can be put together of their bytes."""
    text = served[1]
    prompt = text.encode("東京", special=False)
    options = dict(max_tokens=3, temperature=1.0, extra_body={"echo": True}, logprobs=2)
    found = client.completions.create(model="tiny", prompt=prompt, **options).choices[0].logprobs
    tokens = found.tokens[: len(prompt)]
    assert tokens == [f"bytes:\\x{byte:02x}" for byte in "東京".encode()]
    assert found.text_offset[: len(prompt)] == [0, 0, 0, 1, 1, 1]
    chosen = list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[len(prompt) :]
    for token, logprob, best in chosen:  # none hides another
        assert best[token] == logprob and len(best) == 3 - (logprob >= sorted(best.values())[-2])
    logprobs = dict(max_tokens=30, temperature=1.0, seed=3, logprobs=True, top_logprobs=2)
    choice = ask(client, QUESTIONS[1], **logprobs).choices[0]
    assert any("\ufffd" in token.token for token in choice.logprobs.content)
    whole = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert whole.decode(errors="replace").rstrip("\ufffd") == choice.message.content.rstrip("\ufffd")


def test_the_chosen_token_is_among_the_likeliest(client):
    """As OpenAI has it: up to one more than were asked for."""
    for count in (0, 1):
        options = dict(prompt="abc", max_tokens=20, temperature=2.0, seed=1, logprobs=count)
        found = client.completions.create(model="tiny", **options).choices[0].logprobs
        for token, logprob, best in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert best[token] == logprob and len(best) == 1 + (count == 1 and logprob < max(best.values()))
        assert max(map(len, found.top_logprobs)) == 1 + count


def test_offsets_of_a_stream_go_on(served, client):
    options = dict(prompt="abc", max_tokens=12, temperature=1.0, seed=1, logprobs=1)
    whole = client.completions.create(model="tiny", **options).choices[0].logprobs
    parts = [e.choices[0].logprobs for e in client.completions.create(model="tiny", stream=True, **options)]
    assert [at for part in parts if part for at in part.text_offset] == whole.text_offset
    assert [token for part in parts if part for token in part.tokens] == whole.tokens


def test_what_is_off_is_taken():
    given = {"tools": None, "presence_penalty": 0, "response_format": {"type": "text"}, "user": "me", "stop": None}
    assert read_options(given | {"max_tokens": 5}, {"top_k": 3}, 9) == {"top_k": 3, "max_new_tokens": 5}
    assert read_options({}, {}, 9)["max_new_tokens"] == 9
    assert read_options({"repetition_penalty": 1.0, "ignore_eos": False, "min_tokens": 0}, {}, 9) == {
        "max_new_tokens": 9
    }
    assert read_options({"max_tokens": 10**30}, {}, 9)["max_new_tokens"] < 2**31, "as many as there is room for"
    several = {"stop": ["x" * 1024] * 128, "stop_token_ids": [5] * 128}
    assert len(read_options(several, {}, 9)["stop"]) == 256
    off = {"tool_choice": "auto", "function_call": "none", "skip_special_tokens": True, "modalities": ["text"]}
    off |= {"length_penalty": 1, "best_of": 1, "guided_json": None, "tools": [], "stop_token_ids": [], "echo": False}
    off |= {"include_stop_str_in_output": False, "cache_salt": None, "add_special_tokens": False, "bad_words": []}
    assert read_options(off, {}, 9) == {"max_new_tokens": 9, "include_stop": False}
    ChatCompletion(off, None)
    wanted = {"top_k": 5, "min_p": 0.1, "seed": 5}
    assert read_options(wanted | {"seed": 2**32 + 5}, {}, 9) == wanted | {"max_new_tokens": 9}


def test_what_is_compiled_serves_every_number_of_log_probabilities():
    """Another number would be a program of its own, which a server would compile while all its streams wait."""
    asked = [
        kind({"logprobs": wanted, "top_logprobs": 2 if wanted is True else None}, None).options()["logprobs"]
        for kind, wanted in ((ChatCompletion, True), (Completion, 0), (Completion, 20))
    ]
    assert asked == [MOST_LOGPROBS] * 3


def test_those_programs_are_compiled_before_it_listens(monkeypatch):
    class Compiled(Exception):
        pass

    def compile_programs(**asked):
        raise Compiled(asked)

    engine = types.SimpleNamespace(warmup=compile_programs)
    monkeypatch.setattr(
        serve, "open_model", lambda _: types.SimpleNamespace(model=types.SimpleNamespace(max_seq_len=64))
    )
    monkeypatch.setattr(jaxkv, "Engine", lambda *_, **__: engine)
    options = "seed max_seqs max_seq_len memory block_size max_waiting cache_dtype residual_length"
    with pytest.raises(Compiled) as told:
        serve.serve(
            types.SimpleNamespace(
                warmup=True,
                host="127.0.0.1",
                port=free_port(),
                **dict.fromkeys(f"{options} prefix_disk prefix_disk_bytes".split()),
            )
        )
    assert told.value.args[0] == {"kinds": ("greedy", "sampled", "filtered"), "logprobs": (MOST_LOGPROBS,)}


def test_what_the_command_says_of_answers_is_taken(monkeypatch, folder):  # noqa: F811
    """--seed and --max-new-tokens hold where a request says nothing; --served-model-name is what it may ask for."""
    found = {}

    class Listens(Exception):
        pass

    def listen(app, _):
        found["app"] = app
        raise Listens

    made = jaxkv.Engine
    monkeypatch.setattr(jaxkv, "Engine", lambda *a, **given: found.update(given) or made(*a, **given))
    monkeypatch.setattr(serve, "_listen", listen)
    monkeypatch.setattr(serve, "make_app", lambda *given: given)
    sizes = ["--max-seqs", "1", "--max-seq-len", "64", "--no-warmup", "--port", "0"]
    for given, names, most in (
        ([], [folder.name], None),
        (["--served-model-name", "a", "b", "--max-new-tokens", "5"], ["a", "b"], 5),
    ):
        with pytest.raises(Listens):
            main(["serve", "--model", str(folder), "--seed", "7", *sizes, *given])
        assert found["seed"] == 7 and list(found["app"][2]) == names and found["app"][-1] == most


def test_a_port_is_looked_at_before_anything_is_compiled(monkeypatch, capsys):
    """A second server on a port, and a number that is none, are told at once: not behind the programs."""

    class Opened(Exception):
        pass

    def open_model(_):
        raise Opened

    def said(*given):
        assert main(["serve", "--model", "none", *given]) == 2
        err = capsys.readouterr().err
        assert err.startswith("jaxkv: ") and err.count("\n") == 1
        return err

    monkeypatch.setattr(serve, "open_model", open_model)
    assert "--port must be from 0 to 65535, not 99999" in said("--port", "99999")
    assert "--port must be from 0 to 65535, not -1" in said("--port", "-1")
    assert "--host here.invalid is no address of this machine" in said("--host", "here.invalid")
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        wanted = f"The server cannot listen on port {port} of 127.0.0.1 (Address already in use): give another --port"
        assert wanted in said("--port", str(port))
        with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
            pass
    for free in (port, 0):  # the connection closed a moment ago
        with pytest.raises(Opened):
            main(["serve", "--model", "none", "--port", str(free)])


def test_an_error_names_the_field_that_was_sent(served):
    body = {"messages": [{"role": "user", "content": "?"}]}
    for given, says in (
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens must be a whole number"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be a text"),
    ):
        found = httpx.post(served[2] + "/v1/chat/completions", json=body | given)
        assert found.json()["error"]["message"].startswith(says), found.text


def test_an_error_of_ours_is_no_traceback(served, monkeypatch, caplog):
    def broken(*_, **__):
        raise KeyError("within")

    monkeypatch.setattr(served[0], "submit", broken)
    body = {"messages": [{"role": "user", "content": "?"}]}
    found = httpx.post(served[2] + "/v1/chat/completions", json=body)
    assert found.status_code == 500 and "within" not in found.text and "its log says why" in found.text
    assert "KeyError" in caplog.text


def test_too_many_are_told_to_wait(served, client, openai):
    engine = served[0]
    engine.max_waiting = 1
    try:
        with concurrent.futures.ThreadPoolExecutor(12) as threads:
            found = [threads.submit(ask, client, QUESTIONS[0], max_tokens=60) for _ in range(12)]
            errors = [future.exception() for future in found]
    finally:
        engine.max_waiting = 40
    assert all(isinstance(error, openai.RateLimitError) for error in errors if error)
    assert any(errors) and not all(errors)


def test_more_than_can_ever_wait_is_no_matter_of_waiting(served):
    """A client that tries again after 429 would do so for ever. What rows take at once does not wait."""
    body = {"prompt": ["a"] * 22, "max_tokens": 1, "n": 2}
    found = httpx.post(served[2] + "/v1/completions", json=body | {"prompt": ["a"] * 23})
    assert found.status_code == 400 and "46 answers, but at most 44" in found.json()["error"]["message"]
    assert len(httpx.post(served[2] + "/v1/completions", json=body, timeout=60).json()["choices"]) == 44


def test_health_and_metrics(served, client):
    ask(client, QUESTIONS[0], max_tokens=2)
    assert httpx.get(served[2] + "/health").text == "ok"
    text = httpx.get(served[2] + "/metrics").text
    assert "jaxkv_tokens_total" in text and 'jaxkv_first_token_seconds{quantile="0.5"}' in text


def test_models_say_how_long_a_sequence_is(served, client):
    """As vLLM's, by `max_model_len`; a request that names none gets the only one."""
    (model,) = client.models.list()
    assert model.object == "model" and 0 <= time.time() - model.created < 10_000 and model.max_model_len == 256
    for name in (None, ""):
        found = httpx.post(served[2] + "/v1/completions", json={"model": name, "prompt": "?", "max_tokens": 1})
        assert found.json()["model"] == "tiny"


def test_metrics_hold_nobody_up_while_a_step_is_under_way(served):
    """They come between two steps, of which some compile for a minute."""
    engine, _, url = served
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold(request, token):
        is_held.set()
        may_go_on.wait(60)

    request = engine.submit([1], 1, eos=(), on_token=hold)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        try:
            assert is_held.wait(60)
            metrics = threads.submit(httpx.get, url + "/metrics", timeout=60)
            for _ in range(5):  # before and after that is asked for
                assert httpx.get(url + "/health", timeout=20).text == "ok"
                concurrent.futures.wait([metrics], timeout=0.1)
            assert not metrics.done()
        finally:
            may_go_on.set()
        assert "jaxkv_tokens_total" in metrics.result(60).text
    assert len(request.result(60)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_is_cancelled(served, client, monkeypatch, stream):
    engine, submitted = served[0], []
    submit = engine.submit
    ask(client, QUESTIONS[0], max_tokens=1)  # the template is read, and programs are there
    monkeypatch.setattr(
        engine, "submit", lambda *args, **options: submitted.append(submit(*args, **options)) or submitted[-1]
    )
    if stream:
        with ask(client, QUESTIONS[0], stream=True) as events:
            next(iter(events))
    else:
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": [{"role": "user", "content": QUESTIONS[0]}]}
            httpx.post(served[2] + "/v1/chat/completions", json=body, timeout=0.05)
    engine.wait(60)
    (request,) = submitted
    assert request.ended == "cancelled" and len(request.tokens) < request.limit


def test_what_the_server_cuts_off_is_no_answer(served, client, monkeypatch, openai):
    submit = served[0].submit

    def submit_and_cancel(*arguments, **options):
        request = submit(*arguments, **options)
        request.cancel()
        return request

    monkeypatch.setattr(served[0], "submit", submit_and_cancel)
    with pytest.raises(openai.InternalServerError, match="The server is closing") as found:
        ask(client, QUESTIONS[0], max_tokens=9)
    assert found.value.status_code == 503


def test_who_goes_away_leaves_no_traceback(served):
    engine, text, _ = served
    reported = []

    class Gone:
        async def receive(self):
            return {"type": "http.disconnect"}

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        assert not await finish([engine.submit(text.encode("Why?"), 200, eos=(), n=2)], Gone())
        gc.collect()

    asyncio.run(run())
    assert not reported


def test_clients_come_and_go(served, client, expected, openai):
    """Some break off in the middle, some send rubbish; the others get what they would alone."""
    engine, _, url = served
    wanted = {(q, n): expected(q, n) for q in QUESTIONS for n in (5, 12, 30)}
    wrong = []

    def visit(number):
        draw = random.Random(number)
        for _ in range(20 if NIGHTLY else 3):
            (question, count), how = draw.choice(list(wanted)), draw.random()
            try:
                if how < 0.15:
                    httpx.post(url + "/v1/chat/completions", content=draw.randbytes(30))
                elif how < 0.35:
                    with ask(client, question, max_tokens=200, stream=True) as stream:
                        next(iter(stream))
                elif how < 0.45:
                    with pytest.raises(httpx.ReadTimeout):
                        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200}
                        httpx.post(url + "/v1/chat/completions", json=body, timeout=0.01)
                elif how < 0.7:
                    events = ask(client, question, max_tokens=count, stream=True)
                    if (found := "".join(e.choices[0].delta.content or "" for e in events)) != wanted[question, count]:
                        wrong.append((question, count, found))
                elif (found := ask(client, question, max_tokens=count).choices[0].message.content) != wanted[
                    question, count
                ]:
                    wrong.append((question, count, found))
            except openai.RateLimitError:
                time.sleep(0.05)

    with concurrent.futures.ThreadPoolExecutor(100 if NIGHTLY else 12) as threads:
        list(threads.map(visit, range(100 if NIGHTLY else 12)))
    assert not wrong
    engine.wait(60)
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    jaxkv.check_invariants(engine.cache)
    assert httpx.get(url + "/health").text == "ok" and ask(client, "?", max_tokens=2).usage.completion_tokens == 2


def test_the_command(folder):  # noqa: F811
    port = free_port()
    command = [sys.executable, "-m", "jaxkv", "serve", "--model", str(folder), "--port", str(port), "--grace", "0"]
    command += [] if NIGHTLY else ["--no-warmup", "--max-seqs", "2", "--max-seq-len", "4096"]  # little is compiled
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            for _ in range(600):
                if process.poll() is not None:
                    break
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 3, "temperature": 0}
            found = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120)
            assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] <= 3
            body |= {"max_tokens": 4000, "temperature": 1.5, "n": 8, "stream": True}
            with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                rest = [line for line in lines if line]
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (0, 130) and "Traceback" not in out, out
    assert rest[-1] == "data: [DONE]" and "The server is closing" in rest[-2], "a stream is ended, not cut off"
