"""Checkpoints on disk: Hugging Face folders and GGUF files, each read as a `Checkpoint`.

What lives here: the readers of both, and the differences between llama.cpp's conventions and Hugging Face's. A further
GGUF architecture is an entry of `gguf_metadata.ARCHITECTURES`. Imported by the loader; the file formats themselves are
in `jaxkv._files`.
"""

import pathlib
from collections.abc import Iterable
from typing import Any, Protocol

from jaxkv.models.checkpoints.folder import FolderCheckpoint
from jaxkv.models.checkpoints.gguf_file import GGUFCheckpoint
from jaxkv.models.config import DecoderConfig


class Checkpoint(Protocol):
    """A model on disk.

    - `read_config(ignore)`: its configuration; fields that `ignore` names count as missing.
    - `read_generation()`: the fields of generation_config.json, the sampling that its makers recommend among them.
    - `read_tensors()`: tensors by Hugging Face's names; arrays, or what NumPy makes an array of when it is used.
    - `read_dtype()`: the dtype that `load` gives the weights by default.
    - `find_refused_quantization()`: the name of a quantization that `load` does not support; "" if there is none.
    - `find_loaded_quantization()`: the name of one that `load` dequantizes; "" if there is none, or tensors differ.
    """

    path: pathlib.Path

    def read_config(self, ignore: str | Iterable[str] = ()) -> DecoderConfig: ...
    def read_generation(self) -> dict[str, Any]: ...
    def read_tensors(self) -> dict[str, Any]: ...
    def read_dtype(self) -> str: ...
    def find_refused_quantization(self) -> str: ...
    def find_loaded_quantization(self) -> str: ...


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Returns the checkpoint in a folder or a GGUF file, as `find_model` finds them, or of a config file alone.
    Raises ValueError if it is bad."""
    return GGUFCheckpoint(path) if path.suffix == ".gguf" and path.is_file() else FolderCheckpoint(path)
