"""A command's error names the option that was typed, not the argument of Python that it became."""

import argparse
import re

import pytest

from jaxkv._cli.http import serve
from jaxkv._cli.main import main
from jaxkv._cli.option_names import OptionParser, name_options
from jaxkv._cli.options import add_chat, add_generate, add_plan, add_serve

COMMANDS = {"generate": add_generate, "chat": add_chat, "serve": add_serve, "plan": add_plan}
# What an option is for, so that it is looked at.
BESIDE = {
    "--prefix-disk-bytes": ["--prefix-disk", "{folder}"], "--residual-length": ["--cache-dtype", "int4"],
    "--keep": ["--evict", "knorm"], "--every": ["--evict", "knorm"],
}  # fmt: skip
TEXTS = ("--model", "--prompt", "--prompts", "--system", "--prefix-disk", "--served-model-name", "--host", "--lengths")


def list_options(command):
    """The options of a command that take a value, but for texts."""
    commands = OptionParser().add_subparsers()
    COMMANDS[command](commands)
    parser = commands.choices[command]
    options = [action for action in parser._actions if action.option_strings and action.nargs != 0]
    return [x.option_strings[-1] for x in options if x.option_strings[-1] not in TEXTS]


@pytest.mark.parametrize("value", ["-5", str(10**30), "x"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_value_is_told_by_its_option(command, value, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "_listen", lambda *_: pytest.fail("it listens"))
    monkeypatch.setattr("sys.stdin", ["?\n"])  # a chat that begins says something else
    given = {"generate": ["--prompt", "a"], "plan": ["--memory", "3MB"], "serve": ["--no-warmup"]}.get(command, [])
    options = list_options(command)
    assert len(options) >= 12
    for option in options:
        if (option, value) in {("--seed", "-5"), ("--temperature", str(10**30))}:  # which can be
            continue
        beside = [] if command == "plan" else [x.format(folder=tmp_path) for x in BESIDE.get(option, [])]
        try:
            code = main([command, "--model", str(folder), *given, *beside, f"{option}={value}"])
        except SystemExit as end:  # argparse's own words
            code = end.code
        out, err = capsys.readouterr()
        sentence = err.splitlines()[-1]
        assert (code, out) == (2, "") and "Traceback" not in err, (option, out, err)
        assert re.search(rf"{option}(?![\w-])", sentence), (option, sentence)
        names = re.findall(r"\b[A-Z]\w+\.[a-z]\w*|\b[a-z]+_\w+", sentence.partition("choose from")[0])
        assert not [name for name in names if not name.startswith("float8")], sentence


@pytest.mark.parametrize(
    "option",
    ["--mean-len=nan", "--mean-len=inf", "--mean-len=0", "--mean-len=-1", "--step-tokens=0", "--step-tokens=-5"],
)
def test_a_plan_without_memory_checks_its_options_too(option, folder, capsys):
    assert main(["plan", "--model", str(folder), option]) == 2
    name = option.partition("=")[0]
    assert re.match(rf"jaxkv: {name} must be ", capsys.readouterr().err)


def test_an_option_names_the_one_that_it_goes_with(folder, capsys):
    assert main(["generate", "--model", str(folder), "--prompt", "a", "--residual-length", "16"]) == 2
    assert re.fullmatch(
        r"jaxkv: --residual-length=16 is for quantized layers, and no layer is one: leave it out, or give "
        r"--cache-dtype a quantized format, one of int8, .*k5v3\.\n",
        capsys.readouterr().err,
    )
    told = ["plan", "--model", str(folder), "--residual-length", "16", "--dtype"]
    assert main([*told, "bfloat16"]) == 2
    assert "--residual-length=16 is for quantized layers: leave it out, or give --dtype a" in capsys.readouterr().err
    assert main([*told, "int4", "--dtype", "bfloat16"]) == 0


def test_every_parser_of_a_command_knows_its_options():
    options = argparse.Namespace()
    for command, add in COMMANDS.items():
        parser = OptionParser()
        add(parser.add_subparsers())
        options = parser.parse_args([command, "--model", "m"]).options
        assert (options["max_seq_len"] == "--max-seq-len" and "memory_bytes" in options) or command == "chat"


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("CacheConfig.top_k=3 is wrong: lower top_k.", "--top-k=3 is wrong: lower --top-k."),
        ("seed must be 1.", "--seed must be 1."),
        ("Give CacheConfig.seed a number, or Engine.seed.", "Give --cache-seed a number, or --seed."),
        ("The seed must be 1: any seed.", "The seed must be 1: any seed."),
        ("Blocks need disk_bytes, or disk=.", "Blocks need --most, or --folder."),
        ('"top_k" in a/top_k/x.json and top_k.json, not top_k_y or x.top_k', None),
        ("--top-k and my-seed must be", None),
    ],
)
def test_only_names_are_replaced(sentence, said):
    names = {
        "top_k": "--top-k",
        "seed": "--seed",
        "disk": "--folder",
        "disk_bytes": "--most",
        "CacheConfig.seed": "--cache-seed",
    }
    assert name_options(sentence, names) == (said or sentence)
