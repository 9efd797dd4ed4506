"""What the server answers to chats and completions, whole and as streams, against what the library answers."""

import functools
import json
import threading

import pytest
from http_server import QUESTIONS, ask, httpx

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves


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


def test_a_text_begins_with_no_special_token_where_none_is_wanted(served):
    text = served[1]
    for given, count in (({}, 3), ({"add_special_tokens": None}, 3), ({"add_special_tokens": False}, 2)):
        body = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 0} | given
        found = httpx.post(served[2] + "/v1/completions", json=body, timeout=60).json()
        assert found["usage"]["prompt_tokens"] == count == len(text.encode("ab", special=count == 3))


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
