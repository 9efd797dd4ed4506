"""Chooses which tests run by night alone, from the times of a run by day.

    : > tests/by_night.txt
    PYTEST_ADDOPTS=--durations=0 make test | tee log
    python tests/support/choose_by_night.py log > tests/by_night.txt

Of each test the cheapest cases run by day, until they have taken SECONDS; at least one of them, whatever it takes. So
no test is left out as a whole; what the other cases try is tried by night.
"""

import collections
import re
import sys
from collections.abc import Iterable

SECONDS = 4.0  # of a test's cases by day
CHEAP = 0.3  # a case that takes less stays: there is nothing to gain
READ = ("tests/test_api.py", "tests/test_docs.py", "tests/test_readme.py")  # examples that users read all run by day
LINE = re.compile(r"^(\d+\.\d+)s (?:call|setup|teardown) +(tests/\S+\.py::.+?)\s*$")


def read_seconds(lines: Iterable[str]) -> dict[str, float]:
    """Returns what each case took, of lines that pytest wrote."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for line in lines:
        if found := LINE.match(line):
            seconds[found[2]] += float(found[1])
    return seconds


def choose(seconds: dict[str, float], most: float = SECONDS) -> list[str]:
    """Returns the cases that run by night alone."""
    tests: dict[str, list[str]] = collections.defaultdict(list)
    for case in seconds:
        tests[case.partition("[")[0]].append(case)
    chosen = []
    for cases in tests.values():
        cases.sort(key=lambda case: (seconds[case], case))
        spent = 0.0
        for i, case in enumerate(cases):
            spent += seconds[case]
            if i and spent > most and seconds[case] > CHEAP and not case.startswith(READ):
                chosen.append(case)
    return sorted(chosen)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
        print("\n".join(choose(read_seconds(log))))
