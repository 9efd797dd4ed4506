"""Gives the tensors of a GGUF file Hugging Face's names and layouts."""

import re
from collections.abc import Mapping
from typing import Any

from jaxkv._core.config.validation import show
from jaxkv._files.gguf import StoredTensor
from jaxkv.models.checkpoints.gguf_experts import EXPERTS
from jaxkv.models.checkpoints.gguf_layouts import Converted
from jaxkv.models.checkpoints.gguf_metadata import ROPE_FREQS, Architecture

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
BUFFERS = re.compile(rf"{re.escape(ROPE_FREQS)}|blk\.\d+\.attn_rot_embd\.weight")


def name_tensors(
    tensors: Mapping[str, StoredTensor], architecture: Architecture, fields: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Returns a file's tensors by Hugging Face's names; one that has none keeps its own, and is refused later.

    Args:
      fields: the config.json that `read_fields` returns.
      where: name of the file in errors.
    """
    names = PER_LAYER | dict(architecture.norms)
    heads = {"attn_q": fields["num_attention_heads"], "attn_k": fields["num_key_value_heads"]}
    found: dict[str, Any] = {}
    experts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if BUFFERS.fullmatch(name):
            continue
        layer = LAYER.fullmatch(name)
        key = layer[2] if layer else ""
        if layer and architecture.name_experts and key in EXPERTS:
            experts.setdefault(f"model.layers.{int(layer[1])}", {})[f"{key}.{layer[3]}"] = tensor
            continue
        own = f"{key}.{layer[3]}" if layer else ""
        if layer and (own in architecture.names or key in names):
            new = f"model.layers.{int(layer[1])}.{architecture.names.get(own) or f'{names[key]}.{layer[3]}'}"
        else:
            new = WHOLE.get(name, name)
        if new in found:
            raise ValueError(f"{where} has two tensors that are {show(new)}.")
        permuted = heads.get(key, 0) if architecture.permuted else 0
        if permuted and tensor.shape[0] % (2 * permuted):
            raise ValueError(f"{where} has {name} of shape {list(tensor.shape)}, which {permuted} heads cannot share.")
        found[new] = Converted(tensor, permuted, architecture.norm_offset if "norm" in name else 0.0)
    for stem, stored in experts.items():
        assert architecture.name_experts is not None
        found |= architecture.name_experts(stem, stored, where)
    return found
