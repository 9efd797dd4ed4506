"""A checkpoint as a GGUF file, or as the files of a split one."""

import pathlib
from collections.abc import Iterable
from typing import Any

from jaxkv._files import gguf
from jaxkv.models import config_reader
from jaxkv.models.checkpoints.gguf_metadata import find_architecture, read_fields
from jaxkv.models.checkpoints.gguf_tensors import name_tensors
from jaxkv.models.config import DecoderConfig


class GGUFCheckpoint:
    """A GGUF file; see `Checkpoint`. Any file of a split model stands for all of them."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        metadata, self._stored = gguf.read(path)
        self._architecture = find_architecture(metadata, str(path))
        self._fields = read_fields(metadata, self._stored, str(path))

    def read_config(self, ignore: str | Iterable[str] = ()) -> DecoderConfig:
        return config_reader.parse(self._fields, str(self.path), ignore)

    def read_generation(self) -> dict[str, Any]:
        return {}

    def read_tensors(self) -> dict[str, Any]:
        return name_tensors(self._stored, self._architecture, self._fields, str(self.path))

    def read_dtype(self) -> str:
        embed = self._stored.get("token_embd.weight")
        return "float32" if embed is None else embed.dtype.name

    def find_refused_quantization(self) -> str:
        return ""  # all that the gguf package knows is dequantized

    def find_loaded_quantization(self) -> str:
        return ""  # its tensors may each have another
