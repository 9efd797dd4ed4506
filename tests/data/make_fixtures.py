"""Makes the tiny random checkpoints in this folder, with what transformers computes from them.

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers    # a CPU build is enough
    VENV/bin/python tests/data/make_fixtures.py [NAME ...]

Every parameter is random, norms and biases too, so that a term that is missing shows. (Those with experts, and
gemma3_nested, were made with torch 2.15.0; mixtral, qwen2_yarn and those after it with 2.14.1.)
"""

import json
import math
import pathlib
import re
import sys

import newer_configs
import numpy as np
import safetensors.torch
import torch
import transformers
from fixture_configs import FIXTURES, LLAMA3_SCALING, NESTED, VOCAB, YARN
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent
NEW_TOKENS = 10
PROMPT_LENGTHS = (1, 5, 12, 23, 8)
# Their seeds are their places here, but for those that would make two tokens as likely.
ORDER = ["gemma2", "gemma3", "llama", "llama3", "llama_linear", "mistral", "qwen2", "qwen3", "deepseek_v2",
         "deepseek_v3", "gpt_oss", "qwen3_moe", "gemma3_nested", "mixtral", "qwen2_yarn", "smollm3", "olmo2",
         "olmo3", "granite", "seed_oss", "qwen2_moe", "phi3", "exaone4", "glm4", "ernie4_5",
         "hunyuan_v1_dense", "glm4_moe", "minimax_m2", "ministral3", "qwen3_next", "llama4", "gemma4",
         "gemma4_experts", "gemma3n", "mistral4", "deepseek_v32", "glm_moe_dsa"]  # fmt: skip
SEEDS = {name: i for i, name in enumerate(ORDER)} | {"glm4": 101}
HYBRID = [
    "lfm2",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "kimi_linear",
    "nemotron_h",
    "falcon_h1",
]
SEEDS |= {name: 200 + i for i, name in enumerate(HYBRID)}
WRAPPERS = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "kimi_k25", "llava", "smolvlm"]
SEEDS |= {name: 300 + i for i, name in enumerate(WRAPPERS)} | {"qwen3_vl": 311, "llava": 315}
FLAT = "qwen2_5_vl"  # whose text model's fields were in the outer config before
SEEDS |= {name: 400 + i for i, name in enumerate(newer_configs.FIXTURES)} | {"youtu": 501, "bamba": 502}
FIXTURES |= newer_configs.FIXTURES
OLD_YARN = {name: value for name, value in YARN.items() if name not in ("rope_type", "rope_theta")}
FP8_BLOCK = 16  # DeepSeek publishes blocks of 128
SHARDED = "qwen3"
# The same checkpoints as transformers before version 5 described them: fields left out, fields put in.
OLD_FORMS = {
    "llama": (
        ["rope_parameters", "dtype"],
        dict(rope_theta=10_000.0, rope_scaling=None, torch_dtype="float32", pretraining_tp=1),
    ),
    "llama3": (["rope_parameters"], dict(rope_theta=500.0, rope_scaling=dict(rope_type="llama3", **LLAMA3_SCALING))),
    "llama_linear": (["rope_parameters"], dict(rope_theta=1000.0, rope_scaling=dict(type="linear", factor=2.0))),
    "mistral": (["rope_parameters"], dict(rope_theta=10_000.0)),
    "qwen2": (["rope_parameters", "layer_types"], dict(rope_theta=10_000.0)),
    "qwen3": (["rope_parameters", "layer_types"], dict(rope_theta=10_000.0, rope_scaling=None)),
    "gemma2": (
        ["rope_parameters", "layer_types"],
        dict(rope_theta=10_000.0, hidden_act="gelu_pytorch_tanh", cache_implementation="hybrid"),
    ),
    "gemma3": (
        ["rope_parameters", "layer_types", "_sliding_window_pattern"],
        dict(rope_theta=5000.0, rope_local_base_freq=100.0, rope_scaling=dict(rope_type="linear", factor=4.0),
             sliding_window_pattern=2),
    ),
    "deepseek_v2": (
        ["rope_parameters", "head_dim", "qk_head_dim", "mlp_bias"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(type="yarn", mscale=0.707, mscale_all_dim=0.707),
             aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1, scoring_func="softmax", seq_aux=True),
    ),
    "deepseek_v3": (
        ["rope_parameters", "head_dim", "qk_head_dim", "rope_interleave"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(type="yarn", mscale=1.5, mscale_all_dim=0.8),
             aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc",
             seq_aux=True, auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}),
    ),
    "deepseek_v32": (
        ["rope_parameters", "head_dim", "qk_head_dim", "layer_types", "mlp_layer_types", "mlp_bias"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(type="yarn", mscale=1.5, mscale_all_dim=0.8),
             ep_size=1, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1),
    ),
    "glm_moe_dsa": (
        ["head_dim", "layer_types", "mlp_layer_types", "mlp_bias", "indexer_types"],
        dict(index_topk_freq=2, index_skip_topk_offset=1, indexer_rope_interleave=True, ep_size=1, moe_layer_freq=1,
             scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1),
    ),
    "gpt_oss": (
        ["rope_parameters", "layer_types", "num_local_experts", "swiglu_alpha"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(rope_type="yarn", truncate=False), num_experts=5,
             experts_per_token=2, initial_context_length=16),
    ),
    "qwen3_moe": (
        ["rope_parameters", "num_experts", "num_local_experts"],
        dict(rope_theta=500.0, rope_scaling=None, num_local_experts=6, max_window_layers=2),
    ),
    "mixtral": (["rope_parameters"], dict(rope_theta=1_000_000.0, router_aux_loss_coef=0.02)),
    "qwen2_yarn": (
        ["rope_parameters", "layer_types"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(type="yarn", attention_factor=1.25)),
    ),
    "gemma3_nested": ([], {}),
    "gemma3n": (
        ["rope_parameters"],
        dict(rope_theta=5000.0, rope_local_base_freq=100.0, rope_scaling=dict(rope_type="linear", factor=4.0)),
    ),
    "mistral4": (
        ["rope_parameters", "head_dim", "qk_head_dim"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(
            type="yarn", mscale=1.5, mscale_all_dim=0.8, original_max_position_embeddings=8, llama_4_scaling_beta=0.5,
        )),
    ),
    "gemma4": (["per_layer_config"], dict(global_head_dim=24, num_global_key_value_heads=None)),
    "gemma4_experts": (["per_layer_config"], dict(global_head_dim=24, num_global_key_value_heads=1)),
    "llama4": (
        ["rope_parameters", "layer_types", "moe_layers"],
        dict(rope_theta=500.0, rope_scaling=dict(rope_type="llama3", **LLAMA3_SCALING), no_rope_layers=[],
             attn_temperature_tuning=4, for_llm_compressor=False),
    ),
    "smollm3": (["rope_parameters"], dict(rope_theta=2_000_000.0, rope_scaling=None, max_window_layers=28)),
    "olmo2": (["rope_parameters"], dict(rope_theta=500.0, rope_scaling=None)),
    "olmo3": (
        ["rope_parameters"], dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(type="yarn", attention_factor=1.25)),
    ),
    "granite": (["rope_parameters"], dict(rope_theta=10_000.0, rope_scaling=None)),
    "seed_oss": (["rope_parameters"], dict(rope_theta=10_000.0, rope_scaling=dict(rope_type="default"))),
    "ministral3": (
        ["rope_parameters"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(
            type="yarn", original_max_position_embeddings=8, llama_4_scaling_beta=0.5,
        )),
    ),
    "phi3": (
        ["rope_parameters"],
        dict(rope_theta=500.0, partial_rotary_factor=0.75, resid_pdrop=0.0, embd_pdrop=0.0,
             rope_scaling=dict(type="su", attention_factor=1.2, long_factor=[1.5, 2.0, 3.0],
                               short_factor=[1.0, 1.1, 1.2])),
    ),
    "exaone4": (
        ["rope_parameters", "layer_types"],
        dict(rope_theta=500.0, rope_scaling=dict(rope_type="llama3", **LLAMA3_SCALING)),
    ),
    "glm4": (["rope_parameters"], dict(rope_theta=10_000.0, partial_rotary_factor=0.5)),
    "ernie4_5": (["rope_parameters"], dict(rope_theta=500_000.0, rope_scaling=None)),
    "hunyuan_v1_dense": (
        ["rope_parameters"],
        dict(rope_theta=100.0, use_qk_norm=True, use_cla=False, attention_head_dim=16, norm_type="rms",
             rope_scaling=dict(type="dynamic", alpha=20.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0,
                               mscale_all_dim=1.0)),
    ),
    "glm4_moe": (["rope_parameters"], dict(rope_theta=10_000.0, partial_rotary_factor=0.5)),
    "minimax_m2": (
        ["rope_parameters"],
        dict(rope_theta=5_000_000.0, rotary_dim=8, attn_type_list=[1, 1], qk_norm_type="per_layer", use_qk_norm=True,
             scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0, num_mtp_modules=3,
             mtp_transformer_layers=1, use_mtp=True, layernorm_mlp_beta=1.0),
    ),
    "qwen3_next": (
        ["rope_parameters", "layer_types"], dict(rope_theta=10_000.0, partial_rotary_factor=0.25, rope_scaling=None,
                                                 layer_types=None, full_attention_interval=2),
    ),
    "lfm2": (
        ["rope_parameters", "layer_types", "intermediate_size", "tie_word_embeddings"],
        dict(rope_theta=1_000_000.0, full_attn_idxs=[1], block_ff_dim=40, block_dim=32, conv_dim=32, num_heads=4,
             block_norm_eps=1e-5, block_use_swiglu=True, use_pos_enc=True, block_ffn_dim_multiplier=1.0),
    ),
    "granitemoehybrid": (
        ["rope_parameters", "layer_types", "mamba_d_head", "position_embedding_type", "time_step_limit"],
        dict(rope_theta=10_000.0, rope_scaling=None, layer_types=["mamba", "attention", "mamba"],
             position_embedding_type="nope", normalization_function="rmsnorm", init_method="mup"),
    ),
    "granitemoehybrid_dense": (
        ["rope_parameters", "layer_types"], dict(rope_theta=10_000.0, layer_types=["mamba", "attention"]),
    ),
    "qwen3_5": ([], {}),
    "nemotron_h": (
        ["layers_block_type", "n_groups", "conv_kernel", "use_conv_bias", "time_step_limit"],
        dict(hybrid_override_pattern="ME*-M", num_hidden_layers=5, mamba_n_groups=2, mamba_d_conv=4,
             mamba_conv_bias=True, rope_theta=10_000.0, partial_rotary_factor=1.0, mtp_hybrid_override_pattern="*E"),
    ),
    "falcon_h1": (
        ["rope_parameters", "mamba_d_head", "time_step_limit"],
        dict(rope_theta=500.0, rope_scaling=None, mamba_d_head="auto", attn_layer_indices=None, mamba_use_mlp=True),
    ),
    "kimi_linear": (
        ["layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim",
         "qk_head_dim"],
        dict(linear_attn_config=dict(full_attn_layers=[2], kda_layers=[1, 3], head_dim=8, num_heads=3,
                                     short_conv_kernel_size=4),
             first_k_dense_replace=1, mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1,
             rope_theta=10_000.0, rope_scaling=None, use_grouped_topk=True, head_dim=72, num_nextn_predict_layers=0),
    ),
    "olmo_hybrid": (["rope_parameters"], dict(rope_theta=None, rope_scaling=None)),
    "qwen3_5_moe": (
        ["layer_types"],
        dict(full_attention_interval=2, attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1,
             rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.25,
                                  mrope_section=[1, 1, 0], mrope_interleaved=True)),
    ),
    "qwen2_moe": (["rope_parameters", "layer_types"], dict(rope_theta=10_000.0, max_window_layers=21)),
    "qwen2_5_vl": (
        ["rope_parameters", "layer_types", "model_type"],
        dict(rope_theta=500.0, rope_scaling=dict(type="mrope", mrope_section=[1, 2, 1])),
    ),
    "qwen3_vl": (
        ["rope_parameters"],
        dict(rope_theta=500.0,
             rope_scaling=dict(rope_type="default", mrope_section=[2, 3, 3], mrope_interleaved=True)),
    ),
    "qwen3_vl_moe": (
        ["rope_parameters"],
        dict(rope_theta=500.0, decoder_sparse_step=1, norm_topk_prob=True,
             rope_scaling=dict(rope_type="default", mrope_section=[2, 3, 3], mrope_interleaved=True)),
    ),
    "glm4v": (
        ["rope_parameters"],
        dict(rope_theta=500.0, partial_rotary_factor=0.5, attention_bias=True,
             rope_scaling=dict(rope_type="default", mrope_section=[1, 1, 0])),
    ),
    "glm4v_moe": (
        ["rope_parameters"],
        dict(rope_theta=500.0, partial_rotary_factor=0.5, use_qk_norm=False, image_token_id=0,
             rope_scaling=dict(rope_type="default", mrope_section=[1, 2, 1])),
    ),
    "kimi_k25": (
        ["rope_parameters", "head_dim", "qk_head_dim", "rope_interleave"],
        dict(model_type="kimi_k2", rope_theta=500.0, rope_scaling=OLD_YARN | dict(type="yarn", mscale=1.5),
             aux_loss_alpha=0.001, ep_size=1, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc"),
    ),
    "llava": (["rope_parameters"], dict(rope_theta=10_000.0)),
    "smolvlm": (
        ["rope_parameters"],
        dict(rope_theta=10_000.0, pixel_shuffle_factor=4),
    ),
}  # fmt: skip
OLD_FORMS |= newer_configs.OLD_FORMS


def to_mxfp4(random: np.random.Generator, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Random experts `[E, in, out]` as GPT-OSS publishes them: what they are, and blocks and scales."""
    experts, inputs, outputs = weight.shape
    blocks = torch.tensor(random.integers(0, 256, (experts, outputs, inputs // 32, 16)), dtype=torch.uint8)
    # The sixteen values have a standard deviation of 2.9.
    power = round(math.log2(1.3 * inputs**-0.5 / 2.9))
    scales = torch.tensor(127 + power + random.integers(-1, 2, blocks.shape[:-1]), dtype=torch.uint8)
    plain = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return plain, {"blocks": blocks, "scales": scales}


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A matrix as DeepSeek V3 publishes it: what it then is, and float8 numbers with a scale for each block."""
    rows, columns = (-(-n // FP8_BLOCK) for n in weight.shape)
    scales = torch.empty(rows, columns)
    stored, plain = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            block = (slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK))
            scales[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            plain[block] = stored[block].float() * scales[i, j]
    return plain, {"weight": stored, "weight_scale_inv": scales}


def publish(name: str, model: transformers.PreTrainedModel, folder: pathlib.Path) -> None:
    """The checkpoint as it is published where that is not how transformers writes it. The model's weights follow."""
    path = folder / "model.safetensors"
    random = np.random.default_rng(ORDER.index(name))
    tensors = safetensors.torch.load_file(path)
    plain = dict(tensors)
    if name == "gpt_oss":
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
        for key in [key for key in tensors if key.endswith("up_proj") or key.endswith("down_proj")]:
            plain[key], parts = to_mxfp4(random, tensors.pop(key))
            tensors |= {f"{key}_{part}": x for part, x in parts.items()}
    else:
        quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                        "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}  # fmt: skip
        for key in [key for key in tensors if key.endswith("_proj.weight") or "kv_a_proj_with_mqa" in key]:
            plain[key], parts = to_fp8(tensors.pop(key))
            tensors |= {f"{key.removesuffix('.weight')}.{part}": x for part, x in parts.items()}
        extra = {"eh_proj.weight": (32, 64), "enorm.weight": (32,), "shared_head.head.weight": (VOCAB, 32)}
        tensors |= {f"model.layers.3.{key}": torch.randn(shape) for key, shape in extra.items()}
    safetensors.torch.save_file(plain, path, {"format": "pt"})
    again = type(model).from_pretrained(folder)
    model.load_state_dict(again.state_dict())
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def make(name: str, config: transformers.PreTrainedConfig) -> None:
    seed = SEEDS[name]
    torch.manual_seed(seed)
    config._attn_implementation = "eager"  # the others leave the soft cap out
    model = (NESTED.get(name) or transformers.AutoModelForCausalLM.from_config)(config).eval()
    kept = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    biases = [(name, x) for name, x in model.named_buffers() if name.endswith(kept)]
    for parameter_name, parameter in [*model.named_parameters(), *biases]:
        is_norm = "norm" in parameter_name or parameter_name.endswith(("scale", "layer_scalar"))
        inputs = parameter.shape[1 if parameter.ndim == 3 and name in ("gpt_oss", "llama4") else -1]
        small = is_norm or parameter.ndim == 1 or parameter_name.endswith("bias")
        spread = 0.4 if small else 1.3 * inputs**-0.5
        around_zero = config.model_type in ("gemma", "gemma2", "gemma3", "gemma3_text") or (
            config.model_type.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in parameter_name
        )
        center = 1.0 if is_norm and not around_zero else 0.0
        torch.nn.init.normal_(parameter, mean=center, std=spread)
    for table in [x for key, x in model.named_buffers() if key.endswith("tid2eid")]:  # different experts of each token
        table.copy_(torch.rand(VOCAB, config.n_routed_experts).argsort(dim=-1)[:, : config.num_experts_per_tok])
    folder = HERE / name
    model.save_pretrained(folder, max_shard_size="30KB" if name == SHARDED else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name in ("deepseek_v3", "gpt_oss"):
        publish(name, model, folder)
    if name == "kimi_k25":  # transformers writes its text model's layers as blocks, as are those of its tower
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        tensors = {re.sub(r"(language_model\.model)\.blocks", r"\1.layers", key): x for key, x in tensors.items()}
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    random = np.random.default_rng(seed)
    prompts = [random.integers(2, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
    expected = {}
    model = model.language_model if name == "llama4" else model  # without an image, its outer class fails
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            tokens = list(prompt)
            for _ in range(NEW_TOKENS):  # without a cache: nothing to share a mistake with
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
                tokens.append(int(logits[-1].argmax()))
            top = logits.topk(2).values  # a near tie would make "the same token" a matter of rounding
            assert float((top[:, 0] - top[:, 1])[len(prompt) - 1 :].min()) > 1e-3, (name, i)
            expected[f"prompt_{i}"] = np.array(prompt, np.int32)
            expected[f"tokens_{i}"] = np.array(tokens[len(prompt) :], np.int32)
            expected[f"logits_{i}"] = logits.numpy()  # of all tokens but the last
    np.savez_compressed(folder / "expected.npz", **expected)

    left_out, put_in = OLD_FORMS[name]
    fields = json.loads((folder / "config.json").read_text())
    inner = fields.get("text_config", fields)
    old = {key: value for key, value in inner.items() if key not in left_out} | put_in
    if name == FLAT:
        old = {key: value for key, value in fields.items() if key != "text_config"} | old
    elif "text_config" in fields:
        old = fields | {"text_config": old}
    (folder / "config_old.json").write_text(json.dumps(old, indent=2) + "\n")


if __name__ == "__main__":
    for fixture in sys.argv[1:] or FIXTURES:
        make(fixture, FIXTURES[fixture])
