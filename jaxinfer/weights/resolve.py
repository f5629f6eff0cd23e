"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxinfer.weights.packaged import (
    PACKAGED_DIRECTORIES,
    PACKAGED_MODELS,
    packaged_directory,
    packaged_model,
)
from jaxinfer.weights.reader import CheckpointReader

Kind = Literal["hf", "gguf", "orbax"]

ORBAX_MARKER = "jaxinfer_orbax.json"
"""The file that tells a converted checkpoint from a Hugging Face directory."""

# owner/name as the hub allows it; also bare names of old models such as "gpt2".
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies: a directory ("hf", "orbax") or a file ("gguf")."""

    kind: Kind
    path: Path


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
) -> ModelFiles:
    """Files of `model`: a local directory or GGUF file, an alias of a packaged model, or an id of the Hugging Face hub,
    from its local cache or else downloaded (to `download_dir`).

    `load_format` "safetensors", "gguf" and "orbax" demand that kind; "dummy" needs no weights, so none are downloaded.
    Raises `ValueError` that names the model and what was tried.
    """
    if load_format not in ("auto", "safetensors", "gguf", "orbax", "dummy"):
        raise ValueError(
            f"load_format must be auto, safetensors, gguf, orbax or dummy, got {load_format!r}."
        )
    files = _find(model, revision, download_dir, load_format)
    wanted = {"safetensors": "hf", "gguf": "gguf", "orbax": "orbax"}.get(load_format, files.kind)
    if files.kind != wanted:
        raise ValueError(
            f"load_format is {load_format!r}, but {files.path} holds a checkpoint of kind {files.kind!r}."
        )
    return files


def open_checkpoint(files: ModelFiles) -> CheckpointReader:
    """A reader of the model's tensors. Raises `CheckpointError` where they can't be read, `ValueError` where they are
    quantized in a way that isn't supported."""
    if files.kind == "gguf":
        from jaxinfer.weights.gguf import GGUFReader

        return GGUFReader(files.path)
    if files.kind == "orbax":
        from jaxinfer.weights.orbax import OrbaxReader

        return OrbaxReader(files.path)
    from jaxinfer.weights.quantization.config import QuantizationConfig
    from jaxinfer.weights.quantization.reader import QuantizedReader
    from jaxinfer.weights.safetensors import SafetensorsReader

    stored = SafetensorsReader(files.path)
    quantization = QuantizationConfig.from_config(stored.config())
    return stored if quantization is None else QuantizedReader(stored, quantization)


def _find(
    model: str, revision: str | None, download_dir: str | None, load_format: str
) -> ModelFiles:
    if not model:
        raise ValueError("model must not be empty.")
    local = Path(model).expanduser()
    if local.exists():
        return _local(local)
    if model in PACKAGED_MODELS:
        return ModelFiles("gguf", packaged_model(model))
    if model in PACKAGED_DIRECTORIES:
        return ModelFiles("hf", packaged_directory(model))
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"Model {model!r}: no such file or directory, and it can't be an id of the Hugging Face hub."
        )
    return _local(_from_hub(model, revision, download_dir, load_format))


def _local(path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"Model {str(path)!r} is a file, but not a .gguf file.")
        return ModelFiles("gguf", path)
    if (path / ORBAX_MARKER).is_file():
        return ModelFiles("orbax", path)
    if (path / "config.json").is_file():
        return ModelFiles("hf", path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles("gguf", ggufs[0])
    held = (
        f"{len(ggufs)} .gguf files (name one of them)"
        if ggufs
        else "neither a config.json nor a .gguf file"
    )
    raise ValueError(f"Model {str(path)!r} is a directory that holds {held}.")


def _from_hub(model: str, revision: str | None, download_dir: str | None, load_format: str) -> Path:
    import huggingface_hub

    patterns = _TEXT_FILES if load_format == "dummy" else [*_TEXT_FILES, "*.safetensors"]
    where = {"revision": revision, "cache_dir": download_dir, "allow_patterns": patterns}
    try:
        cached = Path(huggingface_hub.snapshot_download(model, local_files_only=True, **where))
        if _is_complete(cached, load_format):
            return cached
        in_cache = f"the copy at {cached} lacks weights"
    except Exception as error:
        in_cache = _first_line(error)
    try:
        fetched = Path(huggingface_hub.snapshot_download(model, **where))
        if _is_complete(fetched, load_format):
            return fetched
        from_hub = "it holds no config.json with safetensors files, or the download is not complete"
    except Exception as error:
        from_hub = _first_line(error)
    aliases = ", ".join([*PACKAGED_MODELS, *PACKAGED_DIRECTORIES])
    raise ValueError(
        f"Model {model!r} was not found. Tried: a local path (none); the aliases {aliases} (not one "
        f"of them); the local Hugging Face cache ({in_cache}); the Hugging Face hub ({from_hub})."
    )


def _is_complete(path: Path, load_format: str) -> bool:
    """Whether a snapshot in the cache holds what a load needs: an interrupted download may lack shards."""
    if not (path / "config.json").is_file():
        return False
    if load_format == "dummy":
        return True
    from jaxinfer.weights.safetensors import INDEX_NAME, read_json

    index = read_json(path / INDEX_NAME)
    if index is None:
        return any(path.glob("*.safetensors"))
    return all((path / file).is_file() for file in set(index.get("weight_map", {}).values()))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
