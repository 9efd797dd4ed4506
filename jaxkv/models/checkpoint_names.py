"""Names, shapes and layouts of a decoder's parameters in checkpoints."""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxkv.models.config import DecoderConfig
from jaxkv.models.families import FAMILIES
from jaxkv.models.families.family import AsStored, Columns, Rows, Section

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Our name -> Llama's, for parameters of the model and of each layer. A name with {} exists once for each expert. A
# family's module lists the names that differ.
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
    "attention.sinks": "self_attn.sinks",
    "attention.position_fn.query_norm": "self_attn.q_norm.weight",
    "attention.position_fn.key_norm": "self_attn.k_norm.weight",
    "attention.query_down": "self_attn.q_a_proj.weight",
    "attention.query_down_bias": "self_attn.q_a_proj.bias",
    "attention.query_norm": "self_attn.q_a_layernorm.weight",
    "attention.query_up": "self_attn.q_b_proj.weight",
    "attention.key_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.key_down_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attention.key_norm": "self_attn.kv_a_layernorm.weight",
    "attention.key_up": "self_attn.kv_b_proj.weight",
    "attention.value_up": "self_attn.kv_b_proj.weight",
    "attention.indexer.query": "self_attn.indexer.wq_b.weight",
    "attention.indexer.key": "self_attn.indexer.wk.weight",
    "attention.indexer.weights": "self_attn.indexer.weights_proj.weight",
    "attention.indexer.key_norm": "self_attn.indexer.k_norm.weight",
    "attention.indexer.key_norm_bias": "self_attn.indexer.k_norm.bias",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate_bias": "mlp.gate_proj.bias",
    "mlp.up_bias": "mlp.up_proj.bias",
    "mlp.down_bias": "mlp.down_proj.bias",
    "experts.router": "mlp.gate.weight",
    "experts.choice_bias": "mlp.gate.e_score_correction_bias",
    "experts.gate": "mlp.experts.{}.gate_proj.weight",
    "experts.up": "mlp.experts.{}.up_proj.weight",
    "experts.down": "mlp.experts.{}.down_proj.weight",
    "experts.shared_gate": "mlp.shared_expert_gate.weight",
    "experts.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "experts.shared.up": "mlp.shared_experts.up_proj.weight",
    "experts.shared.down": "mlp.shared_experts.down_proj.weight",
    "experts.shared.gate_bias": "mlp.shared_experts.gate_proj.bias",
    "experts.shared.up_bias": "mlp.shared_experts.up_proj.bias",
    "experts.shared.down_bias": "mlp.shared_experts.down_proj.bias",
}
# Checkpoints store [all outputs, all inputs], as we do but for these: their number of leading input axes.
INPUT_AXES = {
    "attention.out": 2,
    "mixer.out": 1,
    "experts.router": 1,
    "experts.gate": 1,
    "experts.up": 1,
    "experts.down": 1,
}


class TensorSlice(NamedTuple):
    """The slice of a tensor that a parameter is: the tensor's reshaped axes, and the index of the slice in them."""

    axes: tuple[int, ...]
    where: Any


class Slot(NamedTuple):
    """A parameter in a checkpoint: tensor name, shape, whether its last two axes are exchanged, and the slice of
    the tensor that the parameter is; None: all."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    tensor_slice: TensorSlice | None = None


def slots_of(path: tuple, shape: tuple[int, ...], config: DecoderConfig, num_stacked: int) -> list[Slot]:
    """Returns checkpoint slots of the parameter at `path` of a decoder, of `shape` there. A stacked parameter has one
    slot for each layer and expert. The first `num_stacked` layers are stacked."""
    first, *rest = path
    if first == "stacks":
        (place, *rest), (count, *layer_shape) = rest, shape
        layers, shape = range(place, count * config.period, config.period), tuple(layer_shape)
    elif first == "layers":
        place, *rest = rest
        layers = range(num_stacked + place, num_stacked + place + 1)
    else:
        outer = outer_name(config, ".".join(path))
        if "{}" in outer:
            return [Slot(outer.format(i), shape[1:], False) for i in range(shape[0])]
        return [Slot(outer, shape, False)]
    key = ".".join(rest)
    tensors = FAMILIES[config.family].tensors
    name = tensors[key] if key in tensors else PER_LAYER[key]
    if isinstance(name, Section):
        whole, axes, where = name.find(config, shape)
        tensor_slice = TensorSlice(axes, where)
        return [Slot(f"model.layers.{i}.{name.name}", whole, name.transposed, tensor_slice) for i in layers]
    if isinstance(name, AsStored):
        return [Slot(f"model.layers.{i}.{name.name}", shape, False) for i in layers]
    if isinstance(name, Columns):
        shape = (*shape[:-1], name.step * shape[-1])
        tensor_slice = TensorSlice(shape, np.s_[..., name.first :: name.step])
        return [Slot(f"model.layers.{i}.{name.name}", shape, False, tensor_slice) for i in layers]
    if isinstance(name, Rows):
        return [_fused_slot(f"model.layers.{i}.{name.name}", key, name.keys, shape, config) for i in layers]
    if config.latent is not None and key in ("attention.key_up", "attention.value_up"):  # both in one tensor
        (heads, _, rank), nope_dim = shape, config.latent.nope_dim
        rows = nope_dim + config.latent.value_dim
        tensor_slice = TensorSlice(
            (heads, rows, rank), np.s_[:, :nope_dim] if key == "attention.key_up" else np.s_[:, nope_dim:]
        )
        return [Slot(f"model.layers.{i}.{name}", (heads * rows, rank), False, tensor_slice) for i in layers]
    names = [name.format(expert) for expert in range(shape[0])] if "{}" in name else [name]
    own = shape[1:] if "{}" in name else shape
    if inputs := INPUT_AXES.get(key, 0):
        theirs: tuple[int, ...] = math.prod(own[inputs:]), math.prod(own[:inputs])
    elif len(own) == 1 or key.endswith(("bias", "_norm")):
        theirs = (math.prod(own),)
    else:
        theirs = math.prod(own[:-1]), own[-1]
    return [Slot(f"model.layers.{i}.{name}", theirs, bool(inputs)) for i in layers for name in names]


def outer_name(config: DecoderConfig, key: str) -> str:
    """Returns the name of the embeddings, the last norm, the head, or another parameter outside the layers."""
    name = FAMILIES[config.family].tensors.get(key) or WHOLE[key]
    assert isinstance(name, str)
    return name


def _fused_slot(name: str, key: str, fused: tuple[str, ...], shape: tuple[int, ...], config: DecoderConfig) -> Slot:
    """Returns the slot of a parameter that is some rows of a tensor: `key`'s among those of `fused`."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"attention.query": query, "attention.key": key_value, "attention.value": key_value}
    rows = [sizes.get(other.removesuffix("_bias"), config.mlp_dim) for other in fused]
    first, size = sum(rows[: fused.index(key)]), rows[fused.index(key)]
    whole = (sum(rows),) if key.endswith("_bias") else (sum(rows), shape[-1])
    return Slot(name, whole, False, TensorSlice(whole, np.s_[first : first + size]))
