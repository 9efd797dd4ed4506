"""More configs of tiny checkpoints, as `fixture_configs`, and how older or published files describe the same."""

import transformers
from fixture_configs import LATENT, LLAMA3_SCALING, NARROW, TINY, YARN

PLAIN = dict(rope_type="default", rope_theta=500.0)
# The two rotary embeddings of layers with a window and of those without.
LOCAL = dict(full_attention=YARN | dict(attention_factor=1.25),
             sliding_attention=dict(rope_type="default", rope_theta=100.0))  # fmt: skip
SLIDING_LAST = ["full_attention", "sliding_attention"]
ROUTED = dict(moe_intermediate_size=16, num_experts_per_tok=2, n_group=3, topk_group=2, routed_scaling_factor=1.5)
UNTIED = dict(tie_word_embeddings=False)
KIN = {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
NO_WIDTH = {name: value for name, value in TINY.items() if name != "intermediate_size"}

FIXTURES = {
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(
        **NARROW | dict(num_hidden_layers=3) | UNTIED, moe_intermediate_size=16, moe_num_experts=6, moe_k=3,
        moe_num_shared_experts=1, moe_layer_end_index=1, rope_parameters=PLAIN,
    ),
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig(
        **KIN, q_lora_rank=12, routed_scaling_factor=2.5, n_shared_experts=2, pad_token_id=None,
        mlp_layer_types=["sparse", "dense", "sparse"], rope_parameters=PLAIN,
    ),
    "olmoe": transformers.OlmoeConfig(
        **NARROW | dict(intermediate_size=16), num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
        attention_bias=True, rope_parameters=PLAIN,
    ),
    "gemma": transformers.GemmaConfig(**TINY | dict(hidden_size=20), attention_bias=True, rope_parameters=PLAIN),
    "dots1": transformers.Dots1Config(
        **TINY | ROUTED | dict(num_hidden_layers=3), n_routed_experts=6, n_shared_experts=2, norm_topk_prob=True,
        first_k_dense_replace=1, sliding_window=6, max_window_layers=2, rope_parameters=PLAIN,
    ),
    "exaone_moe": transformers.ExaoneMoeConfig(
        **TINY | ROUTED | dict(num_hidden_layers=3), num_experts=6, num_shared_experts=2, sliding_window=6,
        sliding_window_pattern=2, mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **LLAMA3_SCALING),
    ),
    "hunyuan_v1_moe": transformers.HunYuanMoEV1Config(
        **TINY | dict(intermediate_size=16), num_experts=6, moe_topk=3, attention_bias=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, alpha=20.0, factor=1.0),
    ),
    "solar_open": transformers.SolarOpenConfig(
        **NO_WIDTH | ROUTED, n_routed_experts=6, n_shared_experts=2, attention_bias=True, norm_topk_prob=False,
        rope_parameters=YARN | dict(partial_rotary_factor=1.0),
    ),
    "hy_v3": transformers.HYV3Config(
        **TINY, num_experts=6, num_experts_per_tok=2, num_shared_experts=2, moe_intermediate_size=16,
        router_scaling_factor=1.5, attention_bias=True, mlp_layer_types=["sparse", "dense"], rope_parameters=PLAIN,
    ),
    "youtu": transformers.YoutuConfig(
        **{name: LATENT[name] for name in LATENT if name in {
            *TINY, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps"}} | UNTIED,
        q_lora_rank=None, rope_interleave=False, rope_parameters=YARN | dict(mscale=1.5, mscale_all_dim=0.8),
    ),
    "granitemoe": transformers.GraniteMoeConfig(
        **NARROW | dict(intermediate_size=16), attention_multiplier=0.3, embedding_multiplier=2.0,
        residual_multiplier=0.6, logits_scaling=3.0, num_local_experts=6, num_experts_per_tok=3, attention_bias=True,
    ),
    "arcee": transformers.ArceeConfig(**TINY, attention_bias=True, mlp_bias=True, rope_parameters=YARN),
    "mellum": transformers.MellumConfig(
        **TINY | dict(num_hidden_layers=3), moe_intermediate_size=16, num_experts=6, num_experts_per_tok=3,
        norm_topk_prob=False, layer_types=["sliding_attention", *SLIDING_LAST], sliding_window=6, attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"], rope_parameters=LOCAL,
    ),
    "axk1": transformers.AXK1Config(
        **KIN, q_lora_rank=12, n_shared_experts=2, mlp_layer_types=["sparse", "dense", "sparse"], pad_token_id=None,
        norm_topk_prob=False, rope_parameters=YARN | dict(mscale=1.5, mscale_all_dim=0.8),
    ),
}  # fmt: skip
CONVS = ["conv", "full_attention", "conv"]
SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]
FIXTURES |= {
    "lfm2_moe": transformers.Lfm2MoeConfig(
        **NARROW | UNTIED | dict(num_hidden_layers=3), layer_types=CONVS, conv_bias=True, num_dense_layers=1,
        moe_intermediate_size=16, num_experts=6, num_experts_per_tok=3, routed_scaling_factor=1.5,
        rope_parameters=PLAIN, conv_L_cache=4,
    ),
    "mimo_v2_flash": transformers.MiMoV2FlashConfig(
        **TINY | ROUTED | dict(num_hidden_layers=3, num_key_value_heads=1), n_routed_experts=6, v_head_dim=12,
        sliding_window=6, layer_types=SLIDING_FIRST, mlp_layer_types=["sparse", "dense", "sparse"],
        attention_value_scale=0.6, attention_bias=True,
        rope_parameters=dict(full_attention=PLAIN | dict(partial_rotary_factor=0.5),
                             sliding_attention=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.25)),
    ),
    "laguna": transformers.LagunaConfig(
        **TINY | dict(num_hidden_layers=3), num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16,
        shared_expert_intermediate_size=20, sliding_window=6, layer_types=SLIDING_FIRST, attention_bias=True,
        num_attention_heads_per_layer=[6, 4, 2], mlp_layer_types=["sparse", "dense", "sparse"],
        moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=0.7, rope_parameters=LOCAL,
    ),
    "laguna_gates": transformers.LagunaConfig(
        **TINY, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=20,
        gating="per-element",
    ),
    "kolibri1": transformers.Kolibri1Config(
        **NO_WIDTH | dict(num_hidden_layers=3), num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16,
        shared_expert_intermediate_size=20, sliding_window=6, layer_types=SLIDING_FIRST, norm_topk_prob=True,
        rope_parameters=PLAIN,
    ),
    "lfm3": transformers.Lfm3Config(
        **TINY | UNTIED | dict(num_hidden_layers=4), layer_types=["sliding_attention", *CONVS], conv_bias=True,
        conv_L_cache=4, sliding_window=6, attention_bias=True,
        rope_parameters=LOCAL | dict(full_attention=PLAIN | dict(rope_type="proportional", partial_rotary_factor=0.25)),
    ),
    "apertus": transformers.ApertusConfig(**TINY, attention_bias=True, rope_parameters=YARN),
    "bamba": transformers.BambaConfig(
        **NARROW | dict(num_hidden_layers=3), attn_layer_indices=[1], mamba_n_heads=4, mamba_d_state=8, mamba_expand=2,
        mamba_n_groups=2, mamba_chunk_size=16, mamba_proj_bias=True, mlp_bias=True, attention_bias=True,
        rope_parameters=dict(PLAIN),  # which it changes
    ),
}  # fmt: skip
OLD_YARN = {name: value for name, value in YARN.items() if name not in ("rope_type", "rope_theta")} | {"type": "yarn"}
SIGMOIDS = dict(scoring_func="sigmoid", topk_method="noaux_tc")
# Fields left out, fields put in.
OLD_FORMS = {
    "ernie4_5_moe": (
        ["rope_parameters", "moe_norm_min"],
        dict(rope_theta=500.0, moe_capacity=[6, 6, 6], moe_gate="topk", moe_use_aux_free=True, use_bias=False,
             num_nextn_predict_layers=1, moe_layer_start_index=1, moe_layer_end_index=1),
    ),
    "glm4_moe_lite": (
        ["rope_parameters", "qk_head_dim"],
        dict(rope_theta=500.0, rope_scaling=None, partial_rotary_factor=1.0, num_nextn_predict_layers=1,
             first_k_dense_replace=1, **SIGMOIDS),
    ),
    "olmoe": (["rope_parameters"], dict(rope_theta=500.0, rope_scaling=None, clip_qkv=None)),
    "gemma": (["rope_parameters"], dict(rope_theta=500.0, hidden_act="gelu", hidden_activation=None)),
    "dots1": (
        ["rope_parameters", "layer_types"], dict(rope_theta=500.0, rope_scaling=None, moe_layer_freq=1, ep_size=1,
                                                 use_sliding_window=False, **SIGMOIDS),
    ),
    "exaone_moe": (
        ["rope_parameters", "layer_types", "mlp_layer_types", "first_k_dense_replace"],
        dict(rope_theta=500.0, rope_scaling=dict(rope_type="llama3", **LLAMA3_SCALING), num_nextn_predict_layers=1,
             first_last_k_dense_replace=1, is_moe_layer=[True, False, True], **SIGMOIDS),
    ),
    "hunyuan_v1_moe": (
        ["rope_parameters", "num_experts", "moe_topk"],
        dict(rope_theta=100.0, use_qk_norm=True, use_cla=False, attention_head_dim=16, norm_type="rms", num_experts=6,
             moe_topk=[3, 3], num_shared_expert=[1, 1], moe_intermediate_size=[16, 16], use_mixed_mlp_moe=True,
             moe_layer_num_skipped=0, use_mla=False, group_limited_greedy=False,
             rope_scaling=dict(type="dynamic", alpha=20.0, factor=1.0, beta_fast=32, beta_slow=1)),
    ),
    "solar_open": (
        ["rope_parameters"], dict(rope_theta=500.0, rope_scaling=OLD_YARN, partial_rotary_factor=1.0,
                                  first_k_dense_replace=0, **SIGMOIDS),
    ),
    "hy_v3": (
        ["rope_parameters"],
        dict(rope_theta=500.0, rope_scaling=None, num_nextn_predict_layers=1, first_k_dense_replace=1, qk_norm=True,
             expert_hidden_dim=16, route_norm=True, moe_router_enable_expert_bias=True, moe_router_use_sigmoid=True,
             enable_lm_head_fp32=True),
    ),
    "youtu": (
        ["rope_parameters", "qk_head_dim"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(mscale=1.5, mscale_all_dim=0.8), mlp_bias=False),
    ),
    "granitemoe": (["rope_parameters"], dict(rope_theta=10_000.0, rope_scaling=None)),
    "arcee": (["rope_parameters"], dict(rope_theta=500.0, rope_scaling=OLD_YARN)),
    "mellum": ([], dict(num_nextn_predict_layers=1, mtp_layer_types=["sliding_attention"],
                        mtp_mlp_layer_types=["sparse"])),
    "axk1": (
        ["rope_parameters", "qk_head_dim", "head_dim", "rope_interleave"],
        dict(rope_theta=500.0, rope_scaling=OLD_YARN | dict(mscale=1.5, mscale_all_dim=0.8), ep_size=1, **SIGMOIDS),
    ),
    "lfm2_moe": (["rope_parameters", "tie_word_embeddings"], dict(rope_theta=500.0, tie_embedding=False)),
    "mimo_v2_flash": (
        ["layer_types", "mlp_layer_types", "sliding_window", "rms_norm_eps"],
        dict(hybrid_layer_pattern=[1, 0, 1], moe_layer_freq=[1, 0, 1], sliding_window=5, sliding_window_size=5,
             attention_chunk_size=5, layernorm_epsilon=1e-5, swa_num_key_value_heads=2, swa_num_attention_heads=4,
             swa_head_dim=16, swa_v_head_dim=12, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False,
             n_shared_experts=None, **SIGMOIDS),
    ),
    "laguna": (
        ["gating"],
        dict(gating=True, moe_apply_router_weight_on_input=False, norm_topk_prob=True, mlp_only_layers=[1]),
    ),
    "laguna_gates": (["num_attention_heads_per_layer", "mlp_layer_types", "layer_types", "rope_parameters"], {}),
    "kolibri1": (["rope_parameters"], dict(rope_theta=500.0, rope_scaling=None)),
    "lfm3": (["tie_word_embeddings", "norm_eps"], dict(tie_embedding=False, norm_eps=1e-5)),
    "bamba": (
        ["rope_parameters", "mamba_d_head", "time_step_limit"],
        dict(rope_theta=500.0, rope_scaling=None, mamba_d_head="auto", z_loss_coefficient=0.0),
    ),
    "apertus": (["rope_parameters"], dict(rope_theta=500.0, rope_scaling=OLD_YARN, mlp_bias=False, post_norm=False,
                                          qk_norm=True)),
}  # fmt: skip
# DeepSeek V4, whose published files say in other fields which layers compress tokens and choose experts by them.
COMPRESS_RATES = dict(compressed_sparse_attention=4, heavily_compressed_attention=8)
COMPRESSING = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
               "compressed_sparse_attention"]  # fmt: skip
ROPES = dict(main=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
             compress=YARN | dict(partial_rotary_factor=0.5, attention_factor=1.0))  # fmt: skip
FIXTURES |= {
    "deepseek_v4": transformers.DeepseekV4Config(
        **{name: value for name, value in NO_WIDTH.items() if name != "num_key_value_heads"} | UNTIED | dict(
            num_hidden_layers=4
        ), moe_intermediate_size=16, q_lora_rank=12, o_groups=2, o_lora_rank=8, n_routed_experts=6,
        num_experts_per_tok=2, routed_scaling_factor=1.5, swiglu_limit=0.5, sliding_window=8, hc_mult=3,
        hc_sinkhorn_iters=3, hc_eps=1e-4, layer_types=COMPRESSING,
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], compress_rates=COMPRESS_RATES, partial_rotary_factor=0.5,
        index_n_heads=8, index_head_dim=16, index_topk=2, rope_parameters=ROPES,
    ),
}  # fmt: skip
OLD_FORMS |= {
    "deepseek_v4": (
        ["rope_parameters", "layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor"],
        dict(rope_theta=100.0, compress_rope_theta=500.0, rope_scaling=OLD_YARN, compress_ratios=[0, 4, 128, 4, 0],
             compress_rate_csa=4, compress_rate_hca=8, num_hash_layers=1, qk_rope_head_dim=8, topk_method="noaux_tc",
             num_nextn_predict_layers=1),
    ),
}  # fmt: skip
