"""An architecture to be proven: a tiny config for transformers, and the random checkpoint that it makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=50,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
"""What every config gets of these that its class knows. Sizes that no mesh divides, where a model allows them."""


@dataclass(frozen=True)
class Entry:
    """One config of a `model_type` of transformers' mapping of causal language models."""

    model_type: str
    variant: str
    config: dict[str, Any] = field(hash=False)
    """What differs from `COMMON`; a nested `text_config` takes `COMMON` for itself."""
    embed_deviation: float = 0.4
    """Of the random embedding. Less where a model scales it up, so that the layers are not drowned."""
    gain: float = 1.5
    """Of the random matrices. Activations stay of order one, and greedy tokens vary."""
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.model_type}-{self.variant}" if self.variant else self.model_type

    def digest(self) -> str:
        """Of everything that makes the checkpoint, but transformers and this file."""
        return hashlib.sha256(
            json.dumps(dataclasses.astuple(self), default=str).encode()
        ).hexdigest()


def entry(model_type: str, variant: str = "", /, **config: Any) -> Entry:
    """`embed_deviation`, `gain` and `seed` go to the entry, all other keywords to the config."""
    own = {k: config.pop(k) for k in ("embed_deviation", "gain", "seed") if k in config}
    return Entry(model_type, variant, config, **own)


@cache
def transformers_model(wanted: Entry) -> Any:
    """The random model, in evaluation mode."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = CONFIG_MAPPING[wanted.model_type]
    changes = dict(wanted.config)
    if "text_config" in changes:
        changes["text_config"] = COMMON | changes["text_config"]
    else:
        known = {f.name for f in dataclasses.fields(config_class)}
        known |= getattr(config_class, "attribute_map", {}).keys()
        changes = {k: v for k, v in COMMON.items() if k in known} | changes
    config = config_class(**changes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[wanted.model_type])
    return _randomized(model_class(config), wanted).eval()


@cache
def checkpoint(wanted: Entry) -> Path:
    """Directory of the float32 checkpoint as transformers saves it; written once per process."""
    directory = Path(_directory().name) / wanted.name
    transformers_model(wanted).save_pretrained(directory)
    return directory


def _randomized(model: Any, wanted: Entry) -> Any:
    """Weights that leave no feature idle: no bias is zero and no norm weight one."""
    import torch

    generator = torch.Generator().manual_seed(wanted.seed)
    embeddings = {id(model.get_input_embeddings().weight)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            parts = name.lower().split(".")
            if name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif weight.ndim < 2 or any("norm" in part or "ln_" in part for part in parts):
                weight.add_(0.3 * noise)
            elif id(weight) in embeddings:
                weight.copy_(wanted.embed_deviation * noise)
            elif "embed" in name or "wpe" in parts:
                weight.copy_(0.4 * noise)
            else:
                weight.copy_(wanted.gain * noise / weight.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="architectures-")
