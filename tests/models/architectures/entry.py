"""An architecture to be proven: a tiny config for transformers, and the random checkpoint that it makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

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


PROMPTS = [
    np.random.default_rng(1).integers(3, 97, 21).tolist(),
    np.random.default_rng(2).integers(3, 97, 10).tolist(),
]
NUM_NEW_TOKENS = 32
MIN_DISTINCT = 4
"""Different tokens among a prompt's new ones: a model that repeats itself would prove little."""
_MAX_SEEDS = 16


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
    """Of the random matrices: activations stay of order one. Larger by turns where greedy tokens don't vary."""
    attention: str = "eager"
    """transformers' implementation."""

    @property
    def name(self) -> str:
        return f"{self.model_type}-{self.variant}" if self.variant else self.model_type

    def digest(self) -> str:
        """Of everything that makes the checkpoint, but transformers and this file."""
        return hashlib.sha256(
            json.dumps(dataclasses.astuple(self), default=str).encode()
        ).hexdigest()


def entry(model_type: str, variant: str = "", /, **config: Any) -> Entry:
    """`embed_deviation`, `gain` and `attention` go to the entry, all other keywords to the config."""
    own = {k: config.pop(k) for k in ("embed_deviation", "gain", "attention") if k in config}
    return Entry(model_type, variant, config, **own)


def transformers_config(wanted: Entry) -> tuple[Any, Any]:
    """The class of the model and its config."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = CONFIG_MAPPING[wanted.model_type]
    changes = deepcopy(wanted.config)  # transformers completes nested dicts where they are
    if "text_config" in changes:
        changes["text_config"] = COMMON | changes["text_config"]
    else:
        known = {f.name for f in dataclasses.fields(config_class)}
        known |= getattr(config_class, "attribute_map", {}).keys()
        changes = {k: v for k, v in COMMON.items() if k in known} | changes
    config = config_class(**changes)
    config._attn_implementation = wanted.attention
    config._experts_implementation = "eager"
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[wanted.model_type])
    if model_class.config_class is type(config.get_text_config()):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    return model_class, config


@cache
def transformers_model(wanted: Entry) -> Any:
    """The random model, in evaluation mode: of the first seed with which its greedy tokens vary."""
    import torch

    model_class, config = transformers_config(wanted)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some parameters stay as they are made
        model = model_class(config).eval()
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    for seed in range(_MAX_SEEDS):
        model.load_state_dict(start)
        gain = wanted.gain * (1, 1.5, 2, 0.6)[seed % 4]
        if _varies(_randomized(model, seed, gain, wanted.embed_deviation)):
            return model
    raise AssertionError(f"{wanted.name} repeats itself with every seed.")


def _varies(model: Any) -> bool:
    """Whether the greedy tokens after each prompt do."""
    import torch

    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = list(prompt)
            for i in range(NUM_NEW_TOKENS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
                if i == NUM_NEW_TOKENS // 2 and len(set(tokens[-i:])) < MIN_DISTINCT // 2:
                    return False
            if len(set(tokens[-NUM_NEW_TOKENS:])) < MIN_DISTINCT:
                return False
    return True


@cache
def checkpoint(wanted: Entry) -> Path:
    """Directory of the float32 checkpoint as transformers saves it; written once per process."""
    directory = Path(_directory().name) / wanted.name
    transformers_model(wanted).save_pretrained(directory)
    return directory


def _randomized(model: Any, seed: int, gain: float, embed_deviation: float) -> Any:
    """Weights that leave no feature idle: no bias is zero and no norm weight one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
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
                weight.copy_(embed_deviation * noise)
            elif "embed" in name or "wpe" in parts:
                weight.copy_(noise)
            else:
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            # Of routers. Others that are called so are masks.
            if name.endswith("_bias") and not name.endswith("masked_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="architectures-")
