"""Mistakes are found by symbol: through renames, moves and new layout; and refused where they fit nowhere or twice."""

import textwrap

import pytest
from planting import Plant, PlantError, Sources, find_tests

SOURCE = """
LIMIT = 3 + 4

class Loop:
    def plan(self, step):
        total = step.count + 1  # a comment
        if self.is_lost and (total >
                             LIMIT):
            raise ValueError("lost")
        return total
"""


def planted(tmp_path, source, *plants, path="loop.py"):
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    ((module, text),) = Sources(tmp_path, "package").planted(*plants).items()
    return module, text + "\n"


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("step.count + 1", "step.count", "total = step.count"),
        ("if self.is_lost and total > LIMIT: ...", "if False: ...", "if False:\n            raise ValueError('lost')"),
        ("return total", "", "raise ValueError('lost')\n"),
        ("total > LIMIT", "total >= LIMIT", "if self.is_lost and total >= LIMIT:"),
        ("raise ValueError('lost')", "", "pass"),
    ],
)
def test_an_expression_a_statement_and_a_head(tmp_path, right, wrong, line):
    assert line in planted(tmp_path, SOURCE, Plant("Loop.plan", right, wrong))[1]


def test_a_constant(tmp_path):
    assert "LIMIT = 3 - 4" in planted(tmp_path, SOURCE, Plant("LIMIT", "3 + 4", "3 - 4"))[1]


def test_a_moved_module_and_renamed_variables(tmp_path):
    plant = Plant("Loop.plan", "self.is_lost and total > LIMIT", "self.is_lost and total >= LIMIT")
    renamed = SOURCE.replace("total", "num_tokens")
    module, text = planted(tmp_path, renamed, plant, path="wing/core.py")
    assert module == "package.wing.core" and "self.is_lost and num_tokens >= LIMIT" in text


def test_what_does_not_fit_is_refused(tmp_path):
    for plant, message in {
        Plant("Loop.step", "a", "b"): "nothing is named",
        Plant("Loop.plan", "step.count + 2", "b"): "found 0 times",
        Plant("Loop.plan", "total", "b"): "found 3 times",
        Plant("Loop.plan", "one + another", "b"): "found 0 times",
        Plant("Loop.plan", "return total", "return total"): "nothing would change",
    }.items():
        with pytest.raises(PlantError, match=message):
            planted(tmp_path, SOURCE, plant)
    (tmp_path / "other.py").write_text(SOURCE)
    with pytest.raises(PlantError, match=r"is in \['package.loop', 'package.other'\]"):
        planted(tmp_path, SOURCE, Plant("Loop.plan", "step.count", "b"))
    assert planted(tmp_path, SOURCE, Plant("other:Loop.plan", "step.count", "b"))[0] == "package.other"


def test_tests_are_found_by_name(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/test_a.py").write_text(textwrap.dedent("def test_b(): ...\ndef helper(): ..."))
    found = find_tests(tmp_path)
    assert found.keys() == {"engine", "test_a.py", "test_b", "test_a.py::test_b"}
    assert found["test_b"] == [f"{tmp_path}/engine/test_a.py::test_b"]
