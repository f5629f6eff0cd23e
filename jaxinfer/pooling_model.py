"""Whether an engine writes tokens or makes vectors, and how: from a checkpoint's files and what a user asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.engine_args import EngineArgs
from jaxinfer.models.encoders.families import Purpose, class_labels
from jaxinfer.models.encoders.registry import EncoderDescription
from jaxinfer.models.registry import ModelDescription, find_family
from jaxinfer.pooler_config import ClassActivation, PoolerConfig, with_given
from jaxinfer.weights.sentence_transformers import SentenceTransformersFiles

Config = Mapping[str, Any]

_TASKS: dict[str, tuple[str, ...]] = {
    "embed": ("embed", "token_embed"),
    "classify": ("classify", "token_classify"),
    "token_classify": ("token_classify",),
}
"""By what a model is for."""


def encoder_pooler(
    args: EngineArgs,
    config: Config,
    model: EncoderDescription,
    files: SentenceTransformersFiles | None,
) -> PoolerConfig:
    """Raises `ValueError` where the arguments ask for something else than an encoder does."""
    if args.runner == "generate":
        raise ValueError("runner='generate' can't be had of an encoder; use 'pooling' or 'auto'.")
    if args.convert not in ("auto", "none", model.purpose):
        raise ValueError(
            f"convert={args.convert!r} can't be had of this encoder, which is one for {model.purpose!r}."
        )
    return _pooler(
        args,
        config,
        files,
        default="CLS",
        tasks=_TASKS[model.purpose],
        embed_dim=model.spec.embed_dim,
        is_encoder=True,
    )


_ENDINGS: dict[str, Purpose] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "Model": "embed",
}
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def decoder_purpose(
    args: EngineArgs, config: Config, files: SentenceTransformersFiles | None
) -> Purpose | None:
    """What vectors a decoder is to make; None: it writes tokens.

    By itself that is what its architecture is called after, and a model with a head for tokens makes embeddings where
    sentence-transformers' files say how. Raises `ValueError` where the arguments ask for what there isn't.
    """
    name = (config.get("architectures") or [""])[0]
    ending = next((end for end in _ENDINGS if name.endswith(end)), None)
    if find_family(config) is not None:
        purpose: Purpose | None = None
        wants = args.runner == "pooling" or args.convert == "embed"
        if wants or (args.runner == "auto" and args.convert == "auto" and files is not None):
            purpose = "embed"
    elif ending is not None:
        purpose = _ENDINGS[ending]
        if args.runner == "generate":
            raise ValueError(
                f"runner='generate' can't be had of a {name}, which has no head for tokens."
            )
    else:
        return None
    if args.convert not in ("auto", "none", purpose or "none") or (
        args.runner == "generate" and purpose is not None
    ):
        raise ValueError(
            f"convert={args.convert!r} with runner={args.runner!r} can't be had of a {name}."
        )
    return purpose


def causal_config(config: Config) -> dict[str, Any]:
    """The config of the same model with a head for tokens, by which families know it. Raises `ValueError` where there is no
    such family."""
    name = config["architectures"][0]
    base = next((name.removesuffix(end) for end in _ENDINGS if name.endswith(end)), None)
    if find_family(config) is None and base is not None:
        for ending in _CAUSAL:
            found = {**config, "architectures": [base + ending]}
            if find_family(found) is not None:
                return found
    return dict(config)


def pooling_description(model: ModelDescription) -> ModelDescription:
    """The model without its head for tokens."""
    return replace(
        model,
        spec=replace(model.spec, tied_head=True, head_bias=False),
        ignored_tensors=(*model.ignored_tensors, r"(.*\.)?lm_head\..*", r"score\..*"),
    )


def decoder_pooler(
    args: EngineArgs,
    config: Config,
    model: ModelDescription,
    purpose: Purpose,
    files: SentenceTransformersFiles | None,
) -> PoolerConfig:
    """Raises `ValueError` for a pooling that a decoder doesn't have."""
    pooler = _pooler(
        args,
        config,
        files,
        default="LAST",
        tasks=_TASKS[purpose],
        embed_dim=model.spec.embed_dim,
        is_encoder=False,
    )
    if pooler.pooling_type == "CLS":
        raise ValueError(
            "pooling_type 'CLS' is not for a decoder, whose first token sees no other; use 'LAST' or 'MEAN'."
        )
    return pooler


def _pooler(
    args: EngineArgs,
    config: Config,
    files: SentenceTransformersFiles | None,
    *,
    default: Any,
    tasks: tuple[str, ...],
    embed_dim: int,
    is_encoder: bool,
) -> PoolerConfig:
    """What a user chooses counts most, then what the checkpoint says."""
    has_classes = "token_classify" in tasks
    labels = tuple(class_labels(config)) if has_classes else ()
    dimensions = tuple(config.get("matryoshka_dimensions") or ())
    pooler = PoolerConfig(
        pooling_type=(files and files.pooling_type) or default,
        tasks=tasks,
        embed_dim=embed_dim,
        use_activation=files.normalize if files and not has_classes else True,
        activation=_class_activation(config, len(labels)),
        labels=labels,
        is_matryoshka=bool(config.get("is_matryoshka") or dimensions),
        matryoshka_dimensions=dimensions,
        is_encoder=is_encoder,
        lowercase=bool(files and files.lowercase),
    )
    return with_given(pooler, args.given_pooler)


def _class_activation(config: Config, num_classes: int) -> ClassActivation:
    """Of `problem_type`, or as sentence-transformers' cross-encoders name it: a class of torch."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        by_class: dict[str, ClassActivation] = {
            "Sigmoid": "sigmoid",
            "Identity": "identity",
            "Softmax": "softmax",
        }
        kind = str(named).rsplit(".", 1)[-1]
        if kind not in by_class:
            raise ValueError(
                f"activation_fn {named!r} is not supported; supported: {', '.join(by_class)}."
            )
        return by_class[kind]
    match config.get("problem_type"):
        case "regression":
            return "identity"
        case "multi_label_classification":
            return "sigmoid"
    return "sigmoid" if num_classes == 1 else "softmax"
