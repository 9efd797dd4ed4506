"""From a Hugging Face folder to a `Decoder` and back."""

import dataclasses
import json
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv._files import safetensors
from jaxkv.models import hugging_face
from jaxkv.models.config import DecoderConfig
from jaxkv.models.decoder import Decoder

FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
MOST_JSON = 64 << 20  # bytes; the index of a model of 10,000 tensors has one
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Our name -> the checkpoint's, for what there is once and for what each layer has.
WHOLE = {"embed": EMBED, "norm": "model.norm.weight", "head": HEAD}
PER_LAYER = {
    "attention.query": "self_attn.q_proj.weight",
    "attention.key": "self_attn.k_proj.weight",
    "attention.value": "self_attn.v_proj.weight",
    "attention.out": "self_attn.o_proj.weight",
    "attention.query_bias": "self_attn.q_proj.bias",
    "attention.key_bias": "self_attn.k_proj.bias",
    "attention.value_bias": "self_attn.v_proj.bias",
    "attention.out_bias": "self_attn.o_proj.bias",
    "attention.position_fn.query_norm": "self_attn.q_norm.weight",
    "attention.position_fn.key_norm": "self_attn.k_norm.weight",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate_bias": "mlp.gate_proj.bias",
    "mlp.up_bias": "mlp.up_proj.bias",
    "mlp.down_bias": "mlp.down_proj.bias",
}
# Where attention and MLP are followed by norms too, post_attention_layernorm is that norm, no longer the MLP's.
PER_LAYER_WITH_POST_NORMS = PER_LAYER | {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
# How many leading axes of our kernels are inputs; theirs are [all outputs, all inputs].
INPUT_AXES = {"query": 1, "key": 1, "value": 1, "out": 2, "gate": 1, "up": 1, "down": 1}
# Buffers in old checkpoints, which the config determines.
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class Slot(NamedTuple):
    """How a parameter is stored in a checkpoint: its name, its shape, and whether it lies there transposed."""

    name: str
    shape: tuple[int, ...]
    transposed: bool


def load(folder: str | os.PathLike, *, dtype: Any = None, scan: bool = False) -> Decoder:
    """The model in a Hugging Face folder: config.json, and model.safetensors or several files with their index.

    Args:
      folder: where they are.
      dtype: float32, bfloat16 or float16, to convert to; default: what the checkpoint has.
      scan: scan over the layers, so that a deep model compiles as fast as a shallow one: see `Decoder`.

    Raises:
      FileNotFoundError: the folder or one of its files is missing.
      ValueError: a family or a config field that the decoder cannot honour, a truncated file, or tensors that are
        missing, unknown or misshapen; all of them are named.
    """
    folder = pathlib.Path(folder)
    wanted = _float_dtype(dtype) if dtype is not None else None
    config = read_config(folder)
    tensors = {name: x for name, x in _read_tensors(folder).items() if not IGNORED.fullmatch(name)}
    # A layer more or less is found below, and by name; making many only to miss them takes long.
    layers = {int(found[1]) for name in tensors if (found := LAYER.match(name))}
    if config.num_layers > 2 * len(layers) + 1:
        raise ValueError(
            f"{folder} says num_hidden_layers = {config.num_layers}, but it has the tensors of {len(layers)} layers."
        )
    model = nnx.eval_shape(lambda: Decoder(config, scan=scan, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    params = {
        path: (slots_of(path, param.shape, config, model.num_scanned), param)
        for path, param in nnx.to_flat_state(state)
    }
    if config.tie_embeddings and HEAD in tensors and EMBED in tensors:
        if not np.array_equal(tensors[HEAD], tensors[EMBED]):
            raise ValueError(f"{folder} ties its embeddings, but {HEAD} differs from {EMBED}.")
        del tensors[HEAD]
    _check(folder, [slot for slots, _ in params.values() for slot in slots], tensors)
    own = wanted or tensors[EMBED].dtype

    def array(slots: list[Slot], shape: tuple[int, ...]) -> jax.Array:
        found = ((tensors[slot.name], slot.transposed) for slot in slots)
        return jnp.array(np.stack([(x.T if transposed else x).astype(own) for x, transposed in found]).reshape(shape))

    loaded = [(path, param.replace(array(slots, param.shape))) for path, (slots, param) in params.items()]
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def save(model: Decoder, folder: str | os.PathLike) -> None:
    """Write a model as a Hugging Face folder that `load` and transformers read: config.json and model.safetensors."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    tensors = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        slots = slots_of(path, param.shape, config, model.num_scanned)
        for slot, tensor in zip(slots, np.asarray(param[...]).reshape(len(slots), -1), strict=True):
            tensors[slot.name] = tensor.reshape(slot.shape[::-1]).T if slot.transposed else tensor.reshape(slot.shape)
    safetensors.write(folder / "model.safetensors", tensors)
    fields = hugging_face.render(config) | {"dtype": str(model.dtype)}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def small(*, dtype: Any = jnp.float32) -> Decoder:
    """The model that ships with jaxkv: a byte-level decoder that has read the standard library's sources.

    >>> small().config.byte_tokens
    True
    """
    return load(pathlib.Path(__file__).parent.parent / "data" / "small", dtype=dtype)


def read_config(folder: pathlib.Path) -> DecoderConfig:
    """A folder's config.json; generation_config.json, where there is one, knows better what ends a text."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: give one with config.json and *.safetensors in it.")
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} has no config.json: a Hugging Face model folder needs one.")
    config = hugging_face.parse(_read_json(folder / "config.json"), str(folder / "config.json"))
    if (folder / "generation_config.json").exists():
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is not None:
            where = f"eos_token_id in {folder / 'generation_config.json'}"
            config = dataclasses.replace(config, eos_ids=hugging_face.token_ids(eos, where))
    return config


def slots_of(path: tuple, shape: tuple[int, ...], config: DecoderConfig, num_scanned: int) -> list[Slot]:
    """Where the checkpoint keeps the parameter at `path` of a decoder, of `shape` there: one slot, or one for each of
    the layers that it is stacked of. The first `num_scanned` layers are stacked."""
    first, *rest = path
    if first == "stacks":
        (place, *rest), (count, *shape_of_one) = rest, shape
        layers, shape = range(place, count * config.period, config.period), tuple(shape_of_one)
    elif first == "layers":
        place, *rest = rest
        layers = range(num_scanned + place, num_scanned + place + 1)
    else:
        return [Slot(WHOLE[first], shape, False)]
    table, inputs = PER_LAYER_WITH_POST_NORMS if config.post_norms else PER_LAYER, INPUT_AXES.get(rest[-1], 0)
    matrix = (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else (math.prod(shape),)
    return [Slot(f"model.layers.{i}.{table['.'.join(rest)]}", matrix, bool(inputs)) for i in layers]


def _float_dtype(dtype: Any) -> np.dtype:
    if str(dtype) in (names := [d.name for d in FLOATS]) or dtype in FLOATS:
        return jnp.dtype(dtype)
    raise ValueError(f"dtype must be one of {', '.join(names)}, not {dtype}.")


def count_parameters(config: DecoderConfig) -> int:
    """The parameters of a decoder, without making any."""

    def count(num_layers: int) -> int:
        few = dataclasses.replace(config, windows=config.windows[:num_layers], ropes=config.ropes[:num_layers])
        _, state = nnx.split(nnx.eval_shape(lambda: Decoder(few, rngs=nnx.Rngs(0))))
        return sum(math.prod(param.shape) for _, param in nnx.to_flat_state(state))

    one = count(1)
    return one + (config.num_layers - 1) * (count(2) - one)  # layers differ in what they see, not in what they hold


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files that a folder's tensors are in. FileNotFoundError where one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = _read_json(index).get("weight_map")
        named = list(weights.values()) if isinstance(weights, dict) else []
        files = sorted(set(named)) if all(isinstance(file, str) for file in named) else []
        if not files or any(pathlib.Path(file).name != file for file in files):
            raise ValueError(f"{index} must have a weight_map from tensors to files in its own folder.")
    elif (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    else:
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json: no other format is read."
        )
    if missing := [file for file in files if not (folder / file).exists()]:
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


def _check(folder: pathlib.Path, slots: list[Slot], tensors: dict[str, np.ndarray]) -> None:
    """Raises one error with everything that is wrong."""
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
        raise ValueError(f"The tensors in {folder} do not fit its config.json: {'; '.join(wrong)}.")
