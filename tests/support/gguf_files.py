"""Writes tiny GGUF files, by the gguf package's own writer, from the tiny Hugging Face checkpoints."""

import json
import re

import gguf
import numpy as np
from support import fixtures

from jaxkv._files import safetensors
from jaxkv.models.checkpoints.folder import read_published, weight_files

SHARED = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm", "pre_feedforward_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
    **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
}  # fmt: skip
ARCHITECTURES = {
    "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl", "qwen3_vl_moe_text": "qwen3vlmoe",
}  # fmt: skip
PERMUTED = ("llama", "arcee", "granite", "smollm3")
BEHIND = ("gemma2", "gemma3", "olmo2", "seed_oss", "gpt-oss")  # whose post_attention_layernorm is called so


def write(path, name, *, metadata=None, tensors=None, split=0, quantize=None):
    """Writes the fixture `name` as a GGUF file.

    Args:
      metadata: more entries, or others, by name: `(writer's method, value)`; a method of None leaves the entry out.
      tensors: more tensors by their names in GGUF; None takes one away.
      split: the most tensors of a file; 0: one file.
      quantize: the format of matrices whose rows have whole groups.
    """
    config = json.loads((fixtures.DATA / name / "config.json").read_text())
    config = config.get("text_config", config) | {"tie_word_embeddings": config["tie_word_embeddings"]}
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    entries = entries_of(config, architecture) | (metadata or {})
    for key, (method, value) in entries.items():
        if method is not None:
            getattr(writer, f"add_{method}")(key, value)
    for key, x in (named_tensors(name, config, architecture) | (tensors or {})).items():
        if x is None:
            continue
        if quantize is not None and x.ndim == 2 and x.shape[1] % gguf.GGML_QUANT_SIZES[quantize][0] == 0:
            writer.add_tensor(key, gguf.quants.quantize(x, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(key, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def entries_of(config, architecture):
    a, rope = architecture, config["rope_parameters"]
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    entries = {
        f"{a}.context_length": ("uint32", config["max_position_embeddings"]),
        f"{a}.block_count": ("uint32", config["num_hidden_layers"]),
        f"{a}.embedding_length": ("uint32", config["hidden_size"]),
        f"{a}.feed_forward_length": ("uint32", config["intermediate_size"]),
        f"{a}.attention.head_count": ("uint32", config["num_attention_heads"]),
        f"{a}.attention.head_count_kv": ("array", [config["num_key_value_heads"]] * config["num_hidden_layers"]),
        f"{a}.attention.layer_norm_rms_epsilon": ("float32", config["rms_norm_eps"]),
        f"{a}.rope.freq_base": ("float32", full["rope_theta"]),
        "tokenizer.ggml.bos_token_id": ("uint32", 1),
    }
    if "head_dim" in config:
        entries[f"{a}.attention.key_length"] = entries[f"{a}.attention.value_length"] = ("uint32", config["head_dim"])
    if full["rope_type"] == "linear":
        entries[f"{a}.rope.scaling.type"] = ("string", "linear")
        entries[f"{a}.rope.scaling.factor"] = ("float32", full["factor"])
    if "expert" in " ".join(config):
        entries |= {
            f"{a}.expert_count": ("uint32", config.get("num_experts") or config["num_local_experts"]),
            f"{a}.expert_used_count": ("uint32", config["num_experts_per_tok"]),
            f"{a}.expert_feed_forward_length": (
                "uint32",
                config.get("moe_intermediate_size") or config["intermediate_size"],
            ),
        }
    if full["rope_type"] == "yarn":
        entries |= {
            f"{a}.rope.scaling.type": ("string", "yarn"),
            f"{a}.rope.scaling.factor": ("float32", full["factor"]),
            f"{a}.rope.scaling.original_context_length": ("uint32", full["original_max_position_embeddings"]),
            f"{a}.rope.scaling.yarn_beta_fast": ("float32", full["beta_fast"]),
            f"{a}.rope.scaling.yarn_beta_slow": ("float32", full["beta_slow"]),
        }
    if architecture == "gpt-oss":
        entries[f"{a}.attention.sliding_window"] = ("uint32", config["sliding_window"])
    if architecture.startswith(("qwen2vl", "qwen3vl")):
        entries[f"{a}.rope.dimension_sections"] = ("array", [*rope["mrope_section"], 0])
    if architecture.startswith("qwen3vl"):
        entries[f"{a}.n_deepstack_layers"] = ("uint32", 3)
    if architecture == "granite":
        entries |= {
            f"{a}.attention.scale": ("float32", config["attention_multiplier"]),
            f"{a}.embedding_scale": ("float32", config["embedding_multiplier"]),
            f"{a}.residual_scale": ("float32", config["residual_multiplier"]),
            f"{a}.logit_scale": ("float32", config["logits_scaling"]),
        }
    if architecture in ("gemma2", "gemma3"):
        entries[f"{a}.attention.sliding_window"] = ("uint32", config["sliding_window"])
        entries[f"{a}.attention.scale"] = ("float32", config["query_pre_attn_scalar"] ** -0.5)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config[key] is not None:
                entries[f"{a}.{key}"] = ("float32", config[key])
    if local is not None:
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        entries[f"{a}.attention.sliding_window_pattern"] = ("array", kinds)
        entries[f"{a}.rope.freq_base_swa"] = ("float32", local["rope_theta"])
    return entries


def named_tensors(name, config, architecture):
    """The tensors as llama.cpp's converter writes them."""
    found = {}
    names = SHARED | {"post_attention_layernorm": "post_attention_norm" if architecture in BEHIND else "ffn_norm"}
    for old, x in join_experts(name, read_text_model(name)).items():
        layer, stem, suffix = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", old).groups()
        new = f"{names[stem]}.{suffix}" if layer is None else f"blk.{layer}.{names[stem]}.{suffix}"
        if architecture in PERMUTED and ("attn_q" in new or "attn_k" in new):
            heads = config["num_attention_heads" if "attn_q" in new else "num_key_value_heads"]
            x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        found[new] = x + np.float32(1) if "gemma" in architecture and "norm" in new else x
    if config["rope_parameters"].get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(config["rope_parameters"], config["head_dim"])
    return found


def read_text_model(name):
    config = json.loads((fixtures.DATA / name / "config.json").read_text())
    files = [safetensors.read(file) for file in weight_files(fixtures.DATA / name)]
    stored = {key: x for file in files for key, x in file.items() if "visual" not in key}
    if "quantization_config" in config:
        stored = read_published(stored, config, "config.json")
    return {key.replace("model.language_model.", "model."): np.array(x) for key, x in stored.items()}


def join_experts(name, tensors):
    """Those of a layer in one tensor of gates, one of up and one of down projections."""
    experts, found = {}, {}
    for key, x in tensors.items():
        if alone := re.fullmatch(r"(.+\.experts)\.\d+\.(.+)", key):
            experts.setdefault(f"{alone[1]}.{alone[2]}", []).append(x)
        elif "experts.gate_up_proj" in key and name == "gpt_oss":
            kind = "bias" if key.endswith("_bias") else "weight"
            for i, half in enumerate(("gate", "up")):
                own = key.replace("gate_up_proj", f"{half}_proj").removesuffix("_bias")
                found[f"{own}.{kind}"] = np.ascontiguousarray(np.moveaxis(x[..., i::2], 1, -1))
        elif "experts.down_proj" in key and name == "gpt_oss":
            kind = "bias" if key.endswith("_bias") else "weight"
            found[f"{key.removesuffix('_bias')}.{kind}"] = np.ascontiguousarray(np.moveaxis(x, 1, -1))
        elif key.endswith("self_attn.sinks"):
            found[f"{key}.weight"] = x
        elif key.endswith("experts.gate_up_proj"):
            for half, part in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True):
                found[key.replace("gate_up_proj", f"{half}_proj.weight")] = part
        else:
            found[f"{key}.weight" if key.endswith("experts.down_proj") else key] = x
    return found | {key: np.stack(parts) for key, parts in experts.items()}


def llama3_factors(rope, width):
    """By what the converter divides frequencies: Meta's own formula."""
    original = rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    factors = []
    for i in range(0, width, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (i / width)
        smooth = (original / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1 if length < high else rope["factor"] if length > low else between)
    return np.array(factors, np.float32)
