"""Loads a `Decoder` from a Hugging Face folder, and saves it as one."""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxkv._core.config.validation import show
from jaxkv._core.state.arguments import to_device
from jaxkv._files import safetensors
from jaxkv._files.hub import find_folder
from jaxkv.models import config_reader
from jaxkv.models.checkpoint_formats import LAYER, dequantize
from jaxkv.models.checkpoint_names import EMBED, HEAD, Slot, slots_of
from jaxkv.models.config import DecoderConfig
from jaxkv.models.decoder import Decoder, Scan
from jaxkv.models.families import FAMILIES
from jaxkv.models.families.family import read_token_ids
from jaxkv.models.partition import AXIS, automatic, sharding_of

FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
DATA = pathlib.Path(__file__).parent.parent / "data"
MOST_WRONG = 12  # tensors named in an error
MOST_JSON = 64 << 20  # bytes; the index of a model of 10,000 tensors has 1 MiB


def load(
    folder: str | os.PathLike, *, dtype: Any = None, scan: Scan | None = None, mesh: Mesh | None = None,
    ignore: str | Iterable[str] = (),
) -> Decoder:  # fmt: skip
    """Loads the model in a Hugging Face folder: config.json, and model.safetensors or several files with their index.

    Weights in MXFP4 (GPT-OSS) and block-scaled float8 (DeepSeek V3) are dequantized as they are read.

    Args:
      folder: a folder; or a name on the Hugging Face hub, "owner/name", which huggingface_hub (the extra `hf`) loads
        from its cache, downloading what is missing.
      dtype: float32, bfloat16 or float16, to convert to; default: the checkpoint's. Avoid float16 on a CPU, where XLA
        widens all weights in every step; the others are ten times as fast.
      scan: how layers are computed: see `Decoder`. Default: "apart" on a CPU, where it compiles faster and is as fast;
        elsewhere, and on a mesh, one by one.
      mesh: shard heads, hidden widths and the vocabulary over its axis "model"; each device reads only its shard.
        `generate` and `Engine` take the mesh from the model. The parameters' mesh axes are automatic, whatever the
        types of the given mesh's axes.
      ignore: names of fields of config.json to treat as missing. An unknown field that could change a decoder's
        computation is refused unless named here; a field that is off, or unrelated to a decoder, only warns.

    Raises:
      FileNotFoundError: the folder or one of its files is missing.
      ValueError: a family or a config field that the decoder cannot honour, a truncated file, or tensors that are
        missing, unknown or misshapen; all of them are named.

    >>> import pathlib, jaxkv.models
    >>> folder = pathlib.Path(jaxkv.__file__).parent / "data" / "small"
    >>> load(folder, dtype="bfloat16").dtype
    dtype(bfloat16)
    """
    folder = find_folder(folder)
    wanted = _float_dtype(dtype) if dtype is not None else None
    config = read_config(folder, ignore)
    path = folder / "config.json"
    _refuse_quantised(folder)
    tensors = read_published(_read_tensors(folder), _read_json(path), str(path))
    # A wrong number of layers is found below, by name; creating many missing layers would take long.
    layers = {int(found[1]) for name in tensors if (found := LAYER.match(name))}
    if config.num_layers > 2 * len(layers) + 1:
        raise ValueError(
            f"{folder} says num_hidden_layers = {config.num_layers}, but it has the tensors of {len(layers)} layers."
        )
    scan = mesh is None and jax.default_backend() == "cpu" if scan is None else scan
    model = nnx.eval_shape(lambda: Decoder(config, scan=scan, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    params = {
        path: (slots_of(path, param.shape, config, model.num_stacked), param)
        for path, param in nnx.to_flat_state(state)
    }
    if config.tie_embeddings and HEAD in tensors and EMBED in tensors:
        if not np.array_equal(np.asarray(tensors[HEAD]), np.asarray(tensors[EMBED])):
            raise ValueError(f"{folder} ties its embeddings, but {HEAD} differs from {EMBED}.")
        del tensors[HEAD]
    _check(folder, [slot for slots, _ in params.values() for slot in slots], tensors)
    own = wanted or tensors[EMBED].dtype

    mesh = None if mesh is None else automatic(mesh)

    def array(path: tuple, slots: list[Slot], shape: tuple[int, ...]) -> jax.Array:
        # The leading axes stack the slots; of the other axes a device's shard can be read alone.
        front = next(i for i in range(len(shape) + 1) if math.prod(shape[:i]) == len(slots))

        def read(index: Any) -> Any:
            parts = [_view(tensors, slot).reshape(shape[front:])[index[front:]].astype(own) for slot in slots]
            return np.stack(parts).reshape(*shape[:front], *parts[0].shape)

        if mesh is None:
            return to_device(read((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, sharding_of(path, shape, mesh), read)

    # Flax's split and merge leave reference cycles that hold their inputs until Python's garbage collection: so they
    # are given the arrays' indices.
    arrays = [array(path, slots, param.shape) for path, (slots, param) in params.items()]
    numbered = [(path, param.replace(i)) for i, (path, (_, param)) in enumerate(params.items())]
    return jax.tree.map(arrays.__getitem__, nnx.merge(graph, nnx.from_flat_state(numbered)))


def save(model: Decoder, folder: str | os.PathLike) -> None:
    """Writes a model as a Hugging Face folder that `load` and transformers read: config.json and model.safetensors.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(small(), folder)
    >>> load(folder).config == small().config
    True
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        slots = slots_of(path, param.shape, config, model.num_stacked)
        for slot, tensor in zip(slots, np.asarray(param[...]).reshape(len(slots), -1), strict=True):
            if slot.part is not None:
                whole = tensors.setdefault(slot.name, np.empty(slot.shape, tensor.dtype)).reshape(slot.part.axes)
                whole[slot.part.where] = tensor.reshape(whole[slot.part.where].shape)
            else:
                shape = slot.shape[::-1] if slot.transposed else slot.shape
                tensors[slot.name] = tensor.reshape(shape).T if slot.transposed else tensor.reshape(shape)
    safetensors.write(folder / "model.safetensors", tensors)
    fields = config_reader.render(config) | {"dtype": str(model.dtype)}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def small(*, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Decoder:
    """Loads the model that ships with jaxkv: a byte-level decoder trained on the standard library's sources, at the end
    as `ast.unparse` writes them.

    >>> small().config.byte_tokens
    True
    """
    return load(DATA / "small", dtype=dtype, mesh=mesh)


def recaller(*, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Decoder:
    """Loads a tiny model that recalls pairs anywhere in 1,024 tokens, to test a cache that evicts.

    A context begins with token 0. It holds up to 32 different keys (tokens 2 to 65), each followed by its value (66 to
    129), among filler tokens (130 to 191). Then come any number of queries, token 1 and a key: the likeliest next token
    is the key's value.

    >>> import jax.numpy as jnp
    >>> context = [0, 150, 2, 66, 151, 3, 67, 152, 4, 68, 153]
    >>> logits, _ = recaller()(jnp.array([[*context, 1, 3]]))
    >>> int(jnp.argmax(logits[0, -1]))
    67
    """
    return load(DATA / "recall", dtype=dtype, mesh=mesh)


def read_config(folder: pathlib.Path, ignore: str | Iterable[str] = ()) -> DecoderConfig:
    """Reads a folder's config.json; the end tokens of generation_config.json, if present, take priority."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: give one with config.json and *.safetensors in it.")
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json: a Hugging Face model folder needs one.")
    config = config_reader.parse(_read_json(folder / "config.json"), str(folder / "config.json"), ignore)
    if (folder / "generation_config.json").exists():
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is not None:
            where = f"eos_token_id in {folder / 'generation_config.json'}"
            config = dataclasses.replace(config, eos_ids=read_token_ids(eos, where))
    return config


def read_published(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a checkpoint's tensors under a decoder's checkpoint names, dequantized.

    Skips buffers that the config determines, and the names that the family skips.

    Args:
      config: the checkpoint's config.json.
      where: name of the config in errors.
    """
    family = FAMILIES.get(config.get("model_type", ""), FAMILIES["llama"])
    named = {family.name_tensor(name, config): tensor for name, tensor in tensors.items()}
    return dequantize({name: tensor for name, tensor in named.items() if name is not None}, config, where)


def _view(tensors: dict[str, Any], slot: Slot) -> np.ndarray:
    """Returns a parameter as a view of the checkpoint: nothing of a file is read before it is used."""
    x = np.asarray(tensors[slot.name])
    x = x if slot.part is None else x.reshape(slot.part.axes)[slot.part.where]
    return x.T if slot.transposed else x


def _float_dtype(dtype: Any) -> np.dtype:
    if str(dtype) in (names := [d.name for d in FLOATS]) or dtype in FLOATS:
        return jnp.dtype(dtype)
    raise ValueError(f"dtype must be one of {', '.join(names)}, not {dtype}.")


@functools.cache
def count_parameters(config: DecoderConfig, devices: int = 1) -> int:
    """Counts a decoder's parameters on each of `devices` devices, without creating any."""
    mesh = AbstractMesh((devices,), (AXIS,))

    def count(i: int, num_layers: int) -> int:
        """Counts the parameters of a decoder with `num_layers` layers like the i-th."""
        has_experts = bool(config.experts) and config.expert_layers[i]
        alike = dataclasses.replace(
            config, layers=config.layers[i : i + 1] * num_layers, ropes=config.ropes[i : i + 1] * num_layers,
            experts=config.experts if has_experts else None, expert_layers=(True,) * (num_layers * has_experts),
        )  # fmt: skip
        _, state = nnx.split(nnx.eval_shape(lambda: Decoder(alike, rngs=nnx.Rngs(0))))
        params = nnx.to_flat_state(state)
        return sum(math.prod(sharding_of(at, x.shape, mesh).shard_shape(x.shape)) for at, x in params)

    # Layers also differ in window and rotation, which does not change the count.
    experts = config.expert_layers or (False,) * config.num_layers
    kinds = [(layer.num_kv_heads, layer.head_dim, has) for layer, has in zip(config.layers, experts, strict=True)]
    of_layer = {kind: count(i, 2) - count(i, 1) for i, kind in ((kinds.index(kind), kind) for kind in set(kinds))}
    return count(0, 1) - of_layer[kinds[0]] + sum(of_layer[kind] for kind in kinds)


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a folder's tensors. Raises FileNotFoundError where one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = _read_json(index).get("weight_map")
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


def _read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in weight_files(folder) for name, tensor in safetensors.read(file).items()}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
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


def _refuse_quantised(folder: pathlib.Path) -> None:
    """Refuses a folder that states its quantization in hf_quant_config.json: no format stated there is supported."""
    if (kind := _read_quant_config(folder)) is not None:
        raise ValueError(
            f"{folder} is quantised as {show(kind)} by hf_quant_config.json, which is not read: give a folder with "
            "weights of 16 or 32 bits, in MXFP4, or in blocks of float8."
        )


def _read_quant_config(folder: pathlib.Path) -> Any:
    """Returns the statement of hf_quant_config.json on weights; None: no statement, or no such file."""
    path = folder / "hf_quant_config.json"
    stated = _read_json(path).get("quantization") if path.exists() else None
    return stated.get("quant_algo") if isinstance(stated, Mapping) else None


def stated_quantization(folder: pathlib.Path) -> str:
    """Returns the name of a quantization that a folder states and `load` does not support; "" if there is none."""
    path = folder / "config.json"
    stated = _read_json(path).get("quantization_config") if path.is_file() else None
    if isinstance(stated, Mapping) and not config_reader.is_read(stated):
        return str(stated.get("quant_method") or stated.get("quant_algo") or "quantised weights")[:40]
    return str(_read_quant_config(folder) or "")[:40]


def read_dtype(folder: pathlib.Path) -> str:
    """Returns the default dtype of `load` for a folder: that of the embeddings, or of config.json where there are no
    files."""
    try:
        for file in weight_files(folder):
            for name, tensor in safetensors.read(file).items():
                if name.endswith(EMBED.removeprefix("model.")) and tensor.dtype in FLOATS:
                    return tensor.dtype.name
    except FileNotFoundError:
        pass
    fields = _read_json(folder / "config.json")
    inner = fields.get("text_config")
    fields = dict(inner if isinstance(inner, Mapping) else {}) | fields
    return str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")


def _check(folder: pathlib.Path, slots: list[Slot], tensors: dict[str, Any]) -> None:
    """Raises one error that names all wrong tensors, up to `MOST_WRONG`."""
    wanted = {slot.name: slot.shape for slot in slots}
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.keys())]
    wrong += [f"{name} is unknown" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        tensor = tensors[name]
        if tensor.shape != wanted[name]:
            wrong.append(f"{name} has shape {list(tensor.shape)}, not {list(wanted[name])}")
        elif tensor.dtype not in FLOATS:
            wrong.append(f"{name} has dtype {tensor.dtype}, not float32, bfloat16 or float16")
    if wrong:
        more = f"; and {len(wrong) - MOST_WRONG} more" if len(wrong) > MOST_WRONG else ""
        raise ValueError(f"The tensors in {folder} do not fit its config.json: {'; '.join(wrong[:MOST_WRONG])}{more}.")
