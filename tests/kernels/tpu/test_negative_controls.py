"""Kernels broken on purpose: the suite must fail on each, or its silence about the real ones means nothing."""

import importlib
import itertools
import pathlib

import interpreter
import pytest

import pallas_kernels.tpu
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(120, method="thread")
SOURCE = pathlib.Path(pallas_kernels.tpu.__file__).parent
names = (f"broken_tpu_{i}" for i in itertools.count())

# name: (file, what to find there, what to put instead, how to run it). None may wait for a copy that nobody starts.
DECODE = {
    "missing wait": ("decode.py", 'copies("wait", row, i, slot)', "pass", interpreter.PLAIN),
    "slot refilled early": ("decode.py", "1 - slot", "slot", interpreter.RACES),
    "wrong block": ("pages.py", "row * self.blocks_per_row + block]", "row * self.blocks_per_row]", interpreter.PLAIN),
    "mask one too far": ("decode.py", "seen = position < limit", "seen = position <= limit", interpreter.PLAIN),
    "window one too far": (
        "decode.py",
        "position >= limit - pages",
        "position >= limit - 1 - pages",
        interpreter.PLAIN,
    ),
    "tail not cleared": ("pages.py", "keep(held - 1,", "(lambda *_: None)(held - 1,", interpreter.PLAIN),
    "pages not cleared": ("pages.py", "lax.fori_loop(held, self", "lax.fori_loop(held, 0 * self", interpreter.PLAIN),
    "write not waited for": ("decode.py", "write_back().wait()", "write_back()", interpreter.PLAIN),
    "write of the wrong tile": ("decode.py", "staged[...] = merged", "staged[...] = buffer[there]", interpreter.PLAIN),
}
PREFILL = {
    "missing wait": ("prefill.py", 'copies("wait", tile, i, slot)', "pass", interpreter.PLAIN),
    "causality one too far": ("prefill.py", "seen = key <= query", "seen = key <= query + 1", interpreter.PLAIN),
    "mask left out": ("prefill.py", "<= oldest + 1", "<= limit", interpreter.PLAIN),
    "mask left out of a half": ("prefill.py", "sure=half)", "sure=pages.pages_per_step)", interpreter.PLAIN),
    "half a step too few": ("prefill.py", "limit <= start + half", "limit <= start + 2 * half", interpreter.PLAIN),
    "weights not summed": (
        "prefill.py",
        "concatenate([values, ones])",
        "concatenate([values, 0 * ones])",
        interpreter.RACES,
    ),
    "another tile's tokens": ("prefill.py", "(position >= oldest) & ", "", interpreter.PLAIN),
}


def broken(tmp_path, monkeypatch, file, find, replace):
    """The kernels' package under another name, with one piece of its source replaced."""
    name = next(names)
    (tmp_path / name).mkdir()
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        if path.name == file:
            assert find in text, f"{find!r} is no longer in {file}: adapt the control"
            text = text.replace(find, replace)
        (tmp_path / name / path.name).write_text(text.replace("pallas_kernels.tpu", name))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


@pytest.mark.parametrize("control", DECODE)
def test_decode(control, tmp_path, monkeypatch):
    file, find, replace, mode = DECODE[control]
    tpu = broken(tmp_path, monkeypatch, file, find, replace)
    case = Case((5, 37), (1, 1), 2, 1, 128, 8, window=24 if "window" in control else None)
    with pytest.raises(Exception, match=r"race|error|NaN|differ|equal|Mismatch"):
        interpreter.check_write_and_attention(tpu, case, mode, step_tokens=16)


@pytest.mark.parametrize("control", PREFILL)
def test_prefill(control, tmp_path, monkeypatch):
    file, find, replace, mode = PREFILL[control]
    tpu = broken(tmp_path, monkeypatch, file, find, replace)
    case = Case((37, 30), (20, 7), 2, 1, 128, 8, packed=True)
    with pytest.raises(Exception, match=r"race|error|NaN|differ|equal|Mismatch"):
        interpreter.check_attention(tpu, case, mode, step_tokens=16)


def test_unbroken(tmp_path, monkeypatch):
    """The controls' own cases pass on an unchanged copy."""
    tpu = broken(tmp_path, monkeypatch, None, "", "")
    for mode in interpreter.PLAIN, interpreter.RACES:
        interpreter.check_write_and_attention(tpu, Case((5, 37), (1, 1), 2, 1, 128, 8), mode, step_tokens=16)
        interpreter.check_attention(tpu, Case((37, 30), (20, 7), 2, 1, 128, 8, packed=True), mode, step_tokens=16)
