"""Public EAGLE-3 checkpoints: what their configs say, and what they call their tensors."""

from __future__ import annotations

from collections.abc import Collection

from jaxinfer.models.checkpoint_layout import LLAMA_NAMES, attention_plan, mlp_plan, padded
from jaxinfer.models.drafters.eagle3 import Eagle3Spec, FunctionalEagle3
from jaxinfer.models.families.llama import spec_from_config
from jaxinfer.models.family import Config
from jaxinfer.models.sharded_dims import round_up
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.weights.plan import LeafSource, LoadPlan

ARCHITECTURES = ("LlamaForCausalLMEagle3",)
IGNORED_TENSORS = (r"(model\.)?t2d",)
_UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")
"""Switches of later variants: other norms around the fused hidden states."""


def eagle3_spec(config: Config, target: DecoderSpec, tensor_names: Collection[str]) -> Eagle3Spec:
    """Read a drafter's config and check it against its target.

    `tensor_names`: what the checkpoint holds, which decides about the embedding and the vocabulary's map. Raises
    `ValueError` for what doesn't fit the target or is not supported.
    """
    architectures = config.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        raise ValueError(
            f"An eagle3 drafter must be of architecture {' or '.join(ARCHITECTURES)}, got {architectures}."
        )
    for key in _UNSUPPORTED:
        if config.get(key):
            raise ValueError(f"{key} of an eagle3 drafter is not supported, got {config[key]!r}.")
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"num_hidden_layers of an eagle3 drafter must be 1, got {config['num_hidden_layers']}."
        )
    if config["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"The eagle3 drafter is for a vocabulary of {config['vocab_size']} tokens, the target's has "
            f"{target.vocab_size}."
        )
    target_dim = config.get("target_hidden_size") or config["hidden_size"]
    if target_dim != target.embed_dim:
        raise ValueError(
            f"The eagle3 drafter is for a target of hidden size {target_dim}, the target's is {target.embed_dim}."
        )
    own_embedding = _name("embed_tokens.weight", tensor_names) in tensor_names
    if not own_embedding and config["hidden_size"] != target.embed_dim:
        raise ValueError(
            f"The eagle3 drafter has hidden size {config['hidden_size']} and no embedding of its own; the target's "
            f"is {target.embed_dim} wide."
        )
    draft_vocab_size = config.get("draft_vocab_size") or target.vocab_size
    return Eagle3Spec(
        layer=spec_from_config(
            {
                **config,
                "vocab_size": draft_vocab_size,
                "num_hidden_layers": 1,
                "tie_word_embeddings": False,
            },
            None,
        ),
        target_vocab_size=target.vocab_size,
        target_dim=target_dim,
        stream_layers=_stream_layers(config, len(target.layers)),
        own_embedding=own_embedding,
        maps_vocabulary=draft_vocab_size != target.vocab_size
        or _name("d2t", tensor_names) in tensor_names,
        norm_before_residual=bool(config.get("norm_before_residual")),
    )


def _stream_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Layer i stands for the stream that enters it, as in the public heads."""
    key = "eagle_aux_hidden_state_layer_ids"
    layers = config.get(key) or (2, num_layers // 2, num_layers - 3)
    if not all(isinstance(i, int) and 0 <= i < num_layers for i in layers):
        raise ValueError(
            f"{key} must name layers of the target, 0 to {num_layers - 1}, got {list(layers)}."
        )
    return tuple(layers)


def eagle3_plan(model: FunctionalEagle3, tensor_names: Collection[str]) -> LoadPlan:
    """How each leaf is made, whichever of the names in use the checkpoint has."""
    spec, dims, layer = model.spec, model.dims, model.spec.layer
    E = layer.embed_dim

    def tensor(name: str) -> str:
        return _name(name, tensor_names)

    old, new = tensor("midlayer.hidden_norm.weight"), tensor("layers.0.hidden_norm.weight")
    prefix = (new if new in tensor_names else old).removesuffix("hidden_norm.weight")
    plan: LoadPlan = {
        ("fuse_streams",): LeafSource(
            (tensor("fc.weight"),), ((E, len(spec.stream_layers) * spec.target_dim),)
        ),
        ("norm",): LeafSource((tensor("norm.weight"),), ((E,),)),
        ("lm_head",): LeafSource(
            (tensor("lm_head.weight"),),
            ((layer.vocab_size, E),),
            padded(axis=0, size=dims.vocab_size),
        ),
    }
    for path, name in (
        ("embedding_norm", "input_layernorm"),
        ("hidden_norm", "hidden_norm"),
        ("mlp_norm", "post_attention_layernorm"),
    ):
        plan[path,] = LeafSource((f"{prefix}{name}.weight",), ((E,),))
    (block,) = layer.layers
    plan |= attention_plan(block.attention, E, dims, prefix, LLAMA_NAMES, input_dim=2 * E)
    plan |= mlp_plan(block.mlp, E, dims, prefix, LLAMA_NAMES)
    if spec.own_embedding:
        rows = round_up(spec.target_vocab_size, dims.tensor_parallel_size)
        plan["embed",] = LeafSource(
            (tensor("embed_tokens.weight"),),
            ((spec.target_vocab_size, E),),
            padded(axis=0, size=rows),
        )
    if spec.maps_vocabulary:
        plan["d2t",] = LeafSource((tensor("d2t"),), ((layer.vocab_size,),))
    return plan


def _name(name: str, tensor_names: Collection[str]) -> str:
    """`name` as the checkpoint has it: with the prefix "model." or without."""
    prefixed = f"model.{name}"
    return prefixed if prefixed in tensor_names else name
