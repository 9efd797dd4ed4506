"""Paths as callers give them."""

import os
import pathlib
from typing import Any

from jaxkv._core.config.validation import show


def read_path(name: str, path: Any) -> pathlib.Path:
    """Returns a path.

    Raises:
      ValueError: it is none, or has characters that no name of a file can have here.

    >>> read_path("path", "chat.safetensors").name
    'chat.safetensors'
    >>> read_path("path", "")
    Traceback (most recent call last):
    ...
    ValueError: path must be the path of a file or a folder, a str or an os.PathLike, not ''.
    """
    try:
        encoded = os.fsencode(path) if isinstance(path, str | os.PathLike) else b""
    except UnicodeEncodeError:
        encoded = b"\0"
    if not encoded:
        raise ValueError(f"{name} must be the path of a file or a folder, a str or an os.PathLike, not {show(path)}.")
    if b"\0" in encoded:
        raise ValueError(f"{name} has characters that no name of a file can have here: {show(path)}.")
    return pathlib.Path(os.fsdecode(encoded))


def read_file_path(name: str, path: Any) -> pathlib.Path:
    """Returns the path of a file, there or not. Raises ValueError, also for a folder."""
    found = read_path(name, path)
    if found.is_dir():
        raise ValueError(f"{name} must be the path of a file, and {found} is a folder: name a file in it.")
    return found


def check_model_name(model: Any) -> None:
    """Raises ValueError unless `model`, by which files are told apart, is a string or None."""
    if not isinstance(model, str | None):
        raise ValueError(f"model must be a name or a fingerprint, a str, not {show(model)}.")
