"""Configs of published models, for programs that are compiled without weights."""

from __future__ import annotations

from typing import Any


def _llama(vocab: int, embed: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "dtype": "bfloat16",
        **more,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llama-1b": _llama(128_256, 2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),
    "llama-8b": _llama(128_256, 4096, 14_336, 32, 32, 8),
    "llama-70b": _llama(128_256, 8192, 28_672, 80, 64, 8),
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "dtype": "bfloat16",
    },
}
"""Shapes of Llama 3's models, Mixtral and DeepSeek-V3 (in bfloat16), as their configs give them."""
