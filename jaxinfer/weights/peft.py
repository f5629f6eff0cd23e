"""Low-rank adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.weights.reader import CheckpointError
from jaxinfer.weights.safetensors import read_file, read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_REFUSED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "monteclora_config",
    "kasa_config",
    "velora_config",
)
"""Of the config: what changes more than a product of two matrices can, or computes it otherwise."""
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")
"""Those that leave the base model's weights as they are."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update `b` @ `a` of a matrix [out, in]: `a` [r, in], and `b` [out, r] with the adapter's scale in it, float32."""

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """`updates` by the name of the base model's module. `key` is a digest of both files: equal for equal contents."""

    key: str
    updates: dict[str, LowRank]


def read_adapter(directory: Path, max_rank: int) -> PeftAdapter:
    """Raises `CheckpointError` where there is no such adapter, or one that isn't supported: the message names the file,
    and the field or tensor."""
    config_path, weights_path = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    config = read_json(config_path)
    if config is None:
        raise CheckpointError(f"lora_path must be a folder with an {CONFIG_NAME}: {directory}.")
    _check_config(config, config_path)
    if not weights_path.is_file():
        old = directory / "adapter_model.bin"
        hint = f" {old.name} may run code when it is read: save it anew." if old.exists() else ""
        raise CheckpointError(f"{directory} has no {WEIGHTS_NAME}.{hint}")
    digest = hashlib.sha256(config_path.read_bytes())
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in read_file(weights_path, digest.update).items():
        module, side = _module_of(name, weights_path)
        pairs.setdefault(module, {})[side] = tensor
    if not pairs:
        raise CheckpointError(f"{weights_path} holds no tensors.")
    return PeftAdapter(
        digest.hexdigest(),
        {
            module: _update(module, pair, config, max_rank, weights_path)
            for module, pair in pairs.items()
        },
    )


def _check_config(config: dict[str, Any], path: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f'{path}: peft_type must be "LORA", got {kind!r}.')
    for name in _REFUSED:
        if config.get(name):
            raise CheckpointError(f"{path}: {name}={config[name]!r} is not supported.")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f'{path}: bias must be "none", got {config["bias"]!r}.')
    how = config.get("init_lora_weights", True)
    if how not in _INITIALIZATIONS:
        raise CheckpointError(
            f"{path}: init_lora_weights={how!r} changes the base model's weights; supported are "
            f"{_INITIALIZATIONS}, and adapters that PEFT has converted to one of these."
        )


def _module_of(tensor: str, path: Path) -> tuple[str, str]:
    """The module that a tensor belongs to, and "lora_A" or "lora_B"."""
    match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])\.weight", tensor)
    if match is None:
        raise CheckpointError(
            f"{path} holds tensor {tensor}, which is not supported; supported are *.lora_A.weight and "
            "*.lora_B.weight of linear layers."
        )
    return match[1], match[2]


def _update(
    module: str,
    pair: dict[str, np.ndarray],
    config: dict[str, Any],
    max_rank: int,
    path: Path,
) -> LowRank:
    name = f"{_PREFIX}{module}"
    if len(pair) < 2:
        (there,) = pair
        raise CheckpointError(f"{path} lacks one of the pair of tensor {name}.{there}.weight.")
    a, b = pair["lora_A"], pair["lora_B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"{path}: {name}.lora_A.weight has shape {a.shape} and lora_B.weight {b.shape}; they must be "
            "[r, in] and [out, r]."
        )
    rank = _of_module(config.get("rank_pattern"), module, config.get("r"))
    alpha = _of_module(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    for field, value in (("r", rank), ("lora_alpha", alpha)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path.parent / CONFIG_NAME}: {field} of {module} is {value!r}.")
    if a.shape[0] != rank:
        raise CheckpointError(
            f"{path}: {name}.lora_A.weight has shape {a.shape}, but the config says rank {rank}."
        )
    if rank > max_rank:
        raise CheckpointError(
            f"{path}: {name}.lora_A.weight has rank {rank}; max_lora_rank is {max_rank}."
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a.astype(np.float32), b.astype(np.float32) * np.float32(scale))


def _of_module(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's patterns are regular expressions of the end of a module's name; the first that fits counts."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
