"""Flags of adapters that are served from the start."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jaxinfer.engine_args import EngineArgs

RUNTIME_VARIABLE = "JAXINFER_ALLOW_RUNTIME_LORA_UPDATING"


def add_adapter_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("served adapters").add_argument(
        "--lora-modules",
        nargs="+",
        type=_module,
        default=[],
        metavar="NAME=PATH",
        help='adapters that requests may name as their model, or JSON objects with "name" and "path"; needs --enable-lora',
    )


def adapter_settings(parsed: argparse.Namespace, args: EngineArgs) -> dict[str, Any]:
    """Fields of `ServerSettings`. Raises `ValueError` where they can't be served."""
    modules: list[dict[str, str]] = parsed.lora_modules
    if modules and not args.enable_lora:
        raise ValueError("lora_modules need enable_lora.")
    models = parsed.served_model_names or [args.model]
    names = [module["name"] for module in modules]
    for module in modules:
        name, base = module["name"], module.get("base_model_name")
        if names.count(name) > 1 or name in models:
            raise ValueError(f"lora_modules: {name!r} is the name of something else too.")
        if base not in (None, args.model, *models):
            raise ValueError(
                f"lora_modules: base_model_name of {name!r} is {base!r}, the model is {models[0]!r}."
            )
    return {"lora_modules": tuple((module["name"], module["path"]) for module in modules)}


def _module(text: str) -> dict[str, str]:
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        module: Any = {"name": name, "path": path}
    else:
        try:
            module = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    known = {"name", "path", "base_model_name"}
    if not {"name", "path"} <= module.keys() <= known or not all(
        isinstance(value, str) and value for value in module.values()
    ):
        raise argparse.ArgumentTypeError(
            f'{text!r} is neither NAME=PATH nor a JSON object with "name" and "path"'
        )
    return module
