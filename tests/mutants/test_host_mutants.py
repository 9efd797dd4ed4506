"""By night each mistake is made, in a copy of the package, and its test must fail. By day only that it could be.

A table of mistakes has, by name, the test that notices one (a test function, a file or a folder: `planting.find_tests`)
and what is planted (`planting.Plant`, which says how to add one).
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from engine_mutants import MUTANTS as OF_ENGINES
from form_mutants import MUTANTS as OF_FORMS
from nightly import NIGHTLY
from planting import Sources, find_tests
from tier_mutants import MUTANTS as OF_TIERS

import jaxkv

MUTANTS = OF_TIERS | OF_ENGINES | OF_FORMS
PACKAGE = pathlib.Path(jaxkv.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
SOURCES = Sources(PACKAGE, "jaxkv")


def test_every_mistake_can_be_made():
    assert len(MUTANTS) >= 117 and len(MUTANTS) == len(OF_TIERS) + len(OF_ENGINES) + len(OF_FORMS)
    tests = find_tests(TESTS)
    for name, (test, *plants) in MUTANTS.items():
        assert len(tests[test]) == 1, (name, test, tests[test])
        assert SOURCES.broken(*plants), name


@pytest.mark.skipif(not NIGHTLY, reason="takes ten minutes")
@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_noticed(name, tmp_path):
    test, *plants = MUTANTS[name]
    shutil.copytree(PACKAGE, tmp_path / "jaxkv", ignore=shutil.ignore_patterns("__pycache__"))
    for module, source in SOURCES.planted(*plants).items():
        (tmp_path / SOURCES.files[module].relative_to(PACKAGE.parent)).write_text(source)
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    (where,) = find_tests(TESTS)[test]
    for nightly in ("", "1"):  # by day, unless all that it has runs by night alone
        run = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", where],
            env=os.environ | {"PYTHONPATH": path, "JAXKV_NIGHTLY": nightly, "CI": "true"}, cwd=tmp_path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode or " passed" in run.stdout:
            break
    assert run.returncode == 1 and "failed" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]
