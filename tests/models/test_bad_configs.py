"""A config.json that makes no sense is refused in one sentence that names the file and the field, before it is used."""

import json
import pathlib
import time

import pytest

import jaxkv
from jaxkv.models import config_reader

VALUES = [None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**9, 2**40, 10**30, "", "yes", [], [1], {}, {"a": 1}]
COMMON = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2], "rope_theta": 1e4,
}  # fmt: skip
LOCAL = ["sliding_attention", "full_attention"]
OWN = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": 16},
    "qwen2": {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"sliding_window": 16, "use_sliding_window": True, "attention_bias": False},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0,
               "attn_logit_softcapping": 50.0, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4},
    "deepseek_v3": {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                    "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
                    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_interleave": True,
                    "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "swiglu_alpha": 1.7},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "granite": {"attention_multiplier": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                "logits_scaling": 3.0},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": True, "sliding_window": 16},
    "glm4_moe": {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
                 "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "llama4_text": {"intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": True,
                    "interleave_moe_layer_step": 2, "moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0],
                    "attention_chunk_size": 16, "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8,
                    "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
    "gemma4_text": {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                    "sliding_window": 16, "num_kv_shared_layers": 0, "use_double_wide_mlp": True,
                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "enable_moe_block": True,
                    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "attention_bias": False,
                    "final_logit_softcapping": 30.0, "layer_types": LOCAL * 2},
    "gemma3n_text": {"sliding_window": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                     "laurel_rank": 4, "vocab_size_per_layer_input": 256, "altup_num_inputs": 3, "altup_active_idx": 1,
                     "altup_correct_scale": True, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                     "final_logit_softcapping": 30.0, "rope_local_base_freq": 1e4, "layer_types": LOCAL * 2},
    "mistral4": {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                 "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                 "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_interleave": True},
}  # fmt: skip
SIGMOIDS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
          "rope_interleave": True}  # fmt: skip
SPARSE = ["dense", "sparse", "sparse", "sparse"]
OWN |= {
    "ernie4_5_moe": {"moe_intermediate_size": 16, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1,
                     "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2,
                     "moe_norm_min": 1e-12, "use_bias": False},
    "glm4_moe_lite": LATENT | SIGMOIDS | {"n_routed_experts": 8, "n_shared_experts": 1, "mlp_layer_types": SPARSE},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": False},
    "gemma": {"attention_bias": False, "hidden_act": "gelu"},
    "dots1": SIGMOIDS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
                         "sliding_window": 16, "max_window_layers": 2, "attention_bias": False},
    "exaone_moe": SIGMOIDS | {"num_experts": 8, "num_shared_experts": 1, "mlp_layer_types": SPARSE,
                              "sliding_window": 16, "sliding_window_pattern": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2] * 4, "attention_bias": False},
    "solar_open": SIGMOIDS | {"n_routed_experts": 8, "n_shared_experts": 1, "attention_bias": False},
    "hy_v3": {"num_experts": 8, "num_shared_experts": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
              "router_scaling_factor": 2.5, "mlp_layer_types": SPARSE, "attention_bias": False},
    "youtu": LATENT | {"attention_bias": False},
    "granitemoe": OWN["granite"] | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "arcee": {"attention_bias": False, "mlp_bias": False, "hidden_act": "relu2"},
    "mellum": {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True,
               "mlp_layer_types": SPARSE, "layer_types": LOCAL * 2, "sliding_window": 16, "attention_bias": False},
    "axk1": LATENT | SIGMOIDS | {"n_routed_experts": 8, "n_shared_experts": 1, "mlp_layer_types": SPARSE},
    "mimo_v2_flash": {name: value for name, value in SIGMOIDS.items() if name != "routed_scaling_factor"} | {
        "n_routed_experts": 8, "v_head_dim": 8, "sliding_window": 16, "layer_types": LOCAL * 2,
        "mlp_layer_types": SPARSE, "attention_value_scale": 0.5, "attention_bias": False,
    },  # whose scale may be null
    "kolibri1": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
                 "shared_expert_intermediate_size": 16, "sliding_window": 16},
    "laguna": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": 16,
               "shared_expert_intermediate_size": 16, "layer_types": LOCAL * 2, "mlp_layer_types": SPARSE,
               "num_attention_heads_per_layer": [4, 2, 4, 2], "gating": "per-head", "moe_routed_scaling_factor": 2.5,
               "moe_router_logit_softcapping": 8.0, "attention_bias": False},
    "apertus": {"attention_bias": False, "hidden_act": "xielu"},
    "deepseek_v4": {"num_key_value_heads": 1, "intermediate_size": 16, "moe_intermediate_size": 16, "q_lora_rank": 32,
                    "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 8,
                    "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 7.0,
                    "scoring_func": "sigmoid", "sliding_window": 16, "num_hash_layers": 2,
                    "layer_types": ["compressed_sparse_attention", "sliding_attention"] * 2,
                    "compress_rope_theta": 1e4, "compress_rates": {"heavily_compressed_attention": 8}, "hc_mult": 4,
                    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "mlp_bias": False, "index_topk": 8},
}  # fmt: skip
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
# What of `VALUES` a field may have.
RIGHT = {
    "vocab_size": [10**9], "max_position_embeddings": [10**9], "head_dim": [None], "num_key_value_heads": [],
    "rms_norm_eps": [0, 1.5, 10**9], "rope_theta": [1.5, 10**9], "rope_local_base_freq": [1.5, 10**9],
    "tie_word_embeddings": [True], "attention_bias": [True], "mlp_bias": [True], "use_sliding_window": [True],
    "bos_token_id": [None, 0, 10**9], "eos_token_id": [None, 0, 10**9, [], [1]], "sliding_window": [None, 10**9],
    "sliding_window_pattern": [10**9], "max_window_layers": [0, 10**9], "query_pre_attn_scalar": [1.5, 10**9],
    "final_logit_softcapping": [None, 1.5, 10**9], "attn_logit_softcapping": [None, 1.5, 10**9],
    "original_max_position_embeddings": [10**9], "factor": [1.5, 10**9], "low_freq_factor": [1.5, 10**9],
    "high_freq_factor": [1.5, 10**9],
    "q_lora_rank": [None], "first_k_dense_replace": [0, 10**9], "n_shared_experts": [0, 10**9], "n_group": [None],
    "topk_group": [None], "norm_topk_prob": [True], "routed_scaling_factor": [1.5, 10**9], "rope_interleave": [True],
    "num_experts_per_tok": [None], "num_local_experts": [None], "num_experts": [None], "swiglu_limit": [1.5, 10**9],
    "attention_multiplier": [1.5, 10**9], "embedding_multiplier": [1.5, 10**9], "residual_multiplier": [1.5, 10**9],
    "logits_scaling": [1.5, 10**9], "no_rope_layers": [None, []], "use_qk_norm": [True],
    "attn_scale": [0, 1.5, 10**9], "floor_scale": [10**9], "attention_chunk_size": [10**9],
    "moe_layers": [None, [], [1]], "altup_active_idx": [0],
    "attn_temperature_tuning": [True], "layer_types": [None], "intermediate_size_mlp": [10**9],
    "interleave_moe_layer_step": [10**9], "attention_k_eq_v": [True], "use_double_wide_mlp": [True],
    "enable_moe_block": [True], "global_head_dim": [None], "num_global_key_value_heads": [None],
    "num_kv_shared_layers": [0], "hidden_size_per_layer_input": [None, 0], "vocab_size_per_layer_input": [10**9],
    "altup_correct_scale": [True], "activation_sparsity_pattern": [None],
    "moe_layer_start_index": [0, 10**9], "moe_layer_end_index": [None, -1, 0], "moe_layer_interval": [10**9],
    "moe_num_experts": [None], "moe_k": [None], "moe_num_shared_experts": [0, 10**9], "moe_norm_min": [0],
    "n_routed_experts": [None], "num_shared_experts": [0, 10**9], "mlp_layer_types": [None],
    "router_scaling_factor": [1.5, 10**9], "attention_value_scale": [None, 1.5, 10**9], "gating": [True],
    "num_attention_heads_per_layer": [None], "moe_routed_scaling_factor": [1.5, 10**9],
    "moe_router_logit_softcapping": [0, 1.5, 10**9],
    "num_hash_layers": [0, 10**9], "compress_rope_theta": [1.5, 10**9], "compress_rates": [None, {}],
    "hc_eps": [0, 1.5, 10**9],
    "swiglu_alpha": [1.5, 10**9], "mlp_only_layers": [None, [], [1]], "decoder_sparse_step": [10**9],
}  # fmt: skip


def is_right(name, value):
    return any(type(value) is type(right) and value == right for right in RIGHT.get(name, []))


@pytest.mark.parametrize("family", OWN)
def test_a_field_of_the_wrong_kind_is_refused_by_name(family):
    fields = {"model_type": family} | COMMON | OWN[family]
    config_reader.parse(fields)
    for name in fields:
        for value in VALUES:
            if is_right(name, value) or (name, value) == ("num_key_value_heads", None):
                continue
            with pytest.raises(ValueError) as error:
                config_reader.parse(fields | {name: value}, "folder/config.json")
            assert name in str(error.value) and "folder/config.json" in str(error.value), (name, value, error.value)
            assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min = 0.5"),
        ("ernie4_5_moe", {"moe_gate": "sinkhorn"}, "moe_gate = 'sinkhorn'"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k in .* at most 8"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "conv", "sparse", "sparse"]}, "mlp_layer_types = "),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("dots1", {"num_experts": 4}, "one number of experts"),
        ("exaone_moe", {"is_moe_layer": [True] * 4}, "is_moe_layer = "),
        ("exaone_moe", {"mlp_layer_types": None, "is_moe_layer": [1, 1, 1, 0]}, "is_moe_layer = "),
        ("exaone_moe", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern = 'LLLG'"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2, 1]}, r"moe_topk = \[2, 2, 2, 1\]"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 64}, "moe_intermediate_size = 64"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert = 2"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias = True"),
        ("hy_v3", {"expert_hidden_dim": 32}, "expert_hidden_dim = 32"),
        ("hy_v3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid = False"),
        ("youtu", {"first_k_dense_replace": 1}, "n_routed_experts = 1"),
        ("axk1", {"q_lora_rank": None}, "q_lora_rank = None"),
        ("mimo_v2_flash", {"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias = False"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True"),
        ("mimo_v2_flash", {"swa_head_dim": 32}, "swa_head_dim = 32"),
        ("mimo_v2_flash", {"attention_chunk_size": 64}, "attention_chunk_size = 64"),
        ("mimo_v2_flash", {"layer_types": None, "hybrid_layer_pattern": [2, 0, 0, 0]}, "hybrid_layer_pattern = "),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts = 1"),
        ("laguna", {"gating": False}, "gating = False"),
        ("laguna", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        ("apertus", {"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
        ("apertus", {"post_norm": True}, "post_norm = True"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3, 4, 2]}, "3 query heads cannot be shared among 2 KV heads"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input = True"),
        (
            "deepseek_v4",
            {"compress_rates": {"compressed_sparse_attention": 1}},
            "compressed_sparse_attention in compress_rates .* at least 2, not 1",
        ),
        ("deepseek_v4", {"compress_rates": {"sliding_attention": 4}}, "sliding_attention"),
        ("deepseek_v4", {"index_head_dim": 1}, "index.dim must be at least rope_dim"),
        ("deepseek_v4", {"layer_types": None, "compress_ratios": [0, 0, 0]}, "0, 4 or 128 for each of the 4 layers"),
        ("deepseek_v4", {"layer_types": None, "compress_ratios": [0, 0, 0, 8]}, "0, 4 or 128 for each of the 4 layers"),
        ("deepseek_v4", {"mlp_layer_types": ["moe", "dense", "moe", "moe"]}, "mlp_layer_types = "),
        ("deepseek_v4", {"partial_rotary_factor": 0.25, "qk_rope_head_dim": 8}, "qk_rope_head_dim = 8"),
        ("deepseek_v4", {"o_groups": 3}, "a number that divides num_attention_heads, 4"),
        ("deepseek_v4", {"scoring_func": "softplus"}, "sqrtsoftplus and softmax and sigmoid"),
        ("deepseek_v4", {"rope_parameters": {"main": {}, "compress": {}}}, "partial_rotary_factor = 1.0"),
    ],
)
def test_what_is_not_computed_is_refused(family, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        config_reader.parse({"model_type": family} | COMMON | OWN[family] | change)


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_so_is_one_of_the_rotary_embedding(where):
    fields = {"model_type": "llama"} | COMMON | OWN["llama"]
    config_reader.parse(fields | {where: ROPE})
    with pytest.raises(ValueError, match=r"high_freq_factor in .* must be above 9"):
        config_reader.parse(fields | {where: ROPE | {"low_freq_factor": 9}})
    for name in ROPE:
        for value in VALUES:
            if not is_right(name, value):
                with pytest.raises(ValueError, match=r"config\.json") as error:
                    config_reader.parse(fields | {where: ROPE | {name: value}})
                assert name in str(error.value)
    for value in VALUES:
        if value not in (None, {}):
            with pytest.raises(ValueError, match=r"config\.json"):
                config_reader.parse(fields | {where: value})


@pytest.fixture
def folder(tmp_path):
    """The small model, with a config of its own."""
    small = pathlib.Path(jaxkv.__file__).parent / "data" / "small"
    for file in small.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    return tmp_path, json.loads((small / "config.json").read_text())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ("", "is not valid JSON"),
        ("\x00\xff", "is not valid JSON"),
        ('{"a": 1' + " " * (65 << 20) + "}", "more than the"),
    ],
)
def test_what_is_no_config_at_all(folder, text, sentence):
    path, _ = folder
    (path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=sentence):
        jaxkv.models.load(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in .* must be at most 512"),
        ({"num_hidden_layers": 500}, "num_hidden_layers = 500, but it has the tensors of"),
        ({"hidden_size": 2**23}, "do not fit its config.json"),
        ({"unknown": 1}, "unknown = 1"),
        ({f"unknown{i}": 1 for i in range(1000)}, "and 990 more"),
    ],
)
def test_a_config_that_is_not_the_tensors(folder, change, sentence):
    path, fields = folder
    (path / "config.json").write_text(json.dumps(fields | change))
    start = time.perf_counter()
    with pytest.raises(ValueError, match=sentence):
        jaxkv.models.load(path)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("eos", ["x", [1, "x"], -1, True, {}, 1.5])
def test_what_ends_a_text_must_be_tokens(folder, eos):
    path, fields = folder
    (path / "config.json").write_text(json.dumps(fields))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=r"eos_token_id in .*generation_config.json must be"):
        jaxkv.models.load(path)
