"""A wheel, a source archive and an editable install, each in an environment of its own.

Nothing is fetched: setuptools and what jaxkv depends on are seen through a path into the environment of the tests.
"""

import email
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from nightly import NIGHTLY

import jaxkv

ROOT = pathlib.Path(__file__).parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What a clone holds, in a folder of the package's name: building leaves things behind."""
    folder = tmp_path_factory.mktemp("parent") / "jaxkv"
    folder.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("jaxkv", "pallas_kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(clone):
    run(sys.executable, *PIP, "wheel", ".", *OFFLINE, "--wheel-dir", "wheels", cwd=clone)
    (path,) = (clone / "wheels").iterdir()
    return path


@pytest.fixture(scope="module")
def archive(clone):
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('archives')", cwd=clone)
    (path,) = (clone / "archives").iterdir()
    return path


def test_the_wheel_holds_all_of_both_packages_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {
        str(path.relative_to(ROOT))
        for package in ("jaxkv", "pallas_kernels")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_says_what_an_index_shows(wheel):
    files = zipfile.ZipFile(wheel)
    info = f"jaxkv-{jaxkv.__version__}.dist-info"
    fields = email.message_from_bytes(files.read(f"{info}/METADATA"))
    assert (fields["Name"], fields["Version"]) == ("jaxkv", jaxkv.__version__)
    assert fields["License-Expression"] == "Apache-2.0"
    assert files.read(f"{info}/licenses/LICENSE").decode() == (ROOT / "LICENSE").read_text()
    assert fields["Author"] == "the jaxkv authors"
    assert fields["Keywords"] and fields.get_all("Classifier")
    assert fields.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()


@pytest.mark.parametrize("kind", ["wheel", "archive", "editable"] if NIGHTLY else ["wheel"])
def test_it_installs_and_answers_from_the_folder_above_a_clone(kind, clone, tmp_path, request):
    run(sys.executable, "-m", "venv", "--without-pip", "bare", cwd=tmp_path)
    scripts, python = tmp_path / "bare/bin", tmp_path / "bare/bin/python"
    site = tmp_path / "bare/lib" / f"python{sysconfig.get_python_version()}/site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    what = ("--editable", clone) if kind == "editable" else (request.getfixturevalue(kind),)
    run(python, *PIP, "install", *OFFLINE, "--ignore-installed", *what, cwd=tmp_path)

    script = clone.parent / "script.py"  # beside it stands the clone, which Python could take for a package
    script.write_text("import json, jaxkv; print(json.dumps([jaxkv.__version__, jaxkv.__file__, str(jaxkv.init)]))")
    version, file, _ = json.loads(run(python, script, cwd=clone.parent))
    assert version == jaxkv.__version__
    assert pathlib.Path(file).is_relative_to(clone if kind == "editable" else site)
    for command in ([scripts / "jaxkv"], [python, "-m", "jaxkv"]):
        assert run(*command, "--version", cwd=clone.parent) == f"jaxkv {version}\n"
