"""Mixtures of experts, and latent attention."""

from __future__ import annotations

from tests.models.architectures.entry import entry

EXPERTS = dict(num_local_experts=6, num_experts_per_tok=3)
GRANITE = dict(
    embedding_multiplier=3.0,
    attention_multiplier=0.4,
    residual_multiplier=0.7,
    logits_scaling=2.0,
)
GROUPS = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=26,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.7,
)
LATENT = dict(
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=10,
    qk_rope_head_dim=8,
    v_head_dim=14,
    num_attention_heads=3,
    num_key_value_heads=3,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        beta_fast=8.0,
        mscale=0.7,
        mscale_all_dim=1.0,
        original_max_position_embeddings=32,
    ),
)
LONG_ROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0, 1.5, 2.5, 3.0],
    long_factor=[2.0, 4.0, 8.0, 9.0],
    original_max_position_embeddings=64,
)

ENTRIES = [
    entry("mixtral", sliding_window=7, **EXPERTS),
    entry("minimax_m2", head_dim=16, rotary_dim=8, **EXPERTS),
    entry("phimoe", num_local_experts=6, num_experts_per_tok=2, attention_bias=True,
          lm_head_bias=True, router_jitter_noise=0.2),
    entry("qwen2_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=26,
          shared_expert_intermediate_size=22, mlp_only_layers=[0], norm_topk_prob=True),
    entry("qwen3_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=26,
          head_dim=16, decoder_sparse_step=2),
    entry("mellum", num_local_experts=6, num_experts_per_tok=3, moe_intermediate_size=26, head_dim=16,
          sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
          mlp_layer_types=["dense", "sparse", "sparse"]),
    entry("dbrx", attn_config=dict(kv_n_heads=2, clip_qkv=1.5, rope_theta=10000.0),
          ffn_config=dict(ffn_hidden_size=26, moe_num_experts=6, moe_top_k=3)),
    entry("gpt_oss", head_dim=16, sliding_window=6, swiglu_limit=1.0, **EXPERTS),
    entry("llama4_text", num_local_experts=6, num_experts_per_tok=2, intermediate_size_mlp=42, head_dim=16,
          interleave_moe_layer_step=1, moe_layers=[0, 2], no_rope_layers=[1, 0, 1], attention_chunk_size=128,
          floor_scale=4),
    entry("ernie4_5_moe", moe_num_experts=6, moe_k=3, moe_intermediate_size=26, head_dim=16),
    entry("glm4_moe", head_dim=16, use_qk_norm=True, attention_bias=True, **GROUPS),
    entry("sarvam_moe", head_dim=16, use_qk_norm=True, **GROUPS),
    entry("solar_open", head_dim=16, attention_bias=True, **GROUPS),
    entry("dots1", head_dim=16, sliding_window=6, max_window_layers=1, norm_topk_prob=True,
          **GROUPS),
    entry("exaone_moe", head_dim=16, sliding_window=6, sliding_window_pattern="LG", num_experts=6,
          num_experts_per_tok=3, moe_intermediate_size=26),
    entry("hy_v3", head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=26),
    entry("kolibri1", head_dim=16, sliding_window=6, num_experts=6, num_experts_per_tok=3,
          moe_intermediate_size=26, shared_expert_intermediate_size=22,
          layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    entry("flint", head_dim=16, sliding_window=6, num_experts=6, num_experts_per_tok=3,
          moe_intermediate_size=26, shared_expert_intermediate_size=22, mlp_only_layers=[0],
          layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    entry("deepseek_v2", topk_method="group_limited_greedy", **(LATENT | GROUPS)),
    entry("deepseek_v2", "lite", attention_bias=True, **{**LATENT, **GROUPS, "q_lora_rank": None}),
    entry("deepseek_v3", **(LATENT | GROUPS)),
    entry("sarvam_mla", **(LATENT | GROUPS)),
    entry("glm4_moe_lite", **(LATENT | GROUPS)),
    entry("youtu", **LATENT),
    entry("minicpm3", scale_emb=3, embed_deviation=0.15, scale_depth=1.2, dim_model_base=24, **(LATENT | dict(rope_parameters=LONG_ROPE))),
]  # fmt: skip
