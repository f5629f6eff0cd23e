"""Stability AI's StableLM: partial rotation, layer norms, and a norm of each query and key head of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.models.checkpoint_layout import Names, decoder_plan
from jaxinfer.models.family import Config, Family, llama_like_spec, renamed
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec, NormSpec, QKNormSpec
from jaxinfer.weights.plan import LeafSource, LoadPlan

_NAMES = Names(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm")


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(config, {}, partial_rotary_factor=0.25, layer_norm_eps=1e-5)
    attention: dict[str, Any] = {"qkv_bias": config.get("use_qkv_bias", False)}
    if config.get("qk_layernorm", False):
        attention["qk_norm"] = QKNormSpec(
            NormSpec("layer", config["layer_norm_eps"]), over="own_head"
        )
    return llama_like_spec(
        config,
        max_model_len,
        attention=attention,
        norm=NormSpec("layer", config["layer_norm_eps"], has_bias=True),
        norms="parallel_shared" if config.get("use_parallel_residual", False) else "pre",
    )


def _plan(config: Config, spec: DecoderSpec, dims: ShardedDims) -> LoadPlan:
    plan = decoder_plan(spec, dims, _NAMES)
    for path, source in plan.items():
        if path[-1] in ("q_norm", "k_norm"):
            plan[path] = _of_heads(source)
    return plan


def _of_heads(source: LeafSource) -> LeafSource:
    """The same from a tensor for each head."""
    ((num_heads, dim),) = source.shapes
    tensor = source.names[0].removesuffix(".weight")
    return replace(
        source,
        names=tuple(f"{tensor}.norms.{i}.weight" for i in range(num_heads)),
        shapes=((dim,),) * num_heads,
        assemble=lambda tensors: source.assemble([np.stack(tensors)]),
    )


FAMILIES = (
    Family(
        architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
        spec_from_config=spec_from_config,
        checkpoint_plan=_plan,
    ),
)
