"""Random runs over all options of an engine: few by day, with two of the shapes that programs are compiled for, and ten
thousand by night."""

import pytest
from nightly import NIGHTLY
from random_runs import SHAPES, Run

RUNS, GROUPS = (10_000, 100) if NIGHTLY else (1, 1)


@pytest.mark.timeout(3600 if NIGHTLY else 300)
@pytest.mark.parametrize("group", range(GROUPS))
def test_each_request_gets_what_it_would_alone(group):
    shapes = SHAPES if NIGHTLY else SHAPES[:2]
    for seed in range(group, RUNS, GROUPS):
        Run(seed, shapes).go()
