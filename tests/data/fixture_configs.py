"""The configs of the tiny checkpoints, by the names of their folders, as transformers has them."""

import transformers

VOCAB = 96
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
# Around text models of other families, with their positions in time, height and width.
GRID = dict(rope_type="default", rope_theta=500.0, mrope_section=[2, 3, 3])
NO_EYES = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, patch_size=4, out_hidden_size=32)
FIXTURES |= {
    "qwen2_5_vl": transformers.Qwen2_5_VLConfig(
        text_config=NARROW | dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=7, max_window_layers=1,
                                  rope_parameters=GRID | dict(mrope_section=[1, 2, 1])),
        vision_config=NO_EYES | dict(fullatt_block_indexes=[0]),
    ),
    "qwen3_vl": transformers.Qwen3VLConfig(
        text_config=TINY | dict(rope_parameters=GRID | dict(mrope_interleaved=True)), tie_word_embeddings=True,
        vision_config=NO_EYES | dict(num_position_embeddings=4, deepstack_visual_indexes=[0]),
    ),
    "qwen3_vl_moe": transformers.Qwen3VLMoeConfig(
        text_config=TINY | dict(rope_parameters=GRID | dict(mrope_interleaved=True), moe_intermediate_size=24,
                                num_experts=6, num_experts_per_tok=3, mlp_only_layers=[0]),
        vision_config=NO_EYES | dict(num_position_embeddings=4, deepstack_visual_indexes=[0]),
    ),
    "glm4v": transformers.Glm4vConfig(
        text_config=NARROW | dict(rope_parameters=GRID | dict(partial_rotary_factor=0.5, mrope_section=[1, 1, 0])),
        vision_config=NO_EYES | dict(image_size=8),
    ),
    "glm4v_moe": transformers.Glm4vMoeConfig(
        text_config=TINY | dict(
            rope_parameters=GRID | dict(partial_rotary_factor=0.5, mrope_section=[1, 2, 1]), moe_intermediate_size=16,
            n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2, n_shared_experts=1,
            first_k_dense_replace=1, routed_scaling_factor=1.5,
        ),
        vision_config=NO_EYES | dict(image_size=8),
    ),
    "kimi_k25": transformers.Kimi_K25Config(
        text_config=transformers.DeepseekV3Config(
            **LATENT | dict(n_group=1, topk_group=1, num_hidden_layers=2), q_lora_rank=12, n_shared_experts=1,
            routed_scaling_factor=2.8, num_nextn_predict_layers=0, rope_parameters=YARN | dict(mscale=1.5),
        ),
        vision_config=NO_TOWER | dict(patch_size=4, pos_emb_height=2, pos_emb_width=2), projection_hidden_size=8,
        tie_word_embeddings=False,
    ),
    "llava": transformers.LlavaConfig(
        text_config=transformers.MistralConfig(**TINY, sliding_window=6), image_token_index=0,
        vision_config=NO_TOWER | dict(model_type="clip_vision_model", image_size=8, patch_size=4, projection_dim=8),
    ),
    "smolvlm": transformers.SmolVLMConfig(
        text_config=NARROW | dict(model_type="llama"), image_token_id=0,
        vision_config=NO_TOWER | dict(image_size=8, patch_size=4),
    ),
}  # fmt: skip
# Models for text and images, and their classes.
NESTED = {
    "gemma3_nested": transformers.Gemma3ForConditionalGeneration,
    "llama4": transformers.Llama4ForConditionalGeneration,
    "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
    "gemma4": transformers.Gemma4ForConditionalGeneration,
    "mistral4": transformers.Mistral3ForConditionalGeneration,
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": transformers.Qwen3VLMoeForConditionalGeneration,
    "glm4v": transformers.Glm4vForConditionalGeneration,
    "glm4v_moe": transformers.Glm4vMoeForConditionalGeneration,
    "kimi_k25": transformers.Kimi_K25ForConditionalGeneration,
    "llava": transformers.LlavaForConditionalGeneration,
    "smolvlm": transformers.SmolVLMForConditionalGeneration,
}
