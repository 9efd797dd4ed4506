"""What the server reads of a request's body, and what it refuses by a sentence."""

import difflib
import json
import types

import pytest
from http_server import QUESTIONS, ask, httpx, listen

from jaxkv._cli.http.app import make_app
from jaxkv._cli.http.openai_format import MOST_LOGPROBS, ChatCompletion, Completion, read_options

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves


WRONG = {
    "no JSON": "{", "no object": "[]", "no messages": {}, "messages of another form": {"messages": [5]},
    "a negative temperature": {"temperature": -1}, "top_p of text": {"top_p": "x"}, "no tokens": {"max_tokens": 0},
    "stops of numbers": {"stop": [1]}, "an empty stop": {"stop": ""}, "tools": {"tools": [{"type": "function"}]},
    "json_object": {"response_format": {"type": "json_object"}}, "logprobs of text": {"logprobs": "yes"},
    "half a sample": {"n": 1.5}, "many samples": {"n": 129},
    "a seed of text": {"seed": "x"},
    "deep": "[" * 100_000, "options of a stream in a text": {"stream": True, "stream_options": "x"},
    "a stream of text": {"stream": "yes"}, "fewer than no log-probabilities": {"logprobs": True, "top_logprobs": -1},
    "more log-probabilities than are compiled": {"logprobs": True, "top_logprobs": 21},
    "log-probabilities of nothing": {"top_logprobs": 2}, "min_p beyond 1": {"min_p": 2},
    "top_k of text": {"top_k": "x"},
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


TYPES = {
    "chat/completions": {
        "logprobs": "true or false", "top_logprobs": "a whole number", "chat_template_kwargs": "an object",
        "add_generation_prompt": "true or false", "reasoning_effort": "a text", "stream": "true or false",
        "stream_options": "an object", "n": None, "max_tokens": "a whole number", "messages": None, "temperature": None,
        "cache_salt": "a text", "prompt_logprobs": "a whole number",
    },
    "completions": {
        "logprobs": "a whole number", "echo": "true or false", "ignore_eos": "true or false", "stop_token_ids": None,
        "include_stop_str_in_output": "true or false", "seed": None, "top_k": None, "best_of": None, "prompt": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", TYPES)
def test_a_value_of_another_type_is_not_said_at_length(served, path):
    """It is named, with what is expected, but not given back whole."""
    for field, kind in TYPES[path].items():
        for value in ([{"a": "\ud800"}] * 1000, "\ud800" * 1000, 10**4000):
            said = {"prompt": "a", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3, field: value}
            found = httpx.post(f"{served[2]}/v1/{path}", content=json.dumps(said))
            if found.status_code == 200:  # a text, or a number of 64 bits
                assert field in ("cache_salt", "seed", "top_k", "reasoning_effort", "prompt"), field
                continue
            message = found.json()["error"]["message"]
            assert found.status_code == 400 and len(message) < 400, (field, message)
            wanted = kind is None or isinstance(value, int)
            assert wanted or (message.startswith(field) and kind in message), message
    found = httpx.post(f"{served[2]}/v1/{path}", content=json.dumps({"model": ["\ud800" * 1000]}))
    assert found.status_code == 404 and len(found.json()["error"]["message"]) < 400


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


WRONG_COMPLETIONS = {
    "no prompt": {"prompt": None}, "an empty list": {"prompt": []}, "a prompt that is a number": {"prompt": 5},
    "tokens of text": {"prompt": [[1, "x"]]}, "a token that there is not": {"prompt": [1, 10**6]},
    "true as a token": {"prompt": [[True]]}, "a suffix": {"suffix": "x"}, "best_of": {"best_of": 3},
    "logprobs of a switch": {"logprobs": True}, "no tokens": {"max_tokens": 0}, "echo of text": {"echo": "yes"},
    "special tokens of text": {"add_special_tokens": "no"},
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
    "allowed_token_ids": [1], "logits_processors": ["a"], "use_beam_search": True,
    "length_penalty": 2.0, "best_of": 3, "truncate_prompt_tokens": 5,
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


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("logprob", "logprobs"),
        ("presense_penalty", "presence_penalty"),
    ],
)
def test_a_misspelt_field_is_refused(field, meant):
    with pytest.raises(ValueError, match=rf"^{field} is no field of this server: did you mean {meant}\?$"):
        read_options({field: 1}, {}, 9)


def test_few_names_of_a_body_are_compared(monkeypatch):
    """The event loop compares them, and a body may be nothing but unknown fields, or one of a mebibyte."""
    compared = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    read_options(dict.fromkeys(map(str, range(1000))) | {"temperature" * 10**5: 1}, {}, 9)
    assert compared == list(map(str, range(32)))


def test_fields_that_say_nothing_of_an_answer_are_passed():
    others = (
        "user",
        "store",
        "metadata",
        "service_tier",
        "parallel_tool_calls",
        "request_id",
        "top_a",
        "reasoning_effort",
    )
    known = "add_generation_prompt", "chat_template_kwargs", "echo", "prompt", "messages", "model", "add_special_tokens"
    assert read_options(dict.fromkeys((*others, *known), 1), {}, 9) == {"max_new_tokens": 9}


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


def test_an_error_names_the_field_that_was_sent(served):
    body = {"messages": [{"role": "user", "content": "?"}]}
    for given, says in (
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens must be a whole number"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be a text"),
    ):
        found = httpx.post(served[2] + "/v1/chat/completions", json=body | given)
        assert found.json()["error"]["message"].startswith(says), found.text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_more_than_the_context_holds_is_refused_and_not_cut(served, path):
    """As vLLM's. Without a number an answer has the rest of the context, or a completion's default if that is less."""
    text, content = served[1], "x" * 200

    def post(**more):
        said = {"prompt": content} if path == "completions" else {"messages": [{"role": "user", "content": content}]}
        found = httpx.post(f"{served[2]}/v1/{path}", json=said | {"ignore_eos": True} | more, timeout=60)
        return found.status_code, found.json()

    prompt = text.encode(content) if path == "completions" else text.chat([{"role": "user", "content": content}])
    room = 256 - len(prompt)
    for field in ("max_tokens", "max_completion_tokens"):
        status, found = post(**{field: room})
        assert (status, found["usage"]["completion_tokens"]) == (200, room)
        for asked in (room + 1, 256, 10**30, 10**4000):
            for stream in (False, True):
                status, found = post(**{field: asked}, stream=stream)
                message = found["error"]["message"]
                assert status == 400 and len(message) < 400
                assert message.startswith(f"The prompt has {len(prompt)} tokens and {field} is {str(asked)[:20]}")
                assert "256" in message and f"at most {room}" in message
    for more in ({}, {"max_tokens": None}):
        assert post(**more)[1]["usage"]["completion_tokens"] == min(room, 16 if path == "completions" else 256)
    content = "x" * (256 - len(prompt) + 200)
    for more in ({}, {"max_tokens": 1}):
        status, found = post(**more)
        assert status == 400 and "The prompt has 256 tokens" in found["error"]["message"], found
    content = content[1:]
    assert post()[1]["usage"]["completion_tokens"] == 1


def test_of_several_prompts_the_one_that_is_too_long_is_named(served):
    body = {"prompt": ["a", "x" * 250, "b"], "max_tokens": 10}
    found = httpx.post(served[2] + "/v1/completions", json=body)
    assert found.status_code == 400 and "prompt[1] has 251 tokens" in found.json()["error"]["message"]


@pytest.mark.parametrize("is_endless", [False, True])
def test_rows_of_windows_go_on_beyond_the_context(served, is_endless):
    """The engine of a model whose layers all have windows cuts nothing."""

    def submit(prompt, **options):
        raise ValueError(f"submitted {len(prompt)} and {options['max_new_tokens']}")

    config = types.SimpleNamespace(max_seq_len=8, max_seqs=1, is_endless=is_endless)
    engine = types.SimpleNamespace(config=config, max_waiting=None, vocab_size=260, eos_ids=(), submit=submit)
    with listen(make_app(engine, served[1], ["tiny"])) as url:
        for length, count in ((5, 4), (9, 1), (5, 3)):
            found = httpx.post(url + "/v1/completions", json={"prompt": [5] * length, "max_tokens": count})
            is_refused = not is_endless and length + count > 8
            told = f"has {length} tokens" if is_refused else f"submitted {length} and {count}"
            assert found.status_code == 400 and told in found.json()["error"]["message"]
