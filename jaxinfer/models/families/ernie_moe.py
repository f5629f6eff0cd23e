"""Baidu's ERNIE 4.5 with experts."""

from __future__ import annotations

from jaxinfer.models.checkpoint_layout import Names
from jaxinfer.models.family import Config, Family, llama_like_spec, refuse, renamed
from jaxinfer.models.moe_family import moe_spec, with_experts
from jaxinfer.models.moe_layout import MoeNames
from jaxinfer.models.spec import DecoderSpec


def _ernie_spec(config: Config, max_model_len: int | None) -> DecoderSpec:
    refuse(config, use_bias=False)
    config = renamed(
        config, {}, rope_theta=500_000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
        moe_layer_interval=1,
    )  # fmt: skip
    num_layers, last = config["num_hidden_layers"], config["moe_layer_end_index"]
    last = num_layers - 1 if last == -1 else last
    first, step = config["moe_layer_start_index"], config["moe_layer_interval"]
    moe = moe_spec(
        config,
        config["moe_intermediate_size"],
        shared_dim=config["moe_intermediate_size"] * config["moe_num_shared_experts"],
        routing={"correction_bias": "scores", "renormalize": True, "float32": True},
    )
    sparse = [(i + 1) % step == 0 and first <= i <= last for i in range(num_layers)]
    return with_experts(llama_like_spec(config, max_model_len), moe, sparse)


FAMILIES = (
    Family(
        architectures=("Ernie4_5_MoeForCausalLM",),
        spec_from_config=_ernie_spec,
        names=Names(
            interleaved_rope=True,
            moe=MoeNames(correction_bias="mlp.moe_statics.e_score_correction_bias"),
        ),
        other_tensors=(r"model\.mtp_.*",),
    ),
)
