"""Records what transformers makes of published config.json files, in published.json.

    VENV/bin/python tests/data/make_published.py FOLDER    # of config.json files, each under a name of its own, to add

For each: the config, and if transformers computes it, the number of parameters, what attention logits are multiplied
by, the windows of the layers, and for each rotary embedding its frequencies (every eighth) and its magnitude. Made with
transformers 5.24.0.
"""

import json
import pathlib
import sys

import torch
import transformers

SILENT = {"kimi_k2": "deepseek_v3"}  # types that only code beside the weights knows: what they are
HERE = pathlib.Path(__file__).parent


def describe_ropes(model, config):
    rotary = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    rotary = type(rotary)(config)
    kinds = sorted(
        name for name in dict(rotary.named_buffers()) if name.endswith("inv_freq") and "original" not in name
    )
    magnitudes = {name: getattr(rotary, name.replace("inv_freq", "attention_scaling")) for name in kinds}
    return [[[round(x, 12) for x in getattr(rotary, kind).tolist()[::8]], magnitudes[kind]] for kind in kinds]


def describe(fields):
    fields = fields | {"model_type": SILENT.get(fields["model_type"], fields["model_type"])}
    fields.pop("quantization_config", None)
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if k != "auto_map"})
    config = config.get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    attention = model.model.layers[0].self_attn
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    windows = [window if kind == "sliding_attention" else None for kind in kinds] if kinds else None
    return {
        "parameters": sum(x.numel() for x in model.parameters()), "scale": attention.scaling, "windows": windows,
        "ropes": describe_ropes(model, config),
    }  # fmt: skip


published = json.loads((HERE / "published.json").read_text())
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    fields = json.loads(path.read_text())
    drafts = path.stem.startswith("draft")
    published[path.stem] = {"config": fields, "expected": None if drafts else describe(fields)}
    print(path.stem, (published[path.stem]["expected"] or {}).get("parameters"), flush=True)
entries = sorted(published.items())
lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries]
(HERE / "published.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
