"""Records what transformers makes of configs of published hybrid models, in hybrid.json.

    VENV/bin/python tests/data/make_hybrid.py FOLDER    # of config.json files, each under a name of its own

For each: the config, the number of parameters, and the bytes of a row's states in bfloat16 with states in float32, as
the modules of transformers say their sizes. Made with transformers 5.24.0.
"""

import json
import pathlib
import sys

import torch
import transformers

HERE = pathlib.Path(__file__).parent


def state_bytes(module):
    """Bytes of a row in a recurrent layer; None for other modules."""
    kind = type(module).__name__
    if kind == "Lfm2ShortConv":
        return 2 * module.conv.in_channels * (module.conv_kernel_size - 1)
    if kind.endswith(("GatedDeltaNet", "DeltaAttention")):
        conv, heads = module.conv1d, getattr(module, "num_v_heads", None)
        state = heads * module.head_k_dim * module.head_v_dim if heads else module.num_heads * module.head_dim**2
    elif kind.endswith(("MambaLayer", "Mamba2Mixer", "H1Mixer")):
        conv, state = module.conv1d, module.num_heads * module.head_dim * module.ssm_state_size
    else:
        return None
    return 2 * conv.in_channels * (conv.kernel_size[0] - 1) + 4 * state


def describe(fields):
    fields = dict(fields)
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if k != "auto_map"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config.get_text_config())
    row = [size for module in model.modules() if (size := state_bytes(module)) is not None]
    return {"parameters": sum(x.numel() for x in model.parameters()), "layers": len(row), "row_bytes": sum(row)}


lines = []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    entry = {"config": (fields := json.loads(path.read_text())), "expected": describe(fields)}
    lines.append(f"{json.dumps(path.stem)}: {json.dumps(entry, separators=(',', ':'))}")
    print(path.stem, entry["expected"], flush=True)
(HERE / "hybrid.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
