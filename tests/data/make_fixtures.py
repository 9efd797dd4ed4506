"""Makes the tiny random checkpoints in this folder, with what transformers computes from them.

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers    # a CPU build is enough
    VENV/bin/python tests/data/make_fixtures.py [NAME ...]

Every parameter is random, norms and biases too, so that a term that is missing shows. (Those with experts, and
gemma3_nested, were made with torch 2.15.0; mixtral, qwen2_yarn and those after it with 2.14.1.)
"""

import json
import math
import pathlib
import sys

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent
VOCAB, NEW_TOKENS = 96, 10
PROMPT_LENGTHS = (1, 5, 12, 23, 8)
LLAMA3_SCALING = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
TINY = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=None,
            pad_token_id=None)  # fmt: skip
SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

FIXTURES = {
    "llama": transformers.LlamaConfig(**TINY | dict(num_key_value_heads=1), attention_bias=True, mlp_bias=True),
    "llama3": transformers.LlamaConfig(
        **TINY, tie_word_embeddings=True, rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **LLAMA3_SCALING)
    ),
    "llama_linear": transformers.LlamaConfig(
        **TINY, rope_parameters=dict(rope_type="linear", rope_theta=1000.0, factor=2.0)
    ),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=6),
    "qwen2": transformers.Qwen2Config(
        **{k: v for k, v in TINY.items() if k != "head_dim"} | dict(num_hidden_layers=3),
        use_sliding_window=True, sliding_window=7, max_window_layers=1, tie_word_embeddings=True,
    ),
    "qwen3": transformers.Qwen3Config(**TINY),
    "gemma2": transformers.Gemma2Config(
        **TINY | dict(num_hidden_layers=4, hidden_size=20), sliding_window=6, query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0, final_logit_softcapping=8.0,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **TINY | dict(num_hidden_layers=4, hidden_size=20), sliding_window=6, query_pre_attn_scalar=20,
        layer_types=SLIDING_FIRST,
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
                             sliding_attention=dict(rope_type="default", rope_theta=100.0)),
    ),
}  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0,
            beta_slow=1.0)  # fmt: skip
LATENT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
              moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2,
              first_k_dense_replace=1, max_position_embeddings=128, bos_token_id=1, eos_token_id=None,
              rms_norm_eps=1e-3)  # fmt: skip
FIXTURES |= {
    "deepseek_v2": transformers.DeepseekV2Config(
        **LATENT | dict(topk_group=1), q_lora_rank=None, topk_method="group_limited_greedy", n_shared_experts=2,
        routed_scaling_factor=3.0,
        rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=12, routed_scaling_factor=2.5, n_shared_experts=1, num_nextn_predict_layers=1,
        rope_parameters=YARN | dict(mscale=1.5, mscale_all_dim=0.8),
    ),
    "deepseek_v32": transformers.DeepseekV32Config(
        **LATENT, q_lora_rank=12, routed_scaling_factor=2.5, n_shared_experts=1, index_topk=6, index_head_dim=12,
        index_n_heads=16, rope_parameters=YARN | dict(mscale=1.5, mscale_all_dim=0.8),
    ),
    "glm_moe_dsa": transformers.GlmMoeDsaConfig(
        **LATENT | dict(num_hidden_layers=4, n_group=1, topk_group=1), q_lora_rank=12, n_shared_experts=1,
        index_topk=6, index_head_dim=12, index_n_heads=16, indexer_types=["full", "shared", "full", "shared"],
        rope_parameters=dict(rope_type="default", rope_theta=500.0),
    ),
    "gpt_oss": transformers.GptOssConfig(
        **TINY | dict(intermediate_size=32), sliding_window=6, num_local_experts=5, num_experts_per_tok=2,
        swiglu_limit=1.5, rope_parameters=YARN | dict(truncate=False),
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **TINY, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
        mlp_only_layers=[0], rope_parameters=dict(rope_type="default", rope_theta=500.0),
    ),
    "mixtral": transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_yarn": transformers.Qwen2Config(
        **{k: v for k, v in TINY.items() if k != "head_dim"}, rope_parameters=YARN | dict(attention_factor=1.25),
    ),
    "gemma3_nested": transformers.Gemma3Config(
        text_config=FIXTURES["gemma3"].to_dict() | dict(num_hidden_layers=2, layer_types=SLIDING_FIRST[:2]),
        vision_config=dict(model_type="siglip_vision_model", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                           num_attention_heads=2, image_size=8, patch_size=4, vision_use_head=False),
        mm_tokens_per_image=4, image_token_index=0, boi_token_index=0, eoi_token_index=1,
    ),
}  # fmt: skip
# For families whose heads are as wide as hidden_size says.
NARROW = {name: value for name, value in TINY.items() if name != "head_dim"}
FIXTURES |= {
    "smollm3": transformers.SmolLM3Config(
        **NARROW | dict(num_hidden_layers=4), no_rope_layers=[1, 0, 1, 0], use_sliding_window=True,
        sliding_window=6,
    ),
    "olmo2": transformers.Olmo2Config(**NARROW, rope_parameters=dict(rope_type="default", rope_theta=500.0)),
    "olmo3": transformers.Olmo3Config(
        **NARROW | dict(num_hidden_layers=4), sliding_window=6,
        rope_parameters=dict(full_attention=YARN | dict(attention_factor=1.25),
                             sliding_attention=dict(rope_type="default", rope_theta=500.0)),
    ),
    "granite": transformers.GraniteConfig(
        **NARROW, attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.6, logits_scaling=3.0,
    ),
    "seed_oss": transformers.SeedOssConfig(**TINY, mlp_bias=True),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **NARROW, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3,
        shared_expert_intermediate_size=20, mlp_only_layers=[1],
    ),
}  # fmt: skip
FIXTURES |= {
    "phi3": transformers.Phi3Config(  # every text is longer than the original, so the long factors hold
        **NARROW, sliding_window=6, original_max_position_embeddings=1,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=500.0, partial_rotary_factor=0.75, attention_factor=1.2,
            long_factor=[1.5, 2.0, 3.0], short_factor=[1.0, 1.1, 1.2], original_max_position_embeddings=1,
        ),
    ),
    "exaone4": transformers.Exaone4Config(
        **NARROW | dict(num_hidden_layers=3), sliding_window=6, sliding_window_pattern=2,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **LLAMA3_SCALING),
    ),
    "glm4": transformers.Glm4Config(**TINY),
    "ernie4_5": transformers.Ernie4_5Config(**TINY, use_bias=True),
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config(
        **TINY, rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, alpha=20.0, factor=1.0),
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        **TINY, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2,
        n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True,
    ),
    "minimax_m2": transformers.MiniMaxM2Config(
        **TINY, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8,
    ),
}  # fmt: skip
FIXTURES |= {
    "ministral3": transformers.Ministral3Config(  # texts are longer than the original: their temperature rises
        **TINY, rope_parameters=YARN | dict(original_max_position_embeddings=8, llama_4_scaling_beta=0.5),
    ),
}  # fmt: skip
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
             linear_conv_kernel_dim=4)  # fmt: skip
LINEAR_FIRST = ["linear_attention", "full_attention", "linear_attention"]
GRANITE = dict(
    attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.6, logits_scaling=3.0,
    shared_intermediate_size=24, mamba_n_heads=4, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=16,
)  # fmt: skip
FIXTURES |= {
    "qwen3_next": transformers.Qwen3NextConfig(
        **TINY | dict(num_hidden_layers=3), **DELTA, layer_types=LINEAR_FIRST, moe_intermediate_size=24, num_experts=6,
        num_experts_per_tok=3, shared_expert_intermediate_size=20, mlp_only_layers=[2],
    ),
    "qwen3_5": transformers.Qwen3_5Config(
        text_config=TINY | DELTA | dict(layer_types=LINEAR_FIRST[:2]),
        vision_config=dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, patch_size=4, out_hidden_size=32,
                           num_position_embeddings=4),
    ),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
        **{k: v for k, v in TINY.items() if k != "intermediate_size"}, **DELTA, layer_types=LINEAR_FIRST[:2],
        moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3, shared_expert_intermediate_size=20,
    ),
    "olmo_hybrid": transformers.OlmoHybridConfig(
        **NARROW | dict(num_hidden_layers=3), **DELTA, layer_types=LINEAR_FIRST,
        rope_parameters=dict(rope_type="default", rope_theta=None),
    ),
    "kimi_linear": transformers.KimiLinearConfig(
        **{k: v for k, v in LATENT.items() if k not in ("first_k_dense_replace", "n_routed_experts")},
        layer_types=LINEAR_FIRST, mlp_layer_types=["dense", "sparse", "sparse"], num_local_experts=6, q_lora_rank=None,
        n_shared_experts=1, routed_scaling_factor=2.5, linear_head_dim=8, linear_num_heads=3, pad_token_id=None,
    ),
    "nemotron_h": transformers.NemotronHConfig(
        **{k: v for k, v in TINY.items() if k != "num_hidden_layers"}, mamba_num_heads=4, mamba_head_dim=6, n_groups=2,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"], ssm_state_size=8,
        chunk_size=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, n_group=3, topk_group=2,
        moe_shared_expert_intermediate_size=20, moe_latent_size=12, routed_scaling_factor=2.5, time_step_min=0.5,
    ),
    "falcon_h1": transformers.FalconH1Config(
        **NARROW, mamba_d_ssm=24, mamba_n_heads=4, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16,
        mamba_rms_norm=True, mamba_norm_before_gate=False, mlp_multipliers=[0.8, 1.5], key_multiplier=0.4,
        attention_in_multiplier=1.2, attention_out_multiplier=0.9, ssm_multipliers=[0.35, 0.5, 0.7, 1.5, 0.6],
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.6, embedding_multiplier=2.5, lm_head_multiplier=0.4,
        projectors_bias=True, rope_parameters=dict(rope_type="default", rope_theta=500.0),
    ),
    "lfm2": transformers.Lfm2Config(
        **NARROW | dict(num_hidden_layers=3), layer_types=["conv", "full_attention", "conv"], conv_bias=True,
        block_multiple_of=16,
    ),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **NARROW | dict(num_hidden_layers=3), **GRANITE, layer_types=LINEAR_FIRST, num_local_experts=4,
        num_experts_per_tok=2, mamba_n_groups=2,
    ),
    "granitemoehybrid_dense": transformers.GraniteMoeHybridConfig(
        **NARROW, **GRANITE, layer_types=LINEAR_FIRST[:2], num_local_experts=0, num_experts_per_tok=0,
        position_embedding_type="rope", tie_word_embeddings=True,
    ),
}  # fmt: skip
NO_TOWER = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
FIXTURES |= {
    "llama4": transformers.Llama4Config(
        text_config=TINY | dict(
            num_hidden_layers=4, intermediate_size=20, intermediate_size_mlp=40, num_local_experts=4,
            num_experts_per_tok=2, interleave_moe_layer_step=2, attention_chunk_size=6, floor_scale=7, attn_scale=0.5,
            rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **LLAMA3_SCALING),
        ),
        vision_config=NO_TOWER | dict(image_size=8, patch_size=4, vision_output_dim=8, projector_input_dim=8,
                                      projector_output_dim=8),
        boi_token_index=0, eoi_token_index=0, image_token_index=0,
    ),
}  # fmt: skip
WIDE = dict(head_dim=16, global_head_dim=24, sliding_window=6, layer_types=SLIDING_FIRST, num_hidden_layers=4,
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
                full_attention=dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.5),
            ))  # fmt: skip
FIXTURES |= {
    "gemma4": transformers.Gemma4Config(
        text_config=TINY | WIDE | dict(
            num_hidden_layers=5, layer_types=SLIDING_FIRST[:1] + SLIDING_FIRST, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2, use_double_wide_mlp=True,
            final_logit_softcapping=8.0, pad_token_id=0,
        ),
        vision_config=NO_TOWER | dict(num_key_value_heads=2, head_dim=4, patch_size=4, position_embedding_size=4),
        audio_config=None,
    ),
    "gemma3n": transformers.Gemma3nTextConfig(
        **TINY | dict(num_hidden_layers=5, intermediate_size=[40, 24, 40, 40, 40], pad_token_id=0), sliding_window=6,
        layer_types=SLIDING_FIRST[:1] + SLIDING_FIRST, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=2, altup_num_inputs=3, altup_active_idx=1, laurel_rank=4, final_logit_softcapping=8.0,
        activation_sparsity_pattern=[0.7, 0.5, 0.0, 0.0, 0.0],
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
                             sliding_attention=dict(rope_type="default", rope_theta=100.0)),
    ),
    "gemma4_experts": transformers.Gemma4TextConfig(
        **TINY | WIDE, num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=20,
    ),
}  # fmt: skip
MISTRAL4 = transformers.Mistral4Config(  # texts are longer than the original: their temperature rises
    **LATENT | dict(n_group=1, topk_group=1), q_lora_rank=12, n_shared_experts=1, pad_token_id=None,
    rope_parameters=YARN | dict(original_max_position_embeddings=8, mscale=1.5, mscale_all_dim=0.8,
                                llama_4_scaling_beta=0.5),
)  # fmt: skip
FIXTURES |= {
    "mistral4": transformers.Mistral3Config(
        text_config=MISTRAL4, image_token_index=0, tie_word_embeddings=False,
        vision_config=NO_TOWER | dict(model_type="pixtral", head_dim=4, image_size=8, patch_size=4),
    ),
}  # fmt: skip
# Models for text and images, and their classes.
NESTED = {
    "gemma3_nested": transformers.Gemma3ForConditionalGeneration,
    "llama4": transformers.Llama4ForConditionalGeneration,
    "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
    "gemma4": transformers.Gemma4ForConditionalGeneration,
    "mistral4": transformers.Mistral3ForConditionalGeneration,
}
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
}  # fmt: skip


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
    biases = [
        (name, x) for name, x in model.named_buffers() if name.endswith(("e_score_correction_bias", "layer_scalar"))
    ]
    for parameter_name, parameter in [*model.named_parameters(), *biases]:
        is_norm = "norm" in parameter_name or parameter_name.endswith(("scale", "layer_scalar"))
        inputs = parameter.shape[1 if parameter.ndim == 3 and name in ("gpt_oss", "llama4") else -1]
        small = is_norm or parameter.ndim == 1 or parameter_name.endswith("bias")
        spread = 0.4 if small else 1.3 * inputs**-0.5
        around_zero = config.model_type in ("gemma2", "gemma3", "gemma3_text") or (
            config.model_type.startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in parameter_name
        )
        center = 1.0 if is_norm and not around_zero else 0.0
        torch.nn.init.normal_(parameter, mean=center, std=spread)
    folder = HERE / name
    model.save_pretrained(folder, max_shard_size="30KB" if name == SHARDED else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name in ("deepseek_v3", "gpt_oss"):
        publish(name, model, folder)

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
    old = fields | {"text_config": old} if "text_config" in fields else old
    (folder / "config_old.json").write_text(json.dumps(old, indent=2) + "\n")


if __name__ == "__main__":
    for fixture in sys.argv[1:] or FIXTURES:
        make(fixture, FIXTURES[fixture])
