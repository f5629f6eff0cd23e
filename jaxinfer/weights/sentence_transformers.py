"""What sentence-transformers keeps beside a checkpoint: how its hidden states become one vector."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxinfer.weights.reader import CheckpointError
from jaxinfer.weights.safetensors import read_json

_MODES: dict[str, Literal["CLS", "LAST", "MEAN"]] = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
    "cls": "CLS",
    "lasttoken": "LAST",
    "mean": "MEAN",
}
_SUPPORTED = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class SentenceTransformersFiles:
    """`pooling_type` is None where no Pooling module is named; `max_seq_length` where the texts' length is the model's."""

    pooling_type: Literal["CLS", "LAST", "MEAN"] | None
    normalize: bool
    max_seq_length: int | None
    lowercase: bool


def read_sentence_transformers(directory: Path) -> SentenceTransformersFiles | None:
    """None where the checkpoint has no modules.json. Raises `ValueError` for modules and ways to pool that aren't
    supported."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    try:
        modules: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(str(module["type"]).rsplit(".", 1)[-1], module["path"]) for module in modules]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no list of modules: {error!r}.") from error
    unknown = [kind for kind, _ in kinds if kind not in _SUPPORTED]
    if unknown:
        raise CheckpointError(
            f"{path} has a module {unknown[0]}, which is not supported; supported: {', '.join(_SUPPORTED)}."
        )
    pooling = next((directory / where for kind, where in kinds if kind == "Pooling"), None)
    transformer = read_json(directory / "sentence_bert_config.json") or {}
    return SentenceTransformersFiles(
        pooling_type=None if pooling is None else _pooling_type(pooling / "config.json"),
        normalize=any(kind == "Normalize" for kind, _ in kinds),
        max_seq_length=transformer.get("max_seq_length"),
        lowercase=bool(transformer.get("do_lower_case")),
    )


def _pooling_type(path: Path) -> Literal["CLS", "LAST", "MEAN"]:
    """Newer files name one `pooling_mode`, older ones have a switch for each."""
    config = read_json(path)
    if config is None:
        raise CheckpointError(f"{path} is missing: modules.json names it.")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if isinstance(config.get("pooling_mode"), str):
        chosen = [config["pooling_mode"]]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise CheckpointError(
            f"{path}: the pooling {' and '.join(chosen) or 'none'} is not supported; supported: {', '.join(_MODES)}."
        )
    return _MODES[chosen[0]]
