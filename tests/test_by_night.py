"""What runs by night alone is chosen by the times of a run by day."""

import os
import pathlib

from choose_by_night import choose, read_seconds
from nightly import is_named

LOG = """
3.00s call     tests/a.py::test_cases[0-x y]
0.50s setup    tests/a.py::test_cases[1]
0.90s call     tests/a.py::test_cases[1]
0.20s call     tests/a.py::test_cases[2]
0.01s teardown tests/a.py::test_cases[2]
4.00s call     tests/a.py::test_alone
5.00s call     tests/b.py::test_cases[1]
(12 durations < 0.005s hidden.  Use -vv to show these durations.)
"""


def test_of_each_test_the_cheapest_cases_run_by_day():
    seconds = read_seconds(LOG.splitlines())
    assert seconds["tests/a.py::test_cases[1]"] == 1.4 and len(seconds) == 5
    assert choose(seconds, most=2) == ["tests/a.py::test_cases[0-x y]"]
    assert choose(seconds, most=1) == ["tests/a.py::test_cases[0-x y]", "tests/a.py::test_cases[1]"]
    assert choose(seconds, most=9) == []


def test_a_test_that_takes_long_runs_by_night():
    seconds = {
        "tests/a.py::test_alone": 9.0,
        "tests/core/test_state_machine.py::test_b[1]": 9.0,
        "tests/a.py::test_c": 5.0,
    }
    assert choose(seconds) == ["tests/a.py::test_alone"]


def test_what_is_named_runs_by_day():
    root, case = pathlib.Path(__file__).parents[1], "tests/a.py::test_cases[0-x y]"
    for arg in (case, "tests/a.py::test_cases"):
        assert is_named(case, ["tests/b.py", str(root / arg)], root)
        assert is_named(case, [os.path.relpath(root / arg)], root)
    for arg in ("tests", "tests/a.py", "tests/a.py::test_cases[1]", "tests/a.py::test_case"):
        assert not is_named(case, [str(root / arg)], root)
