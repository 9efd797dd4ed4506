"""A checkpoint as a Hugging Face folder: config.json, and model.safetensors or several files with their index."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._core.config.validation import show
from jaxkv._files import safetensors
from jaxkv._files.hub import GIVE
from jaxkv._files.json_file import read_json
from jaxkv.models import config_reader
from jaxkv.models.checkpoint_formats import GIVE_OTHERS, dequantize
from jaxkv.models.config import DecoderConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.families.family import read_token_ids

EMBEDDINGS = ("embed_tokens.weight", ".embeddings.weight")
FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


class FolderCheckpoint:
    """A Hugging Face folder, or a config file alone, which has no tensors; see `Checkpoint`."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.config_path = path if is_config_file(path) else path / "config.json"

    def read_config(self, ignore: str | Iterable[str] = ()) -> DecoderConfig:
        """Reads config.json; the end tokens of generation_config.json, if present, take priority."""
        folder, path = self.path, self.config_path
        if path != folder and not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {folder}: {GIVE}.")
        if not path.exists():
            raise FileNotFoundError(f"{folder} has no config.json: a Hugging Face model folder needs one.")
        config = config_reader.parse(read_json(path), str(path), ignore)
        eos = self.read_generation().get("eos_token_id")
        if eos is not None:
            where = f"eos_token_id in {folder / 'generation_config.json'}"
            config = dataclasses.replace(config, eos_ids=read_token_ids(eos, where))
        return config

    def read_generation(self) -> dict[str, Any]:
        """Returns generation_config.json; empty if there is none."""
        path = self.path / "generation_config.json"
        return read_json(path) if path.exists() else {}

    def read_tensors(self) -> dict[str, Any]:
        self._refuse_quantized()
        stored = {name: x for file in weight_files(self.path) for name, x in safetensors.read(file).items()}
        return read_published(stored, read_json(self.config_path), str(self.config_path))

    def read_dtype(self) -> str:
        """Returns the dtype of the embeddings, or of config.json where there are no files."""
        try:
            for file in weight_files(self.path):
                for name, tensor in safetensors.read(file).items():
                    if name.endswith(EMBEDDINGS) and tensor.dtype in FLOATS:
                        return tensor.dtype.name
        except FileNotFoundError:
            pass
        fields = read_json(self.config_path)
        inner = fields.get("text_config")
        fields = dict(inner if isinstance(inner, Mapping) else {}) | fields
        return str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")

    def find_refused_quantization(self) -> str:
        stated = self._read_stated()
        if stated and not config_reader.is_read(stated):
            return str(stated.get("quant_method") or stated.get("quant_algo") or "quantized weights")[:40]
        return str(self._read_quant_config() or "")[:40]

    def find_loaded_quantization(self) -> str:
        stated = self._read_stated()
        return str(stated["quant_method"]) if config_reader.is_read(stated) else ""

    def _read_stated(self) -> Mapping[str, Any]:
        """Returns what config.json states of a quantization; empty if there is no such file or statement."""
        stated = read_json(self.config_path).get("quantization_config") if self.config_path.is_file() else None
        return stated if isinstance(stated, Mapping) else {}

    def _refuse_quantized(self) -> None:
        """Refuses a folder that states a quantization in hf_quant_config.json: no format stated there is supported."""
        if (kind := self._read_quant_config()) is not None:
            raise ValueError(
                f"{self.path} is quantized as {show(kind)} by hf_quant_config.json, which is not read: {GIVE_OTHERS}."
            )

    def _read_quant_config(self) -> Any:
        """Returns the statement of hf_quant_config.json on weights; None: no statement, or no such file."""
        path = self.path / "hf_quant_config.json"
        stated = read_json(path).get("quantization") if path.exists() else None
        return stated.get("quant_algo") if isinstance(stated, Mapping) else None


def is_config_file(path: pathlib.Path) -> bool:
    """Tells whether a path is a config file by itself, whatever its name before ".json"."""
    return path.suffix == ".json" and path.is_file()


def read_published(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a checkpoint's tensors under a decoder's checkpoint names, dequantized.

    Skips buffers that the config determines, and the names that the family skips.

    Args:
      config: the checkpoint's config.json.
      where: name of the config in errors.
    """
    family = FAMILIES.get(config.get("model_type", ""), FAMILIES["llama"])
    named = {family.name_tensor(name, config): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in named.items() if name is not None}
    return dequantize(family.repack(kept), config, where)


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a folder's tensors. Raises FileNotFoundError where one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = read_json(index).get("weight_map")
        named = list(weights.values()) if isinstance(weights, dict) else []
        files = sorted(set(named)) if all(isinstance(file, str) for file in named) else []
        if not files or any(pathlib.Path(file).name != file or file in ("", "..") for file in files):
            raise ValueError(f"{index} must have a weight_map from tensors to files in its own folder.")
    elif (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    else:
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json: no other format is read."
        )
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, which its index names.")
    return [folder / file for file in files]
