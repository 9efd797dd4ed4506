"""What the benchmarks share: a table for people, and a JSON file for later."""

import datetime
import json
import pathlib
import platform
import subprocess
from typing import Any

import jax

RESULTS = pathlib.Path(__file__).parent / "results"


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows of equal keys."""
    cells = [[*rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def save(name: str, rows: list[dict[str, Any]], **facts: Any) -> pathlib.Path:
    """Write rows to `results/<name>.json`, with what one needs to know to read them later."""
    about = {
        "commit": subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind} ({platform.processor() or platform.machine()})",
    }
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps({**about, **facts, "rows": rows}, indent=1) + "\n")
    print(f"\nWritten to {file.relative_to(pathlib.Path.cwd()) if file.is_relative_to(pathlib.Path.cwd()) else file}.")
    return file


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
