"""`python -m jaxkv serve`: its options, what it compiles, and the command itself."""

import os
import signal
import socket
import subprocess
import sys
import time
import types

import pytest
from checksum_model import LONGEST, Checksum
from http_server import free_port, httpx
from nightly import NIGHTLY

import jaxkv
from jaxkv._cli.http import serve
from jaxkv._cli.http.openai_format import MOST_LOGPROBS
from jaxkv._cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that a client leaves


def test_those_programs_are_compiled_before_it_listens(monkeypatch):
    class Compiled(Exception):
        pass

    def compile_programs(**asked):
        raise Compiled(asked)

    engine = types.SimpleNamespace(warmup=compile_programs)
    monkeypatch.setattr(
        serve,
        "open_model",
        lambda _: types.SimpleNamespace(model=types.SimpleNamespace(max_seq_len=64), penalties={}, chat=None),
    )
    monkeypatch.setattr(jaxkv, "Engine", lambda *_, **__: engine)
    options = "seed max_seqs max_seq_len memory block_size max_waiting cache_dtype residual_length"
    with pytest.raises(Compiled) as told:
        serve.serve(
            types.SimpleNamespace(
                warmup=True,
                host="127.0.0.1",
                port=free_port(),
                grace=10,
                **dict.fromkeys(f"{options} prefix_disk prefix_disk_bytes".split()),
            )
        )
    assert told.value.args[0] == {"kinds": ("greedy", "sampled", "filtered"), "logprobs": (MOST_LOGPROBS,)}


def test_what_the_command_says_of_answers_is_taken(monkeypatch, folder):
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
    monkeypatch.setattr(serve, "make_app", lambda *given, **_: given)
    sizes = ["--max-seqs", "1", "--max-seq-len", "64", "--no-warmup", "--port", "0"]
    for given, names, most in (
        ([], [folder.name], None),
        (["--served-model-name", "a", "b", "--max-new-tokens", "5"], ["a", "b"], 5),
    ):
        with pytest.raises(Listens):
            main(["serve", "--model", str(folder), "--seed", "7", *sizes, *given])
        assert found["seed"] == 7 and list(found["app"][2]) == names and found["app"][-1] == most


def test_a_model_without_a_tokenizer_is_refused_before_anything_is_compiled(monkeypatch, tmp_path, capsys):
    jaxkv.models.save(jaxkv.models.small(), tmp_path / "bytes")
    monkeypatch.setattr(jaxkv, "Engine", None)
    assert main(["serve", "--model", str(tmp_path / "bytes"), "--port", "0"]) == 2
    assert "The model reads bytes and has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("windows", "given", "penalties"),
    [((7,), None, None), ((7,), {"repetition_penalty": 1.0}, {"repetition_penalty": 1.0}), ((None, 7), None, {})],
)
def test_answers_without_an_end_have_no_hook(monkeypatch, windows, given, penalties):
    """It would end them at --max-seq-len; an option for penalties asks for that."""

    class Made(Exception):
        pass

    class Limited(Checksum):
        max_seq_len = LONGEST

    def make_engine(*_, **options):
        raise Made(options)

    opened = types.SimpleNamespace(model=Limited(windows), chat=None, penalties=given)
    monkeypatch.setattr(serve, "open_model", lambda _: opened)
    monkeypatch.setattr(jaxkv, "Engine", make_engine)
    with pytest.raises(Made) as told:
        main(["serve", "--model", "none", "--port", "0"])
    options = told.value.args[0]
    assert ("logits_hook" in options) == (penalties is not None)


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


def test_the_command(folder):
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
