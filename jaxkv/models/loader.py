"""Loads a `Decoder` from a Hugging Face folder, and saves it as one."""

import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxkv._core.config.validation import show
from jaxkv._core.state.arguments import to_device
from jaxkv._files import safetensors
from jaxkv._files.aligned_copy import copy_aligned
from jaxkv._files.hub import find_model
from jaxkv._files.paths import read_path
from jaxkv.models import config_reader
from jaxkv.models.checkpoint_formats import LAYER
from jaxkv.models.checkpoint_names import Slot, outer_name, slots_of
from jaxkv.models.checkpoints import open_checkpoint
from jaxkv.models.checkpoints.folder import FLOATS
from jaxkv.models.checkpoints.parameter_counts import count_parameters as count_parameters
from jaxkv.models.config import DecoderConfig
from jaxkv.models.decoder import Decoder, Scan
from jaxkv.models.families import FAMILIES
from jaxkv.models.partition import automatic, sharding_of

DATA = pathlib.Path(__file__).parent.parent / "data"
MOST_WRONG = 12  # tensors named in an error


def load(
    folder: str | os.PathLike,
    *,
    dtype: Any = None,
    scan: Scan | None = None,
    mesh: Mesh | None = None,
    ignore: str | Iterable[str] = (),
) -> Decoder:
    """Loads the model in a Hugging Face folder: config.json, and model.safetensors or several files with their index;
    or in a GGUF file.

    Weights in MXFP4 (GPT-OSS), block-scaled float8 (DeepSeek V3), both (DeepSeek V4) and GGUF's formats are dequantized
    as they are read.

    Args:
      folder: a folder; a GGUF file of llama, qwen2, qwen3, gemma2 or gemma3, read by the extra `gguf`, any part of a
        split one; or a name on the Hugging Face hub, "owner/name", which huggingface_hub (the extra `hf`) loads from
        its cache, downloading what is missing.
      dtype: float32, bfloat16 or float16, to convert to; default: the checkpoint's, of a quantized GGUF float32. Avoid
        float16 on a CPU, where XLA widens all weights in every step; the others are ten times as fast.
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
    wanted = _float_dtype(dtype) if dtype is not None else None
    checkpoint = open_checkpoint(find_model(folder))
    config, tensors, folder = checkpoint.read_config(ignore), checkpoint.read_tensors(), checkpoint.path
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
    embed, head = outer_name(config, "embed"), outer_name(config, "head")
    if config.tie_embeddings and head in tensors and embed in tensors:
        if not np.array_equal(np.asarray(tensors[head]), np.asarray(tensors[embed])):
            raise ValueError(f"{folder} ties its embeddings, but {head} differs from {embed}.")
        del tensors[head]
    _check(folder, params.values(), tensors)
    own = wanted or tensors[embed].dtype

    mesh = None if mesh is None else automatic(mesh)
    device = next(iter(jax.device_put(np.zeros(0)).devices())) if mesh is None else mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"

    def array(path: tuple, slots: list[Slot], param: Any) -> jax.Array:
        shape, dtype = param.shape, own if jnp.issubdtype(param.dtype, jnp.floating) else np.dtype(param.dtype)
        # The leading axes stack the slots; of the other axes a device's shard can be read alone.
        front = next(i for i in range(len(shape) + 1) if math.prod(shape[:i]) == len(slots))

        def read(index: Any) -> Any:
            views = (_view(tensors, slot, dtype).reshape(shape[front:])[index[front:]] for slot in slots)
            converted = [view.astype(dtype, copy=False) for view in views]
            x = converted[0] if len(converted) == 1 else np.stack(converted)  # no copy of what is alone
            if (
                on_cpu and not x.flags.writeable
            ):  # JAX may use it in place, and a mapped file changes when it is written
                x = copy_aligned(x)
            return x.reshape(*shape[:front], *converted[0].shape)

        if mesh is None:
            return to_device(read((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, sharding_of(path, shape, mesh), read)

    # Flax's split and merge leave reference cycles that hold their inputs until Python's garbage collection: so they
    # are given the arrays' indices.
    arrays = [array(path, slots, param) for path, (slots, param) in params.items()]
    numbered = [(path, param.replace(i)) for i, (path, (_, param)) in enumerate(params.items())]
    return jax.tree.map(arrays.__getitem__, nnx.merge(graph, nnx.from_flat_state(numbered)))


def save(model: Decoder, folder: str | os.PathLike) -> None:
    """Writes a model as a Hugging Face folder that `load` and transformers read: config.json and model.safetensors.

    Raises:
      ValueError: the family's config.json cannot say which windows or chunks a layer has; nothing is written then.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(small(), folder)
    >>> load(folder).config == small().config
    True
    """
    folder, config = read_path("folder", folder), model.config
    fields = config_reader.render(config) | {"dtype": str(model.dtype)}
    rules, found = ([str(x.retention) for x in c.layers] for c in (config, config_reader.parse(fields)))
    if rules != found:
        i = next(i for i, (own, other) in enumerate(zip(rules, found, strict=True)) if own != other)
        raise ValueError(
            f"A config.json of the family {config.family} cannot say that layer {i} is {rules[i]}: loaded, it would be "
            f"{found[i]}. Give the DecoderConfig a family that has such layers."
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for path, param in nnx.to_flat_state(nnx.state(model)):
        slots, x = slots_of(path, param.shape, config, model.num_stacked), np.asarray(param[...])
        x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(np.int64)  # as PyTorch indexes
        for slot, tensor in zip(slots, x.reshape(len(slots), -1), strict=True):
            whole = tensors.setdefault(slot.name, np.empty(slot.shape, tensor.dtype))
            view = (
                whole if slot.tensor_slice is None else whole.reshape(slot.tensor_slice.axes)[slot.tensor_slice.where]
            )
            view = np.swapaxes(view, -1, -2) if slot.transposed else view  # a view: it writes to the tensor
            view[...] = tensor.reshape(view.shape)
    for name, number in FAMILIES[config.family].constants.items():
        constant = np.asarray(number, model.dtype)
        tensors |= {f"model.layers.{i}.{name}": constant for i in range(config.num_layers)}
    safetensors.write(folder / "model.safetensors", tensors)
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


def read_config(source: pathlib.Path, ignore: str | Iterable[str] = ()) -> DecoderConfig:
    """Reads the configuration of a folder or a GGUF file; see `load`."""
    return open_checkpoint(source).read_config(ignore)


def _view(tensors: dict[str, Any], slot: Slot, dtype: np.dtype) -> np.ndarray:
    """Returns a parameter as a view of the checkpoint: nothing of a file is read before it is used. What is quantized
    is dequantized to `dtype`."""
    x = tensors[slot.name]
    x = x if isinstance(x, np.ndarray) else np.asarray(x, dtype)
    x = x if slot.tensor_slice is None else x.reshape(slot.tensor_slice.axes)[slot.tensor_slice.where]
    return x.swapaxes(-1, -2) if slot.transposed else x


def _float_dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or found not in FLOATS:
        given = dtype if isinstance(dtype, str) and dtype else show(dtype)
        raise ValueError(f"dtype must be one of {', '.join(d.name for d in FLOATS)}, not {given}.")
    return found


def _check(folder: pathlib.Path, params: Iterable[tuple[list[Slot], Any]], tensors: dict[str, Any]) -> None:
    """Raises one error that names all wrong tensors, up to `MOST_WRONG`."""
    params = list(params)
    wanted = {slot.name: slot.shape for slots, _ in params for slot in slots}
    integers = {
        slot.name for slots, param in params if jnp.issubdtype(param.dtype, jnp.integer) for slot in slots
    }  # fmt: skip
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - tensors.keys())]
    wrong += [f"{name} is unknown" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        tensor = tensors[name]
        if tensor.shape != wanted[name]:
            wrong.append(f"{name} has shape {list(tensor.shape)}, not {list(wanted[name])}")
        elif name in integers and not jnp.issubdtype(tensor.dtype, jnp.integer):
            wrong.append(f"{name} has dtype {tensor.dtype}, not integers")
        elif name not in integers and tensor.dtype not in FLOATS:
            wrong.append(f"{name} has dtype {tensor.dtype}, not float32, bfloat16 or float16")
    if wrong:
        more = f"; and {len(wrong) - MOST_WRONG} more" if len(wrong) > MOST_WRONG else ""
        raise ValueError(f"The tensors in {folder} do not fit its config.json: {'; '.join(wrong[:MOST_WRONG])}{more}.")
