"""What a decoder's parameters are called in checkpoints, and how they lie there."""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxkv.models.config import DecoderConfig

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Our name -> the checkpoint's, for what there is once and for what each layer has. With {} each expert has one.
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
    "experts.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "experts.shared.up": "mlp.shared_experts.up_proj.weight",
    "experts.shared.down": "mlp.shared_experts.down_proj.weight",
    "experts.shared.gate_bias": "mlp.shared_experts.gate_proj.bias",
    "experts.shared.up_bias": "mlp.shared_experts.up_proj.bias",
    "experts.shared.down_bias": "mlp.shared_experts.down_proj.bias",
}
# Where attention and MLP are followed by norms too, post_attention_layernorm is that norm, no longer the MLP's.
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
# GPT-OSS keeps all experts in one tensor, as [E, inputs, outputs], gates and what they gate in alternating columns.
ALL_EXPERTS = {
    "experts.router": "mlp.router.weight",
    "experts.router_bias": "mlp.router.bias",
    "experts.gate": "mlp.experts.gate_up_proj",
    "experts.up": "mlp.experts.gate_up_proj",
    "experts.gate_bias": "mlp.experts.gate_up_proj_bias",
    "experts.up_bias": "mlp.experts.gate_up_proj_bias",
    "experts.down": "mlp.experts.down_proj",
    "experts.down_bias": "mlp.experts.down_proj_bias",
}
COLUMNS = {"gate": 0, "up": 1, "gate_bias": 0, "up_bias": 1}
# Theirs are [all outputs, all inputs], and so are ours, but for these: how many of their leading axes are inputs.
INPUT_AXES = {"attention.out": 2, "experts.router": 1, "experts.gate": 1, "experts.up": 1, "experts.down": 1}


class Part(NamedTuple):
    """What of a tensor a parameter is: how the tensor's axes are counted, and the index of the part in it."""

    axes: tuple[int, ...]
    where: Any


class Slot(NamedTuple):
    """How a parameter is stored in a checkpoint: its name, its shape, whether it lies there transposed, and which part
    of it the parameter is; None: all."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    part: Part | None = None


def slots_of(path: tuple, shape: tuple[int, ...], config: DecoderConfig, num_stacked: int) -> list[Slot]:
    """Where the checkpoint keeps the parameter at `path` of a decoder, of `shape` there: one slot, or one for each of
    the layers, and of the experts, that it is stacked of. The first `num_stacked` layers are stacked."""
    first, *rest = path
    if first == "stacks":
        (place, *rest), (count, *shape_of_one) = rest, shape
        layers, shape = range(place, count * config.period, config.period), tuple(shape_of_one)
    elif first == "layers":
        place, *rest = rest
        layers = range(num_stacked + place, num_stacked + place + 1)
    else:
        return [Slot(WHOLE[first], shape, False)]
    key, table = ".".join(rest), PER_LAYER | (POST_NORMS if config.post_norms else {})
    if config.family == "gpt_oss" and key in ALL_EXPERTS and key != "experts.router":
        part = None
        if (column := COLUMNS.get(rest[-1])) is not None:
            shape = (*shape[:-1], 2 * shape[-1])
            part = Part(shape, np.s_[..., column::2])
        return [Slot(f"model.layers.{i}.{ALL_EXPERTS[key]}", shape, False, part) for i in layers]
    name = (ALL_EXPERTS if config.family == "gpt_oss" and key in ALL_EXPERTS else table)[key]
    if config.latent is not None and key in ("attention.key_up", "attention.value_up"):  # head by head in one tensor
        (heads, _, rank), nope_dim = shape, config.latent.nope_dim
        rows = nope_dim + config.latent.value_dim
        part = Part((heads, rows, rank), np.s_[:, :nope_dim] if key == "attention.key_up" else np.s_[:, nope_dim:])
        return [Slot(f"model.layers.{i}.{name}", (heads * rows, rank), False, part) for i in layers]
    names = [name.format(expert) for expert in range(shape[0])] if "{}" in name else [name]
    one = shape[1:] if "{}" in name else shape
    if inputs := INPUT_AXES.get(key, 0):
        theirs: tuple[int, ...] = math.prod(one[inputs:]), math.prod(one[:inputs])
    elif len(one) == 1 or key.endswith("bias"):
        theirs = (math.prod(one),)
    else:
        theirs = math.prod(one[:-1]), one[-1]
    return [Slot(f"model.layers.{i}.{name}", theirs, bool(inputs)) for i in layers for name in names]
