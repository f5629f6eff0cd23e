"""Which encoders there are: their configs as an `EncoderSpec`, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxinfer.models.encoders.spec import EncoderSpec, HeadSpec
from jaxinfer.models.family import Config, activation, refuse
from jaxinfer.weights.plan import LeafPath, LeafSource, LoadPlan

Purpose = Literal["embed", "classify", "token_classify"]


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Linear layers and norms of one layer, without their endings ".weight" and ".bias"."""

    layer: str
    """With its number as {}."""
    qkv: tuple[str, str, str]
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


_BERT_LAYER = LayerNames(
    "encoder.layer.{}.",
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_DISTILBERT_LAYER = LayerNames(
    "transformer.layer.{}.",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """`dense` and `classes` name the head's two layers. `fields`: of the config, where they aren't called as BERT's."""

    prefix: str
    layer: LayerNames
    dense: str
    classes: str
    dense_activation: Literal["tanh", "relu"] = "tanh"
    positions_after_padding: bool = False
    """Positions count from the one after the padding token's id."""
    fields: dict[str, str] = field(default_factory=dict)
    has_types: bool = True

    def spec(self, config: Config, purpose: Purpose) -> EncoderSpec:
        named = {bert: config[ours] for bert, ours in self.fields.items() if ours in config}
        config = {"layer_norm_eps": 1e-12, **config, **named}
        refuse(config, position_embedding_type="absolute", is_decoder=False)
        head = None
        if purpose != "embed":
            dense = self.dense_activation if purpose == "classify" else None
            head = HeadSpec(len(class_labels(config)), dense)
        return EncoderSpec(
            vocab_size=config["vocab_size"],
            embed_dim=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            mlp_dim=config["intermediate_size"],
            activation=activation(config, default="gelu"),
            norm_eps=config["layer_norm_eps"],
            num_positions=config["max_position_embeddings"],
            first_position=config.get("pad_token_id", 1) + 1 if self.positions_after_padding else 0,
            num_types=config.get("type_vocab_size", 2) if self.has_types else 0,
            head=head,
        )

    def plan(self, spec: EncoderSpec, tensors: Collection[str]) -> LoadPlan:
        """`tensors`: of the checkpoint; those of a bare encoder lack the family's prefix."""
        has_prefix = any(name.startswith(self.prefix) for name in tensors) or not tensors
        prefix = self.prefix if has_prefix else ""
        E, N, H, M = spec.embed_dim, spec.num_heads, spec.head_dim, spec.mlp_dim
        embeddings = f"{prefix}embeddings."

        def one(name: str, *shape: int) -> LeafSource:
            return LeafSource((f"{embeddings}{name}.weight",), (shape,))

        plan: LoadPlan = {
            ("embed",): one("word_embeddings", spec.vocab_size, E),
            ("position_embed",): one("position_embeddings", spec.num_positions, E),
            **_norm((), "embed_norm", f"{embeddings}LayerNorm", E),
        }
        if spec.num_types:
            plan["type_embed",] = one("token_type_embeddings", spec.num_types, E)
        for i in range(spec.num_layers):
            names, path = self.layer, ("layers", str(i))
            at = prefix + names.layer.format(i)
            qkv = [at + name for name in names.qkv]
            plan |= {
                (*path, "qkv"): _reshaped([f"{n}.weight" for n in qkv], (E, E), (3, N, H, E)),
                (*path, "qkv_bias"): _reshaped([f"{n}.bias" for n in qkv], (E,), (3, N, H)),
                (*path, "out"): _reshaped([f"{at}{names.out}.weight"], (E, E), (E, N, H)),
                (*path, "out_bias"): LeafSource((f"{at}{names.out}.bias",), ((E,),)),
                **_linear(path, "up", at + names.up, M, E),
                **_linear(path, "down", at + names.down, E, M),
                **_norm(path, "attention_norm", at + names.attention_norm, E),
                **_norm(path, "mlp_norm", at + names.mlp_norm, E),
            }
        if spec.head is not None:
            if spec.head.dense is not None:
                plan |= _linear((), "dense", self.dense, E, E)
            classes = self.classes if spec.head.dense else "classifier"
            plan |= _linear((), "classes", classes, spec.head.num_classes, E)
        return plan

    def ignored(self, spec: EncoderSpec) -> tuple[str, ...]:
        """Regular expressions of tensors that checkpoints hold and this model has no use for."""
        has_head = spec.head is not None and spec.head.dense is not None
        heads = () if has_head else (r"(\w+\.)?pooler\..*",)
        return (r".*position_ids", r"cls\..*", r"lm_head\..*", r"vocab_\w+\..*", *heads)


def _linear(path: LeafPath, leaf: str, name: str, out_size: int, in_size: int) -> LoadPlan:
    return {
        (*path, leaf): LeafSource((f"{name}.weight",), ((out_size, in_size),)),
        (*path, f"{leaf}_bias"): LeafSource((f"{name}.bias",), ((out_size,),)),
    }


def _norm(path: LeafPath, leaf: str, name: str, size: int) -> LoadPlan:
    """The oldest checkpoints say gamma and beta."""

    def source(new: str, old: str) -> LeafSource:
        older = LeafSource((f"{name}.{old}",), ((size,),))
        return LeafSource((f"{name}.{new}",), ((size,),)).or_else(older)

    return {
        (*path, leaf): source("weight", "gamma"),
        (*path, f"{leaf}_bias"): source("bias", "beta"),
    }


def _reshaped(names: list[str], each: tuple[int, ...], shape: tuple[int, ...]) -> LeafSource:
    def assemble(tensors: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(tensors).reshape(shape)

    return LeafSource(tuple(names), (each,) * len(names), assemble)


def class_labels(config: Config) -> list[str]:
    """By class; Hugging Face's default is two of them."""
    labels = {int(i): str(label) for i, label in (config.get("id2label") or {}).items()}
    count = len(labels) or config.get("num_labels", 2)
    return [labels.get(i, f"LABEL_{i}") for i in range(count)]


BERT = EncoderFamily("bert.", _BERT_LAYER, "bert.pooler.dense", "classifier")
ROBERTA = EncoderFamily(
    "roberta.",
    _BERT_LAYER,
    "classifier.dense",
    "classifier.out_proj",
    positions_after_padding=True,
)
DISTILBERT = EncoderFamily(
    "distilbert.",
    _DISTILBERT_LAYER,
    "pre_classifier",
    "classifier",
    dense_activation="relu",
    fields={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    },
    has_types=False,
)

_SUFFIXES: dict[str, Purpose] = {
    "Model": "embed",
    "ForMaskedLM": "embed",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
}

ENCODERS: dict[str, tuple[EncoderFamily, Purpose]] = {
    name + suffix: (family, purpose)
    for name, family in {
        "Bert": BERT,
        "Roberta": ROBERTA,
        "XLMRoberta": ROBERTA,
        "Camembert": ROBERTA,
        "DistilBert": DISTILBERT,
    }.items()
    for suffix, purpose in _SUFFIXES.items()
}
"""By architecture."""
