"""Records the parameters of models as their classes in transformers describe them by default, in defaults.json.

    VENV/bin/python tests/data/make_defaults.py    # without their numbers

For each `model_type`: the config that transformers writes, and the number of parameters. Made with transformers 5.24.0.
"""

import json
import pathlib

import newer_configs
import torch
import transformers

HERE = pathlib.Path(__file__).parent
# Of fields that a class has no default for, or one that means no layers of some kind.
GIVEN = {
    "dots1": dict(n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1),
    "hunyuan_v1_moe": dict(num_experts=64, moe_topk=8, intermediate_size=3072, head_dim=128),
    "lfm2_moe": dict(layer_types=["conv", "conv", "full_attention", "conv"] * 8),
    "bamba": dict(attn_layer_indices=[9, 18, 27]),
}


def describe(kind):
    config = type(newer_configs.FIXTURES[kind])(**GIVEN.get(kind, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    fields = {name: x for name, x in json.loads(config.to_json_string(use_diff=False)).items() if x is not None}
    count = sum(x.numel() for x in dict(model.named_parameters()).values())
    buffers = sum(x.numel() for name, x in model.named_buffers() if name.endswith(("bias", "tid2eid")))
    return {"config": fields, "parameters": count + buffers}


if __name__ == "__main__":
    found = {kind: describe(kind) for kind in sorted({x.model_type for x in newer_configs.FIXTURES.values()})}
    lines = ",\n".join(f" {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in found.items())
    (HERE / "defaults.json").write_text("{\n" + lines + "\n}\n")
