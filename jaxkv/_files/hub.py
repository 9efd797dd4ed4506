"""Finds a model's files: in a folder, or by name on the Hugging Face hub through the huggingface_hub library."""

import os
import pathlib
import re
from typing import Any

from jaxkv._core.config.validation import show
from jaxkv._files.gguf import split_files
from jaxkv._files.paths import read_path

WANTED = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
TEXT = ("*.json", "*.jinja", "*.model", "*.txt")  # all files but the weights
GIVE = "give one with config.json and *.safetensors in it, a .gguf file, or owner/name on the Hugging Face hub"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(source: Any, *, weights: bool = True) -> pathlib.Path:
    """Returns the folder or GGUF file of a model: the given one, or the snapshot of `owner/name` in the hub's cache.

    Missing files are downloaded, with the library's own token, cache folder and offline mode.

    Args:
      source: a folder, a GGUF file, or the name of a repository.
      weights: download tensors too.

    Raises:
      FileNotFoundError: there is no such folder or file, and no such repository can be downloaded.
      ModuleNotFoundError: `source` is a repository, and huggingface_hub is not installed.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"A model must be a folder or the name of a repository, owner/name, not {show(source)}.")
    folder = read_path("source", source)
    if folder.is_dir():
        return _gguf_in(folder) or folder
    if folder.suffix == ".gguf":
        if not folder.is_file():
            raise FileNotFoundError(f"There is no file {folder}.")
        return folder
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder with config.json and *.safetensors in it, or a .gguf.")
    name = str(source)
    if not NAME.fullmatch(name):
        raise FileNotFoundError(f"There is no folder {folder}: {GIVE}.")
    try:
        import huggingface_hub
    except ImportError:
        raise ModuleNotFoundError(
            f"There is no folder {source}, and reading it from the Hugging Face hub needs the extra 'hf': pip install "
            "'jaxkv[hf]'."
        ) from None
    patterns = list(WANTED if weights else TEXT)
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library and its HTTP client raise many types
        why = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"There is no folder {source}, and the Hugging Face hub does not give a repository of this name "
            f"({type(error).__name__}: {why.rstrip('.')}): check the name, the network, or HF_TOKEN if it is private."
        ) from None


def _gguf_in(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file of a folder that has no config.json and one model in GGUF; the first of a split one."""
    files = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
    return files[0] if files and len(split_files(files[0])) == len(files) else None
