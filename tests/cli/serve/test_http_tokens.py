"""`/tokenize` and `/detokenize` as vLLM has them: tokens of texts and chats, and the text of tokens."""

import concurrent.futures
import json

import pytest
from http_server import httpx

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves

CHAT = [{"role": "user", "content": "Why 東?"}]


def post(served, path, **body):
    return httpx.post(served[2] + path, json=body, timeout=60)


def test_a_text_s_tokens_and_back(served):
    text = served[1]
    for said in ("Tell me why 東京", "", "<|im_start|>user"):
        found = post(served, "/tokenize", prompt=said).json()
        tokens = text.encode(said)
        assert found == {"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": None}
        plain = post(served, "/tokenize", prompt=said, add_special_tokens=False, model="tiny").json()
        assert plain["tokens"] == text.encode(said, special=False) == tokens[1:] and plain["count"] == len(tokens) - 1
        assert post(served, "/detokenize", tokens=plain["tokens"]).json() == {"prompt": said}
        assert post(served, "/detokenize", tokens=tokens).json() == {"prompt": "<bos>" + said}


def test_tokens_are_written_as_the_vocabulary_has_them(served):
    found = post(served, "/tokenize", prompt="a b\né", return_token_strs=True).json()
    assert found["token_strs"] == ["<bos>", "a", "Ġ", "b", "Ċ", "Ã", "©"]
    assert post(served, "/tokenize", prompt="a", return_token_strs=None, add_special_tokens=None).json()["count"] == 2


def test_a_chat_s_tokens_are_those_that_it_is_answered_for(served):
    """By all that a chat template is given, and by nothing that does not change them."""
    text, parts = served[1], [{"role": "user", "content": [{"type": "text", "text": "Why 東?"}]}]
    found = post(served, "/tokenize", messages=parts, temperature=0, presence_penalty=1).json()
    answered = post(served, "/v1/chat/completions", messages=CHAT, max_tokens=1).json()
    assert found["tokens"] == text.chat(CHAT) and found["count"] == answered["usage"]["prompt_tokens"]
    found = post(served, "/tokenize", messages=CHAT, add_generation_prompt=False, return_token_strs=True).json()
    assert found["tokens"] == text.chat(CHAT, add_generation_prompt=False) and found["token_strs"][0] == "<|im_start|>"


def test_what_a_template_is_given_is_taken(served, monkeypatch):
    given = []
    monkeypatch.setattr(served[1], "chat", lambda *a, **more: given.append(more) or [1])
    assert (
        post(served, "/tokenize", messages=CHAT, chat_template_kwargs={"enable_thinking": False}).json()["count"] == 1
    )
    assert given == [{"enable_thinking": False}]


WRONG = {
    "neither": {}, "both": {"prompt": "a", "messages": CHAT}, "null": {"prompt": None}, "a number": {"prompt": 5},
    "true": {"prompt": True}, "several texts": {"prompt": ["a", "b"]}, "tokens": {"prompt": [1, 2]},
    "an object": {"prompt": {"prompt": "a"}}, "half a character": {"prompt": "\ud800"},
    "no messages": {"messages": []}, "a text for messages": {"messages": "a"}, "no role": {"messages": [{}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "a switch of text": {"prompt": "a", "add_special_tokens": "no"},
    "a switch of a number": {"prompt": "a", "return_token_strs": 1},
    "a chat's special tokens": {"messages": CHAT, "add_special_tokens": True},
    "a prompt of text": {"messages": CHAT, "add_generation_prompt": "yes"},
    "tools": {"messages": CHAT, "tools": [{"type": "function"}]},
    "a template": {"messages": CHAT, "chat_template": "{{ messages }}"},
    "an open end": {"messages": CHAT, "continue_final_message": True},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_text_is_answered_by_a_sentence(served, name):
    found = httpx.post(served[2] + "/tokenize", content=json.dumps(WRONG[name]))
    error = found.json()["error"]
    assert found.status_code == 400 and error["type"] == "invalid_request_error" and len(error["message"]) < 400


WRONG_TOKENS = {
    "none": {}, "null": {"tokens": None}, "a number": {"tokens": 5}, "a text": {"tokens": "1, 2"},
    "a list of lists": {"tokens": [[1, 2]]}, "half a token": {"tokens": [1.5]}, "a whole float": {"tokens": [1.0]},
    "true": {"tokens": [True]}, "null among them": {"tokens": [1, None]}, "text among them": {"tokens": ["1"]},
    "a negative one": {"tokens": [-1]}, "one beyond the vocabulary": {"tokens": [260]},
    "a huge one": {"tokens": [2**70]}, "half a character": {"tokens": ["\ud800"]},
    "a book": {"tokens": ["x" * 10_000]}, "an object": {"tokens": {"0": 1}},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_wrong_tokens_are_answered_by_a_sentence(served, name):
    found = httpx.post(served[2] + "/detokenize", content=json.dumps(WRONG_TOKENS[name]))
    assert found.status_code == 400 and found.json()["error"]["message"].startswith("tokens must be"), found.text
    assert len(found.json()["error"]["message"]) < 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_their_bodies_are_read_as_others(served, path):
    for content, status in (
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"model": "other"}', 404),
        (b" " * 1_100_000, 413),
    ):
        found = httpx.post(served[2] + path, content=content, timeout=60)
        assert found.status_code == status and len(found.json()["error"]["message"]) < 400, found.text
    assert httpx.get(served[2] + path).status_code == 405


def test_no_tokens_are_no_text(served):
    assert post(served, "/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_book_keeps_nobody_waiting(served, path):
    """Others are answered while it is read: `encode` itself is tried in test_tokenizer.py."""
    body = {"tokens": [97] * 250_000} if path == "/detokenize" else {"prompt": "a" * 250_000}
    with concurrent.futures.ThreadPoolExecutor(1) as threads, httpx.Client() as client:
        book, answered = threads.submit(post, served, path, return_token_strs=True, **body), 0
        while not book.done():
            assert client.get(served[2] + "/health").text == "ok"
            answered += 1
    found = book.result().json()
    assert answered >= 10, answered
    assert len(found["prompt"]) == 250_000 if path == "/detokenize" else found["count"] == len(found["token_strs"])
