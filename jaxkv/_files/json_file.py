"""Reads a JSON file that somebody else wrote."""

import json
import pathlib
from typing import Any

MOST_JSON = 64 << 20  # bytes; the index of a model of 10,000 tensors has 1 MiB


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns a file's object. Raises ValueError where it has none, or is too large."""
    if (size := path.stat().st_size) > MOST_JSON:
        raise ValueError(f"{path} has {size} bytes, more than the {MOST_JSON} that such a file can need.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content
