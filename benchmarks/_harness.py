"""What the benchmarks share: timing side by side, a table for people, and a JSON file for later."""

import datetime
import functools
import json
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

RESULTS = pathlib.Path(__file__).parent / "results"
Rows = list[dict[str, Any]]


def time_side_by_side(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, with their runs interleaved: what disturbs the machine disturbs all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        jax.block_until_ready(run())  # compile
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def copy_contender(num_bytes: int = 2**28) -> tuple[int, Callable[[], Any]]:
    """What reads and writes `num_bytes` in all, to measure the bandwidth of the machine beside the contenders."""
    x = jnp.ones(num_bytes // 8, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return num_bytes, lambda: copy(x)


def table(rows: Rows) -> None:
    """Print rows; of the columns a row need not have all."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row[name]) if name in row else "" for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def save(name: str, rows: Rows | dict[str, Rows], **facts: Any) -> pathlib.Path:
    """Write rows, or several tables by name, to `results/<name>.json`, with what one needs to read them later."""
    file = RESULTS / f"{name}.json"
    write(file, rows, **facts)
    print(f"\nWritten to {file.relative_to(pathlib.Path.cwd()) if file.is_relative_to(pathlib.Path.cwd()) else file}.")
    return file


def write(file: pathlib.Path, rows: Rows | dict[str, Rows], **facts: Any) -> None:
    """What `save` writes, to any file, which is whole at any time."""
    about = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind} ({platform.processor() or platform.machine()})",
    }
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps({**about, **facts, "rows": rows}, indent=1) + "\n")
    unfinished.replace(file)


@functools.cache
def commit() -> str:
    """Of the sources; unknown where they were copied without their history, or git is not there."""
    try:
        described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return described.stdout.strip() or "unknown"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
