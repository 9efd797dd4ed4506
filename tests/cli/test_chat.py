"""`python -m jaxkv chat` and `generate --chat`, with a tiny checkpoint that speaks random bytes."""

import argparse
import io
import os
import signal
import subprocess
import sys
import threading

import pytest
from text.test_tokenizer import CHATML, write_tokenizer

import jaxkv
import jaxkv.text
from jaxkv import models
from jaxkv._cli import options
from jaxkv._cli.main import main
from jaxkv._cli.plan.chips import CHIPS
from jaxkv._cli.text import PENALTIES, read_sampling
from jaxkv._engine.requests.eviction_policy import SCORES
from pallas_kernels.common.quantization import FORMATS


def answers(folder, questions, count, system=None):
    """What the library answers when each turn is computed anew."""
    model, text = models.load(folder), jaxkv.text.Tokenizer(folder)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        tokens = text.chat(messages)
        stream = text.stream(tokens)
        [output] = jaxkv.generate(model, [tokens], count, seed=1, temperature=1.0)
        messages.append({"role": "assistant", "content": "".join(map(stream.add, output)) + stream.finish()})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def run_chat(folder, monkeypatch, lines, *options):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", "--model", str(folder), "--temperature", "1", "--seed", "1", *options])


def test_a_chat_is_computed_once_turn_by_turn(folder, tmp_path, monkeypatch, capsys):
    questions = ["What is the capital of France?", "", "  ", "And of 東京?", "Why?"]
    extra = ("--max-new-tokens", "20", "--system", "Be brief, and say nothing else.")
    assert run_chat(folder, monkeypatch, questions, *extra, "--prefix-disk", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    wanted = answers(folder, [q for q in questions if q.strip()], 20, extra[-1])
    assert out == "".join(f"{answer}\n" for answer in wanted)
    told = [int(word) for word in err.split() if word.isdigit()]
    assert told[0] == 3 and told[1] > told[2] / 3, err  # turns, known tokens, tokens
    assert run_chat(folder, monkeypatch, questions, *extra, "--prefix-disk", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    again = [int(word) for word in err.split() if word.isdigit()]
    assert out == "".join(f"{answer}\n" for answer in wanted)
    assert again[1] > told[1] + 16, (told, err)  # the first turn was known from the process before


def test_ctrl_c_ends_the_answer_and_not_the_chat(folder, tmp_path):
    """In a process of its own: an answer of thousands of tokens is cut, the next question is answered, input ends."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    write_tokenizer(tmp_path, CHATML, eos_token=None)
    command = [sys.executable, "-m", "jaxkv", "chat", "--model", str(tmp_path), "--max-new-tokens", "3000"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([*command, "--temperature", "1"], env=os.environ | {"PYTHONUTF8": "1"}, **pipes)
    watchdog = threading.Timer(100, process.kill)
    watchdog.start()
    with process:
        process.stdin.write(b"Tell me a long story.\n")
        process.stdin.flush()
        heard = os.read(process.stdout.fileno(), 4)
        process.send_signal(signal.SIGINT)
        while b" ...\n" not in heard:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            assert piece, process.stderr.read()
            heard += piece
        heard.decode()  # whole characters
        process.stdin.write(b"Another.\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    watchdog.cancel()
    assert process.returncode == 0, err
    assert out.endswith(b" ...\n") and b"2 turns" in err


def test_what_cannot_be_a_chat_is_said_in_a_sentence(folder, tmp_path, monkeypatch, capsys):
    def said(*arguments):
        assert main(list(arguments)) == 2
        err = capsys.readouterr().err
        assert err.startswith("jaxkv: ") and err.count("\n") == 1
        return err

    plain = tmp_path / "plain"
    plain.mkdir()
    for file in ("config.json", "model.safetensors"):
        (plain / file).write_bytes((folder / file).read_bytes())
    assert "no tokenizer.json" in said("chat", "--model", str(plain))
    write_tokenizer(plain)
    assert "no chat template" in said("chat", "--model", str(plain))
    write_tokenizer(plain, "{{ raise_exception('no system role') }}")
    assert "no system role" in said("chat", "--model", str(plain), "--system", "x")
    assert "reads bytes" in said("generate", "--chat", "--prompt", "x")
    assert "--system is for --chat" in said("generate", "--system", "x")
    # A chat that is full says so, and goes on for a question that fits.
    length = len(jaxkv.text.Tokenizer(folder).chat([{"role": "user", "content": "y"}])) + 4
    lines = ["x" * 200, "y"]
    assert run_chat(folder, monkeypatch, lines, "--max-seq-len", str(length), "--max-new-tokens", "4") == 0
    out, err = capsys.readouterr()
    assert "The chat cannot go on: it has" in err and "--max-seq-len" in err and "1 turn;" in err and out.count("\n")
    # So does an answer that fills it.
    assert run_chat(folder, monkeypatch, ["y"], "--max-seq-len", str(length), "--max-new-tokens", "9") == 0
    said = f"jaxkv: stopped after 4 tokens: max_seq_len is {length}, give more with --max-seq-len.\n"
    assert capsys.readouterr().err.startswith(said)


def test_generate_asks_a_model_made_for_chats(folder, capsys):
    command = ["generate", "--model", str(folder), "--prompt", "Hé?", "--temperature", "1", "--seed", "1"]
    assert main([*command, "--chat", "--max-new-tokens", "12"]) == 0
    wanted = answers(folder, ["Hé?"], 12)[0]
    assert capsys.readouterr().out.startswith(f"Hé?\n{wanted}\n\n")


def test_an_answer_of_nothing_names_the_option(folder, monkeypatch, capsys):
    monkeypatch.setattr(jaxkv.Engine, "run", lambda self: iter(()))
    command = ["generate", "--model", str(folder), "--prompt", "What is the capital of France?", "--no-check"]
    assert main(command) == 0
    assert "so give --chat" in capsys.readouterr().err
    assert main([*command, "--chat"]) == 0
    assert "--chat" not in capsys.readouterr().err


OPTIONS = ("temperature", "top_k", "top_p", "min_p")


def sampled(said, **given):
    arguments = argparse.Namespace(**dict.fromkeys((*OPTIONS, *PENALTIES)), seed=0)
    for name, value in given.items():
        setattr(arguments, name, value)
    found, penalties = read_sampling(arguments, said, "generation_config.json")
    return (*(found[name] for name in OPTIONS), *([] if penalties is None else [penalties]))


def test_options_know_the_registries():
    assert tuple(CHIPS) == options.CHIPS
    assert tuple(sorted(FORMATS)) == options.DTYPES
    assert tuple(SCORES) == options.SCORES


def test_generation_config_is_read_and_said_and_options_win(capsys):
    assert sampled({}) == (0.7, 0, 1.0, 0.0) and capsys.readouterr().err == ""
    assert sampled({"do_sample": False, "temperature": 0.6}) == (0.0, 0, 1.0, 0.0)
    assert "temperature = 0.0." in capsys.readouterr().err
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "eos_token_id": 3}
    assert sampled(said) == (0.6, 20, 0.95, 0.0)
    assert "temperature = 0.6, top_k = 20, top_p = 0.95, min_p = 0.0." in capsys.readouterr().err
    assert sampled(said, temperature=0.0, top_p=1.0) == (0.0, 20, 1.0, 0.0)
    err = capsys.readouterr().err
    assert "top_k = 20" in err and "temperature" not in err and "top_p" not in err
    assert sampled({"do_sample": True}) == (1.0, 0, 1.0, 0.0)
    capsys.readouterr()
    assert sampled({"num_beams": 4, "no_repeat_ngram_size": 0}) == (0.7, 0, 1.0, 0.0)
    assert capsys.readouterr().err == "jaxkv: of generation_config.json; not honoured: num_beams = 4.\n"
    assert sampled({"repetition_penalty": 1.0}) == (0.7, 0, 1.0, 0.0) and not capsys.readouterr().err
    penalized = sampled({"repetition_penalty": 1.1, "do_sample": False}, presence_penalty=0.5)
    assert penalized == (0.0, 0, 1.0, 0.0, PENALTIES | {"repetition_penalty": 1.1, "presence_penalty": 0.5})
    assert capsys.readouterr().err.endswith(" recommends: temperature = 0.0, repetition_penalty = 1.1.\n")
    assert sampled({"repetition_penalty": 1.1}, repetition_penalty=1.0)[-1] == PENALTIES
    for field, value in (
        ("repetition_penalty", 0.0),
        ("presence_penalty", "x"),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", -1),
        ("temperature", float("nan")),
    ):
        with pytest.raises(ValueError, match=rf'^"{field}" in generation_config\.json'):
            sampled({"do_sample": True, field: value})
