"""Gives the tensors of a GGUF file Hugging Face's names and layouts."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv._core.config.validation import show
from jaxkv._files.gguf import StoredTensor
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
ROUTER = {"ffn_gate_inp": "mlp.gate"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
MOST_EXPERTS = 2**16
LAYER = re.compile(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
BUFFERS = re.compile(rf"{re.escape(ROPE_FREQS)}|blk\.\d+\.attn_rot_embd\.weight")


@dataclasses.dataclass(frozen=True)
class Converted:
    """A tensor that is dequantized, and laid out as a Hugging Face checkpoint has it, when it is read.

    Fields:
      heads: the number of heads whose entries RoPE pairs in another order; 0: they stay.
      offset: what is subtracted.
    """

    stored: StoredTensor
    heads: int = 0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        dtype = np.dtype(dtype or self.dtype)
        if self.offset:
            return (self.stored.read(np.dtype(np.float32)) - np.float32(self.offset)).astype(dtype)
        x = self.stored.read(dtype)
        if self.heads:  # pairs (2 i, 2 i + 1) become (i, i + D/2)
            x = np.swapaxes(x.reshape(self.heads, -1, 2, *x.shape[1:]), 1, 2).reshape(x.shape)
        return x


def name_tensors(
    tensors: Mapping[str, StoredTensor], architecture: Architecture, fields: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Returns a file's tensors by Hugging Face's names; one that has none keeps its own, and is refused later.

    Args:
      fields: the config.json that `read_fields` returns.
      where: name of the file in errors.
    """
    names = PER_LAYER | dict(architecture.norms) | (ROUTER if architecture.has_experts else {})
    heads = {"attn_q": fields["num_attention_heads"], "attn_k": fields["num_key_value_heads"]}
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if BUFFERS.fullmatch(name):
            continue
        layer = LAYER.fullmatch(name)
        key = layer[2] if layer else ""
        if layer and architecture.has_experts and key in EXPERTS:
            stem = f"model.layers.{int(layer[1])}.mlp.experts"
            parts = _split_experts(tensor, name, where)
            found |= {f"{stem}.{i}.{EXPERTS[key]}.{layer[3]}": Converted(x) for i, x in enumerate(parts)}
            continue
        new = (
            f"model.layers.{int(layer[1])}.{names[key]}.{layer[3]}" if layer and key in names else WHOLE.get(name, name)
        )
        if new in found:
            raise ValueError(f"{where} has two tensors that are {show(new)}.")
        permuted = heads.get(key, 0) if architecture.permuted else 0
        if permuted and tensor.shape[0] % (2 * permuted):
            raise ValueError(f"{where} has {name} of shape {list(tensor.shape)}, which {permuted} heads cannot share.")
        found[new] = Converted(tensor, permuted, architecture.norm_offset if "norm" in name else 0.0)
    return found


def _split_experts(tensor: StoredTensor, name: str, where: str) -> list[StoredTensor]:
    """Returns the tensors of each expert. Raises ValueError for what no experts share."""
    if len(tensor.shape) != 3 or not 0 < tensor.shape[0] <= MOST_EXPERTS:
        raise ValueError(f"{where} has {name} of shape {list(tensor.shape)}, which is not [experts, outputs, inputs].")
    return tensor.split()
