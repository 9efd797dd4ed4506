"""The command line, run in this process."""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv._cli.generate import _Printer, _tokens_per_second
from jaxkv._cli.main import main
from jaxkv._cli.text import ByteTokenizer, TextStream
from jaxkv._cli.units import parse_bytes
from jaxkv.models import loader

CHECKPOINT = pathlib.Path(__file__).parents[1] / "data" / "llama"
SMALL = loader.DATA / "small"


def test_generate_streams_several_prompts_and_reports(capsys):
    assert main(["generate", "--prompt", "import os\ndef f(", "--prompt", "class A", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1> import os\n")
    assert "\n2> class A" in out and "\n1> def f(" in out
    assert "2 prompts of 7 to 16 tokens, 24 new tokens" in out
    assert "The output equals a recomputation without any cache." in out


def test_generate_prints_one_prompt_as_it_is(capsys):
    assert (
        main(["generate", "--prompt", "import ", "--max-new-tokens", "4", "--temperature", "0.7", "--seed", "1"]) == 0
    )
    assert capsys.readouterr().out.startswith("import ")


def test_prompts_and_output_are_tokens(capsys):
    told = ["generate", "--max-new-tokens", "3", "--temperature", "0", "--no-check"]
    assert main([*told, "--token-ids", "--prompt", "[105, 109,112]"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert main([*told, "--prompt", "imp"]) == 0
    text = capsys.readouterr().out
    assert line.startswith("[105, 109,112] ") and text.startswith("imp" + bytes(map(int, line.split()[2:])).decode())
    for wrong, says in (
        (["--prompt", "1 x"], "it has 'x'"), ([], "give some with --prompt"),
        (["--chat", "--prompt", "1"], "one of the two"),
    ):  # fmt: skip
        assert main([*told, "--token-ids", *wrong]) == 2 and says in capsys.readouterr().err


def test_many_prompts_come_from_a_file(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"x{i} = \n" for i in range(20)))
    assert main(["generate", "--prompts", str(file), "--max-new-tokens", "4", "--no-check"]) == 0
    out = capsys.readouterr().out
    assert all(f"{i + 1}> x{i} = " in out for i in range(20))
    assert "recomputation" not in out


def test_a_bad_prompt_does_not_take_the_others_with_it(capsys):
    assert (
        main(["generate", "--prompt", "x" * 100, "--prompt", "import ", "--max-seq-len", "64", "--max-new-tokens", "4"])
        == 1
    )
    out, err = capsys.readouterr()
    assert (
        err == "jaxkv: prompt 1 is left out: "
        "it has 100 tokens, and --max-seq-len = 64 must hold one more: raise --max-seq-len.\n"
    )
    assert out.startswith("import ")


@pytest.mark.skipif(not NIGHTLY, reason="by day engines find the blocks of the one before")
def test_the_next_call_knows_the_prompts_of_this_one(tmp_path, capsys):
    prompt = "import os\nimport sys\n\ndef main(arguments):\n    for argument in arguments:\n        print("
    arguments = ["generate", "--prompt", prompt, "--max-new-tokens", "4", "--prefix-disk", str(tmp_path / "prefix")]
    assert main([*arguments, "--block-size", "4", "--prefix-disk-bytes", "100MB"]) == 0
    assert f"0 of the prompts' {len(prompt)} tokens were known" in capsys.readouterr().out
    assert main([*arguments, "--block-size", "4", "--prefix-disk-bytes", "100MB"]) == 0
    out = capsys.readouterr().out
    saved = int(re.search(r"(\d+) of the prompts'", out)[1])
    assert saved >= 0.9 * len(prompt) and "The output equals a recomputation without any cache." in out


@pytest.mark.skipif(not NIGHTLY, reason="by day engines that keep less are smaller")
def test_generate_keeps_less(capsys):
    arguments = ["generate", "--prompt", "import os\ndef f(", "--max-new-tokens", "4", "--evict", "knorm"]
    assert main([*arguments, "--keep", "6", "--every", "2"]) == 0
    report = capsys.readouterr().out
    assert "recomputation" not in report
    used, blocks, free = map(
        int, re.search(r"(\d+) of (\d+) blocks of 16 tokens .* the most, (-?\d+) free", report).groups()
    )
    # Of each of 5 layers and 2 heads one block; 8 rows have room for 64 tokens.
    assert (used, blocks, free) == (10, 320, 310)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--prompts", "no-such-file"], "no-such-file is not a file"),
        (["--prefix-disk-bytes", "1GB"], "--prefix-disk-bytes is for --prefix-disk"),
        (["--prefix-disk", "nowhere", "--evict", "knorm"], "--prefix-disk does not go with --evict, "),
        (["--every", "4"], "--every is for --evict"),
        (["--keep", "0.5"], "--keep is for --evict"),
        (["--evict", "knorm", "--keep", "1.25"], "--keep, a share, must be"),
        (["--evict", "tova", "--budget", "ada"], "has heads compete, which cannot be with tova"),
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--prompt", ""], "prompt 1 is left out: it is empty"),
        (["--memory", "1K"], "--memory=1024 is too little"),
        (["--top-k", str(10**12)], "--top-k must be at most 2147483647"),
        (["--seed", str(10**30)], "--seed must be at most"),
        (["--max-seqs", str(10**13)], "--max-seqs must be at most 2147483647"),
        (["--max-seqs", str(10**6)], "bytes of memory"),
        (["--max-seqs", str(10**8)], "null blocks included"),
        (["--max-seqs", "0"], "--max-seqs must be at least 1"),
        (["--max-seq-len", str(10**12)], "--max-seq-len must be at most 2147483647"),
        (["--max-seq-len", str(10**7)], "bytes of memory"),
        (["--max-seq-len", str(10**9)], "null blocks included"),
        (["--block-size", str(10**12)], "--block-size must be at most 2147483647"),
        (["--block-size", "-1"], "--block-size must be at least 1"),
        (["--memory", str(10**17)], "--memory=1e+17 would hold"),
        (["--max-new-tokens", str(10**11)], "--max-new-tokens must be at most"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--temperature", "nan"], "--temperature must be a finite number"),
        (["--temperature", "1e400"], "--temperature must be a finite number"),
        (["--dtype", "int9"], "--dtype must be one of"),
        (["--devices", "0"], "--devices must be from 1 to"),
        (["--devices", str(10**30)], "the devices that there are, not 1000"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(arguments, sentence, capsys):
    assert main(["generate", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxkv: ") and sentence in err and "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("size", ["9" * 400, str(10**30), "nan", "inf", "1e5", "-1", "", "1" + "0" * 5000 + "K"])
def test_a_size_that_is_none(size, capsys):
    for command in ("generate", "plan"):
        with pytest.raises(SystemExit) as end:
            main([command, "--memory", size])
        err = capsys.readouterr().err
        assert end.value.code == 2 and "--memory" in err and "Traceback" not in err and len(err) < 1800


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--keep", "half", "'half' is neither a share, such as 0.5, nor a number of tokens"),
        ("--max-seqs", "few", "'few' is not a whole number: write it out, or with a unit such as 8k"),
    ],
)
def test_what_is_no_number_is_told_what_one_is(option, value, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--evict", "snapkv", option, value])
    assert f"argument {option}: {sentence}" in capsys.readouterr().err


def test_prompts_that_are_no_utf8_name_their_file(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes("hello".encode("utf-16"))
    assert main(["generate", "--prompts", str(tmp_path / "prompts.txt")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"jaxkv: {tmp_path / 'prompts.txt'} is no text in UTF-8") and err.count("\n") == 1


@pytest.fixture
def checkpoint(tmp_path):
    """A Hugging Face folder without a tokenizer."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(CHECKPOINT / file, tmp_path)
    return tmp_path


def test_a_folder_speaks_through_its_own_tokenizer(checkpoint, capsys):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    assert main(["generate", "--model", str(checkpoint), "--prompt", "w3 w7 w1", "--max-new-tokens", "5"]) == 0
    out = capsys.readouterr().out
    text = out.split("\n\n")[0]
    assert text.startswith("w3 w7 w1 w") and text.count(" w") == 7
    assert "1 prompt of 3 tokens, 5 new tokens" in out and "The output equals" in out


def test_a_missing_or_broken_tokenizer_is_one_sentence(checkpoint, capsys):
    assert main(["generate", "--model", str(checkpoint), "--prompt", "a"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    (checkpoint / "tokenizer.json").write_text("{")
    assert main(["generate", "--model", str(checkpoint), "--prompt", "a"]) == 2
    assert "is not a tokenizer that the tokenizers library can read" in capsys.readouterr().err


def test_a_character_is_shown_when_its_last_byte_has_come():
    stream = TextStream(ByteTokenizer(), list(b"prompt: "))
    assert [stream.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    stream.add("é".encode()[0])
    assert stream.finish() == "\ufffd" and stream.text == "prompt: aé€\ufffd"


def test_sizes_have_units():
    """With a B and no i they are decimal, as on the box; else binary."""
    sizes = {"10": 10, "10B": 10, "2K": 2048, "1.5MiB": 3 * 2**19, "80GB": 80e9, "80 gib": 80 * 2**30, ".5T": 2**39}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("lots", "1.2.3G", "5iB", "-1G", "", "G"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a size: write a number and a unit"):
            parse_bytes(text)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--hlep"], ["chat", "--model"], ["chta"]])
def test_help_and_typos_are_answered_before_jax_is_imported(arguments):
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('jax' in sys.modules, 'numpy' in sys.modules))\n"
        f"sys.argv[1:] = {arguments}\n"
        "import runpy\n"
        "runpy.run_module('jaxkv', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if arguments[0] in ("--help", "--version") else 2), done.stderr
    assert done.stdout.endswith("False False\n") and "Traceback" not in done.stderr


def test_the_rate_counts_from_behind_the_longest_pause():
    assert _tokens_per_second([1.0, 1.5]) is None and _tokens_per_second([]) is None
    assert _tokens_per_second([11.0, 21.0, 21.5, 22.0]) == 2
    assert _tokens_per_second([1.0, 1.0, 9.0, 9.0, 9.0]) is None, "all at once"


FULL = ["generate", "--model", str(SMALL), "--max-new-tokens", "100", "--temperature", "0", "--no-check"]


def test_a_full_context_is_said(capsys):
    """What ends sooner than was asked says why; what ends as asked says nothing."""
    assert main([*FULL, "--prompt", "a" * 250]) == 0
    out, err = capsys.readouterr()
    assert err == "jaxkv: stopped after 6 tokens: the model's max_seq_len is 256.\n" and "6 new tokens" in out
    prompts = [word for count in (31, 25, 1) for word in ("--prompt", "a" * count)]
    assert main([*FULL, *prompts, "--max-seq-len", "32", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().err == (
        "jaxkv: 2 of 3 prompts stopped after 1 to 7 tokens: max_seq_len is 32, give more with --max-seq-len.\n"
    )
    assert main([*FULL, *prompts[2:], "--max-seq-len", "32", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().err.startswith("jaxkv: prompt 1 stopped after 7 tokens: ")
    assert main([*FULL, "--prompt", "a" * 250, "--max-new-tokens", "6"]) == 0
    assert not capsys.readouterr().err, "as many as asked for"


def test_an_answer_that_ends_by_itself_is_not_cut(tmp_path, monkeypatch, capsys):
    """By an end token, here a bracket. Its block then is printed, and not only when all others have ended."""
    for file in SMALL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((SMALL / "config.json").read_text()) | {"eos_token_id": ord("]")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    events = []
    for name in ("add", "end"):
        own = getattr(_Printer, name)
        monkeypatch.setattr(_Printer, name, lambda *x, n=name, own=own: (events.append((n, x[1])), own(*x))[1])
    command = [*FULL, "--model", str(tmp_path), "--max-new-tokens", "20"]
    assert main([*command, "--prompt", "x = [" * 9, "--prompt", "import "]) == 0
    out, err = capsys.readouterr()
    assert not err and out.startswith(f"1> {'x = [' * 9}x - 1\n2> import "), (out, err)
    assert events[events.index(("end", 0)) :].count(("add", 1)) > 3, "its block ends while the other one grows"


@pytest.mark.parametrize(("dtype", "hint"), [("float16", True), ("float32", False)])
def test_a_difference_is_counted_and_rounding_named(monkeypatch, capsys, dtype, hint):
    """A token that rounding chose is no broken cache: without 16 bits there is no such excuse."""
    recompute = jaxkv.Engine.recompute

    def differ(engine, prompt, output, *, index=0, **choice):
        found = recompute(engine, prompt, output, index=index, **choice)
        return [token + (i < 2) for i, token in enumerate(found)] if index == 1 else found

    monkeypatch.setattr(jaxkv.Engine, "recompute", differ)
    command = ["generate", "--dtype", dtype, "--prompt", "import ", "--max-new-tokens", "5", "--temperature", "0"]
    assert main([*command, "--prompt", "class A"]) == 0
    out = capsys.readouterr().out
    assert "DIFFERS in 1 of 2 prompts from a recomputation without any cache, in 2 of 10 tokens." in out
    assert (f"Rounding in {dtype} can do that: --dtype float32 compares exactly." in out) == hint
