"""Random runs over all options of an engine, of some 50 samples each: one by day, with one of the shapes that programs
are compiled for, and by night 10,000 samples of all shapes."""

import pytest
from memory_maps import forget_many_programs
from nightly import NIGHTLY
from random_runs import SHAPES, Run

RUNS, GROUPS = (330, 33) if NIGHTLY else (1, 1)  # of each group all runs are of other shapes


@pytest.mark.timeout(3600 if NIGHTLY else 300)
@pytest.mark.parametrize("group", range(GROUPS))
def test_each_request_gets_what_it_would_alone(group):
    shapes = SHAPES if NIGHTLY else SHAPES[:1]
    for seed in range(group, RUNS, GROUPS):
        Run(seed, shapes).go()
        forget_many_programs()
