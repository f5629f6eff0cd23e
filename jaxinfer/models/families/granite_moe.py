"""IBM's Granite with a mixture of experts, alone or beside an MLP for all tokens, and its form with windows and sinks."""

from __future__ import annotations

from typing import Any

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.families.granite import granite_like_spec, granite_swa_layers
from jaxinfer.models.family import Config, Family, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec


def _with_experts(spec: DecoderSpec, config: Config) -> DecoderSpec:
    moe = moe_spec(
        config,
        config["intermediate_size"],
        shared_dim=config.get("shared_intermediate_size"),
        routing={"renormalize": True},
    )
    return with_experts(spec, moe)


def _config(config: Config) -> dict[str, Any]:
    return renamed(config, {}, num_local_experts=8, num_experts_per_tok=2)


def _spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = _config(config)
    return _with_experts(granite_like_spec(config, max_model_len), config)


def _swa_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = _config(config)
    layers = granite_swa_layers(config, max_model_len)
    spec = granite_like_spec(config, max_model_len, attention={"sinks": True}, **layers)
    return _with_experts(spec, config)


_NAMES = Names(
    moe=MoeNames(
        router="block_sparse_moe.router.layer.weight",
        expert=None,
        all_gate_up=("block_sparse_moe.input_linear.weight",),
        all_down="block_sparse_moe.output_linear.weight",
        shared_gate_up=("shared_mlp.input_linear.weight",),
        shared_down="shared_mlp.output_linear.weight",
    )
)
_SWA_NAMES = Names(
    moe=MoeNames(
        router="block_sparse_moe.router.weight",
        expert=None,
        all_gate_up=("block_sparse_moe.experts.gate_up_proj",),
        all_down="block_sparse_moe.experts.down_proj",
        shared_gate_up=_NAMES.moe.shared_gate_up,
        shared_down=_NAMES.moe.shared_down,
    )
)
FAMILIES = (
    Family(
        architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        spec_from_config=_spec,
        names=_NAMES,
    ),
    Family(
        architectures=("GraniteMoeSWAForCausalLM",), spec_from_config=_swa_spec, names=_SWA_NAMES
    ),
)
