"""By night each mistake is made, in a copy of the package, and its test must fail. By day only that it could be."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from engine_mutants import MUTANTS as OF_ENGINES
from form_mutants import MUTANTS as OF_FORMS
from nightly import NIGHTLY
from tier_mutants import MUTANTS as OF_TIERS

import jaxkv

MUTANTS = OF_TIERS | OF_ENGINES | OF_FORMS
PACKAGE = pathlib.Path(jaxkv.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]


def test_every_mistake_can_be_made_in_one_place():
    assert len(MUTANTS) >= 40
    for name, (file, right, wrong, test) in MUTANTS.items():
        assert (PACKAGE / file).read_text().count(right) == 1 and right != wrong, name
        path, _, function = test.partition("::")
        assert (TESTS / path).exists() and f"def {function}" in (TESTS / path).read_text() if function else True, name


@pytest.mark.skipif(not NIGHTLY, reason="takes ten minutes")
@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_noticed(name, tmp_path):
    file, right, wrong, test = MUTANTS[name]
    shutil.copytree(PACKAGE, tmp_path / "jaxkv", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "jaxkv" / file).write_text((PACKAGE / file).read_text().replace(right, wrong))
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS / test)],
        env=os.environ | {"PYTHONPATH": path, "JAXKV_NIGHTLY": "", "CI": "true"}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1 and "failed" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]
