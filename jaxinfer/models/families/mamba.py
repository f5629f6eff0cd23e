"""Models of nothing but state-space layers: Mamba, FalconMamba (which norms what makes the steps), and Mamba-2."""

from __future__ import annotations

import math

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, activation, step_limits
from jaxinfer.models.spec import DecoderSpec, LayerSpec, NormSpec
from jaxinfer.models.state_spec import Mamba2Spec, MambaSpec, StateSpec

_NO_END = 1 << 20
"""States have no last position; this only bounds a request."""

_NAMES = Names(
    prefix="backbone.",
    embed="embeddings",
    norm="norm_f",
    attention_norm="norm",
    state="mixer.",
)


def mamba_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    return _spec(config, _mamba_state(config, 1e-6), tied_head=True)


def falcon_mamba_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    eps = config.get("mixer_rms_eps", 1e-6)
    return _spec(config, _mamba_state(config, eps, step_norms="plain"), tied_head=True)


def mamba2_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    bias = config.get("use_bias", False)
    state = Mamba2Spec(
        num_heads=config["num_heads"],
        head_dim=config["head_dim"],
        num_groups=config.get("n_groups", 8),
        state_dim=config.get("state_size", 128),
        conv_kernel=config.get("conv_kernel", 4),
        conv_bias=config.get("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        activation=activation(config),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        step_limits=step_limits(config),
    )
    return _spec(config, state, tied_head=False)


def _mamba_state(config: Config, eps: float, **features) -> MambaSpec:
    embed_dim, rank = config["hidden_size"], config.get("time_step_rank", "auto")
    return MambaSpec(
        inner_dim=config.get("intermediate_size") or int(config.get("expand", 2) * embed_dim),
        state_dim=config.get("state_size", 16),
        step_rank=math.ceil(embed_dim / 16) if rank == "auto" else rank,
        conv_kernel=config.get("conv_kernel", 4),
        conv_bias=config.get("use_conv_bias", True),
        bias=config.get("use_bias", False),
        activation=activation(config),
        norm_eps=eps,
        **features,
    )


def _spec(config: Config, state: StateSpec, *, tied_head: bool) -> DecoderSpec:
    return DecoderSpec(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings") or _NO_END,
        embed_dim=config["hidden_size"],
        layers=(LayerSpec(None, None, state=state),) * config["num_hidden_layers"],
        norm=NormSpec("rms", config.get("layer_norm_epsilon", 1e-5)),
        tied_head=config.get("tie_word_embeddings", tied_head),
    )


FAMILIES = (
    Family(("MambaForCausalLM",), mamba_spec, _NAMES),
    Family(("FalconMambaForCausalLM",), falcon_mamba_spec, _NAMES),
    Family(("Mamba2ForCausalLM",), mamba2_spec, _NAMES),
)
