"""Random adapters of the tiny checkpoint in PEFT's format, and what transformers makes of a model that has one merged in."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.tiny_checkpoints import tiny_model
from tests.tiny_llm import NAME

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def modules(targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The shapes [out, in] of the tiny model's linear layers of these names."""
    return {
        name: tuple(module.weight.shape)
        for name, module in tiny_model(NAME).named_modules()
        if name.split(".")[-1] in targets
    }


def write_adapter(
    directory: Path,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ATTENTION + MLP,
    tensors: dict[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """`tensors` replace or add to the random ones, by their full names."""
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    } | config
    random, made = np.random.default_rng(seed), {}
    patterns = written.get("rank_pattern", {})
    for module, (out, into) in modules(targets).items():
        r = next((patterns[p] for p in patterns if module.endswith(p)), rank)
        prefix = f"base_model.model.{module}"
        made[f"{prefix}.lora_A.weight"] = random.normal(size=(r, into)) / into**0.5
        made[f"{prefix}.lora_B.weight"] = 0.5 * random.normal(size=(out, r)) / r**0.5
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(written))
    arrays = {name: x.astype(np.float32) for name, x in (made | (tensors or {})).items()}
    save_file(arrays, directory / "adapter_model.safetensors")
    return directory


def merged_model(directory: str | Path, scales: dict[str, float]) -> Any:
    """The tiny model with `W + scale * B @ A`; `scales` are by the end of a module's name, "" for all others."""
    from safetensors.numpy import load_file

    model = copy.deepcopy(tiny_model(NAME))
    tensors = load_file(Path(directory) / "adapter_model.safetensors")
    weights = dict(model.named_modules())
    with torch.no_grad():
        for name in tensors:
            if not name.endswith("lora_A.weight"):
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = next(scales[end] for end in scales if module.endswith(end))
            update = tensors[name.replace("lora_A", "lora_B")].astype(np.float64) @ tensors[name]
            weights[module].weight += torch.from_numpy(scale * update).float()
    return model


def logits_of(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """[len(token_ids), V], in float64."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].double().numpy()
