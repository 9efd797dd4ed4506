"""Experts of GGUF files: of a layer one tensor of gates, one of up and one of down projections, for all experts.

They are `[experts, outputs, inputs]`, and their biases `[experts, outputs]`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxkv._files.gguf import StoredTensor
from jaxkv.models.checkpoints.gguf_layouts import ByInputs, Converted

EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
MOST_EXPERTS = 2**16
# Returns a layer's tensors by Hugging Face's names, which begin with a stem; `where` names the file in errors.
NameExperts = Callable[[str, Mapping[str, StoredTensor], str], dict[str, Any]]


def name_each(stem: str, tensors: Mapping[str, StoredTensor], where: str) -> dict[str, Any]:
    """Names each expert's own tensors, as most families have them."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        key, _, kind = name.rpartition(".")
        _check_axes(tensor, name, kind, where)
        for i, part in enumerate(tensor.split()):
            found[f"{stem}.mlp.experts.{i}.{EXPERTS[key]}.{kind}"] = Converted(part)
    return found


def name_joined(stem: str, tensors: Mapping[str, StoredTensor], where: str) -> dict[str, Any]:
    """Names tensors of all experts, with gates and up projections in alternating columns, as GPT-OSS has them."""
    found: dict[str, Any] = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        stored = {key: tensors[f"{key}.{kind}"] for key in EXPERTS if f"{key}.{kind}" in tensors}
        for key, tensor in stored.items():
            _check_axes(tensor, f"{key}.{kind}", kind, where)
        pair = [stored[key] for key in ("ffn_gate_exps", "ffn_up_exps") if key in stored]
        if len(pair) == 2 and pair[0].shape == pair[1].shape:
            found[f"{stem}.mlp.experts.gate_up_proj{suffix}"] = ByInputs(tuple(pair))
        if "ffn_down_exps" in stored:
            found[f"{stem}.mlp.experts.down_proj{suffix}"] = ByInputs((stored["ffn_down_exps"],))
    return found


def _check_axes(tensor: StoredTensor, name: str, kind: str, where: str) -> None:
    """Raises ValueError for a tensor that no experts share."""
    axes = "[experts, outputs]" if kind == "bias" else "[experts, outputs, inputs]"
    if len(tensor.shape) != axes.count(",") + 1 or not 0 < tensor.shape[0] <= MOST_EXPERTS:
        raise ValueError(f"{where} has {name} of shape {list(tensor.shape)}, which is not {axes}.")
