"""Phi 1 to 2, and Adept's Persimmon in its form: partial rotation, layer norms, plain MLPs, norms of queries and keys."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, plain_mlp, renamed
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec

_DEFAULTS = {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5}


def _spec(config: Config, max_model_len: int | None, qk_layernorm: bool, **features):
    norm = NormSpec("layer", config["layer_norm_eps"], has_bias=True)
    return llama_like_spec(
        config,
        max_model_len,
        attention={
            "qkv_bias": True,
            "o_bias": True,
            "qk_norm": QKNormSpec(norm) if qk_layernorm else None,
        },
        mlp=plain_mlp(config),
        norm=norm,
        **features,
    )


def _phi_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, hidden_act="gelu_new", qk_layernorm=False, **_DEFAULTS)
    return _spec(
        config, max_model_len, config["qk_layernorm"], norms="parallel_shared", head_bias=True
    )


def _persimmon_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, hidden_act="relu2", qk_layernorm=True, **_DEFAULTS)
    return _spec(config, max_model_len, config["qk_layernorm"])


FAMILIES = (
    Family(
        architectures=("PhiForCausalLM",),
        spec_from_config=_phi_spec,
        names=Names(
            norm="final_layernorm",
            o="self_attn.dense",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            up="mlp.fc1",
            down="mlp.fc2",
        ),
    ),
    Family(
        architectures=("PersimmonForCausalLM",),
        spec_from_config=_persimmon_spec,
        names=Names(
            norm="final_layernorm",
            qkv=("self_attn.query_key_value",),
            qkv_layout="grouped",
            o="self_attn.dense",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
    ),
)
