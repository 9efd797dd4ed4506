"""Each promise of the five systems has its test, named by the system and the number."""

import pathlib
import re

PROMISES = {"s0": 12, "s1": 9, "s2": 6, "s3": 8, "s4": 5}


def test_every_promise_has_a_test():
    sources = [path.read_text() for path in pathlib.Path(__file__).parent.glob("test_s*.py")]
    tested = set(re.findall(r"^def test_(s\d_\d+)_", "\n".join(sources), re.MULTILINE))
    assert tested == {f"{system}_{i}" for system, count in PROMISES.items() for i in range(1, count + 1)}
    assert len(tested) == 40
