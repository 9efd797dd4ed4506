"""A run that outlives its device: a process that hangs or breaks it ends, and another goes on behind what it was at.

Every attempt is written down before it is made. Whatever ends the process, a watchdog, the driver or the compiler, the
file says at what; the next process reads that, and leaves it out.
"""

import concurrent.futures
import contextlib
import faulthandler
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from _harness import write

ENDED = 3  # status of a process that another one should go on behind
TRYING = "began, and never ended: it hung, or took its process along"
MOST_PROCESSES = 12


class Book:
    """Rows of results in a file. A row begins with what it is of, by which it is found again."""

    def __init__(self, file: pathlib.Path, *, go_on: bool = False, only: str = "", **facts: Any) -> None:
        self.file, self.only, self.facts = file, only, facts
        file.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if go_on and file.exists() else []

    def find(self, what: dict[str, Any]) -> dict[str, Any] | None:
        wanted = json.loads(json.dumps(what))
        same = (row for row in self.rows if all(row.get(key) == value for key, value in wanted.items()))
        return next(same, None)

    def wants(self, what: dict[str, Any]) -> bool:
        return re.search(self.only, words(what)) is not None

    def attempt(
        self, what: dict[str, Any], run: Callable[[], dict[str, Any]], patience: float, *, quiet: bool = False
    ) -> None:
        """Add the row of `what`, with what `run` finds or why it finds nothing, unless it was tried before. A contender
        that cannot do something is a result too; one that breaks the device ends the process."""
        if self.find(what) is not None:
            return
        row = what | {"error": TRYING}
        self.rows.append(row)
        self.save()
        try:
            with watchdog(words(what), patience):
                found = run()
        except Exception as e:
            traceback.print_exc()  # a row has room for its last line alone
            found = {"error": repr(e)[:300]} | ({} if device_answers() else {"broken": True})
        del row["error"]
        row |= found
        self.save()
        if not quiet or "error" in row:
            print(words(row), flush=True)
        if "broken" in row:
            print("The device answers no more.", flush=True)
            os._exit(ENDED)

    def save(self) -> None:
        write(self.file, self.rows, **self.facts)


def words(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    return " ".join(f"{key}={value}" for key, value in row.items() if value is not None and value is not False)


@contextlib.contextmanager
def watchdog(what: str, seconds: float) -> Iterator[None]:
    """End the process, and say what it was at, if the block takes longer: the device cannot be asked."""

    def give_up() -> None:
        print(f"HUNG for {seconds:.0f} s: {what}", flush=True)
        faulthandler.dump_traceback()
        os._exit(ENDED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def share_programs(folder: str) -> dict[str, str]:
    """Returns the environment of processes that share what they compile."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def compile_tasks(arguments: Sequence[str]) -> list[list[str]]:
    """Returns the arguments of the processes that share out compiling, as many as the cores allow: each is told which
    of how many it is."""
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    return [[*arguments, "--compile", str(i), str(count)] for i in range(count)]


def device_answers() -> bool:
    """Whether it still adds: after a bad access to memory nothing in the process does."""
    try:
        with watchdog("to see whether the device answers", 20):
            return bool((jax.device_put(jnp.ones(8)) + 1).sum() == 16)
    except Exception:
        return False


def run_worker(arguments: Sequence[str], until: float, env: Mapping[str, str] | None = None) -> int:
    """This script again and again as a worker with such arguments, each going on behind the last, until one ends by
    itself or the time, in seconds since the epoch, is up; its status."""
    for nth in range(MOST_PROCESSES):
        options = [*arguments, "--worker", str(nth), "--until", str(until)]
        status = subprocess.run([sys.executable, sys.argv[0], *options], env={**os.environ, **(env or {})}).returncode
        if status not in (ENDED, *range(-64, 0)) or time.time() > until:
            return status
        print(f"The process ended with status {status}; another goes on.", flush=True)
    return ENDED


def run_tasks(tasks: Sequence[Sequence[str]], until: float, env: Mapping[str, str] | None = None) -> list[int]:
    """Runs `run_worker` for the arguments of each task, a few at a time as there are cores; their statuses."""
    with concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 1)) as pool:
        return list(pool.map(lambda arguments: run_worker(arguments, until, env), tasks))
