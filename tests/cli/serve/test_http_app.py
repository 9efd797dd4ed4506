"""The server's other routes, its clients that come, go and fail, and how many may wait."""

import asyncio
import concurrent.futures
import gc
import json
import random
import socket
import threading
import time

import pytest
from http_server import QUESTIONS, ask, httpx
from nightly import NIGHTLY

import jaxkv
from jaxkv._cli.http import app
from jaxkv._cli.http.answers import finish
from jaxkv._cli.http.body import AT_ONCE, write_json

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves


def test_health_and_metrics(served, client):
    ask(client, QUESTIONS[0], max_tokens=2)
    assert httpx.get(served[2] + "/health").text == "ok"
    text = httpx.get(served[2] + "/metrics").text
    assert "jaxkv_tokens_total" in text and 'jaxkv_first_token_seconds{quantile="0.5"}' in text


def test_what_is_not_served_is_said(served):
    for method, path in (("POST", "/v1/embeddings"), ("GET", "/"), ("GET", "/v1/tokenize")):
        found = httpx.request(method, served[2] + path)
        assert found.status_code == 404 and found.json()["error"]["type"] == "not_found_error"
        assert found.json()["error"]["message"].startswith(
            f"{method} {path} is not served here, but /v1/chat/completions"
        )
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"), ("OPTIONS", "/tokenize", "POST"), ("POST", "/version", "GET, HEAD"),
        ("DELETE", "/ping", "GET, HEAD, POST"),
    ):  # fmt: skip
        found = httpx.request(method, served[2] + path)
        assert found.status_code == 405 and found.headers["allow"] == allowed
        assert found.json()["error"]["message"] == f"{method} is not for {path}, but {allowed}."


def test_version_and_ping(served, monkeypatch):
    assert httpx.get(served[2] + "/version").json() == {"version": jaxkv.__version__}
    for method in ("GET", "POST"):
        found = httpx.request(method, served[2] + "/ping")
        assert (found.status_code, found.text) == (200, "ok")
    monkeypatch.setattr(type(served[0]), "is_served", False)
    for path in ("/ping", "/health"):
        assert httpx.get(served[2] + path).status_code == 503


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
            found = [threads.submit(ask, client, QUESTIONS[0], max_tokens=150) for _ in range(12)]
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


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 1}, {"logprobs": 1}, {"logprobs": 0, "echo": True}])
def test_long_answers_hold_nobody_up_while_they_are_written(served, monkeypatch, wanted):
    """What is told of thousands of tokens takes a second."""
    is_held, may_go_on, write = threading.Event(), threading.Event(), app.write_answer

    def hold(*given):
        is_held.set()
        return write(*given) if may_go_on.wait(30) else "nobody was answered"

    monkeypatch.setattr(app, "write_answer", hold)
    body = {"prompt": "a", "max_tokens": 1} | wanted
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        found = threads.submit(httpx.post, served[2] + "/v1/completions", json=body, timeout=60)
        assert is_held.wait(60) and httpx.get(served[2] + "/health", timeout=60).text == "ok"
        may_go_on.set()
        assert len(found.result(60).json()["choices"]) == 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_book_is_read_for_who_waits_for_it_and_keeps_no_short_text_waiting(served, monkeypatch, path):
    """One book at a time; a client that has gone before its turn is not worked for."""
    _, text, url = served
    is_held, may_go_on, books, encode = threading.Event(), threading.Event(), [], text.encode

    def hold(said, **options):
        if len(said) > 50_000:
            books.append(said[0])
            is_held.set()
            assert may_go_on.wait(60)
            return [1]
        return encode(said, **options)

    def post(said):
        return httpx.post(url + path, json={"prompt": said, "max_tokens": 1}, timeout=60)

    monkeypatch.setattr(text, "encode", hold)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(post, "a" * 100_000)
            assert is_held.wait(60)
            body = json.dumps({"prompt": "b" * 1_000_000}).encode()
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as gone:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                gone.sendall(head.encode() + body)
                assert post("short").status_code == 200
            last = threads.submit(post, "c" * 100_000)
            assert post("short").status_code == 200
        finally:
            may_go_on.set()
        assert first.result(60).status_code == last.result(60).status_code == 200
    assert books == ["a", "c"]


def test_json_in_pieces_is_json():
    for value in (
        {}, [], {"a": {"b": []}, "ü": [1.5, None, "é\n\"", True]}, [[i, {"x": str(i)}] for i in range(3 * AT_ONCE + 1)],
        {"a": {"b": list(range(AT_ONCE))}, 5: [{}] * (AT_ONCE + 1)}, "東", 5,
    ):  # fmt: skip
        assert write_json(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    with pytest.raises(ValueError, match="JSON"):
        write_json([float("nan")])


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
