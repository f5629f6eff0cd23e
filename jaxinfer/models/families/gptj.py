"""EleutherAI's GPT-J, and Salesforce's CodeGen in its form: attention and MLP side by side behind one norm, neighbouring
elements rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxinfer.models.checkpoint_layout import Names, decoder_plan
from jaxinfer.models.families.gpt2 import GPT_FIELDS
from jaxinfer.models.family import (
    Config,
    Family,
    head_dim,
    llama_like_spec,
    plain_mlp,
    renamed,
)
from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec, NormSpec
from jaxinfer.weights.plan import LoadPlan

_NAMES = Names(
    prefix="transformer.",
    embed="wte",
    norm="ln_f",
    layer="h.{}.",
    qkv=tuple(f"attn.{x}_proj" for x in "qkv"),
    interleaved_rope=True,
    o="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    attention_norm="ln_1",
)
_BUFFERS = (r".*\.attn\.(masked_)?bias", r".*\.attn\.causal_mask", r".*\.attn\.embed_positions")
_NUM_BLOCKS = 4
"""CodeGen's queries, values and keys are interleaved in as many blocks as the model was trained on devices."""


def spec_from_config(config: Config, max_model_len: int | None) -> DecoderSpec:
    config = renamed(
        config, GPT_FIELDS, hidden_act="gelu_new", layer_norm_epsilon=1e-5, rotary_dim=64
    )
    config["partial_rotary_factor"] = config["rotary_dim"] / head_dim(config)
    return llama_like_spec(
        config,
        max_model_len,
        mlp=plain_mlp(config),
        norm=NormSpec("layer", config["layer_norm_epsilon"], has_bias=True),
        norms="parallel_shared",
        head_bias=True,
    )


def _codegen_plan(config: Config, spec: DecoderSpec, dims: ShardedDims) -> LoadPlan:
    plan = decoder_plan(spec, dims, replace(_NAMES, qkv=("attn.qkv_proj",)))

    def unblocked(tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        blocks = tensors[0].reshape(_NUM_BLOCKS, 3, -1, spec.embed_dim)
        q, v, k = blocks.swapaxes(0, 1)
        return [np.concatenate([x.reshape(-1, spec.embed_dim) for x in (q, k, v)])]

    for path, source in plan.items():
        if path[-1] == "qkv":
            stacked = source.assemble
            plan[path] = replace(
                source, assemble=lambda tensors, stacked=stacked: stacked(unblocked(tensors))
            )
    return plan


FAMILIES = (
    Family(
        architectures=("GPTJForCausalLM",),
        spec_from_config=spec_from_config,
        names=_NAMES,
        other_tensors=_BUFFERS,
    ),
    Family(
        architectures=("CodeGenForCausalLM",),
        spec_from_config=spec_from_config,
        checkpoint_plan=_codegen_plan,
        other_tensors=_BUFFERS,
    ),
)
