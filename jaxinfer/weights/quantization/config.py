"""`quantization_config` of a checkpoint's config.json: which module is stored how."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.weights.quantization.awq import Awq
from jaxinfer.weights.quantization.bitsandbytes import BitsAndBytes4Bit
from jaxinfer.weights.quantization.compressed_tensors import METHOD as COMPRESSED_TENSORS
from jaxinfer.weights.quantization.compressed_tensors import scheme_of_group
from jaxinfer.weights.quantization.fields import need, refuse
from jaxinfer.weights.quantization.fp8 import Fp8
from jaxinfer.weights.quantization.gptq import Gptq
from jaxinfer.weights.quantization.mxfp4 import Mxfp4
from jaxinfer.weights.quantization.scheme import Scheme

METHODS = ("awq", "bitsandbytes", COMPRESSED_TENSORS, "fp8", "gptq", "mxfp4")
"""Values of `quant_method` that are read."""

_ONE_SCHEME: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "awq": Awq.from_config,
    "bitsandbytes": BitsAndBytes4Bit.from_config,
    "fp8": Fp8.from_config,
    "gptq": Gptq.from_config,
    "mxfp4": lambda config: Mxfp4(),
}
_EMBEDDINGS = re.compile(r"(.*\.)?(embed_tokens|embed_in|embeddings?|word_embeddings|wte)")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """`schemes`: what a module's tensors may be stored as, each with the targets that name the modules ("Linear",
    "Embedding", a module's name or "re:" and a regular expression of it). Modules that `ignored` names aren't quantized.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig | None:
        """None for a model that isn't quantized. Raises `ValueError` naming the field that isn't supported."""
        text = config.get("text_config") or {}
        found = config.get("quantization_config") or text.get("quantization_config")
        found = found or config.get("compression_config")
        if not found:
            return None
        method = str(need(found, "quant_method"))
        if method not in METHODS:
            raise ValueError(
                f"quantization_config: quant_method {method!r} is not supported; supported: {', '.join(METHODS)}."
            )
        if method == COMPRESSED_TENSORS:
            return cls(method, _groups(found), _names(found.get("ignore")))
        ignored = (
            found.get("modules_to_not_convert")
            or found.get("ignored_layers")
            or found.get("llm_int8_skip_modules")
        )
        schemes = ((("Linear",), _ONE_SCHEME[method](found)),)
        return cls(method, schemes, _names(ignored))

    def scheme_of(self, module: str) -> Scheme | None:
        """What a module would be stored as, None where it is not quantized."""
        if any(_ignores(name, module) for name in self.ignored):
            return None
        kind = "Embedding" if _EMBEDDINGS.fullmatch(module) else "Linear"
        for matches in (
            lambda target: target == module,
            lambda target: target.startswith("re:") and re.match(target[3:], module),
            lambda target: target == kind,
        ):
            for targets, scheme in self.schemes:
                if any(matches(target) for target in targets):
                    return scheme
        return None


def _ignores(name: str, module: str) -> bool:
    """A name stands for itself and for what is beneath it, wherever that stands; "re:" begins a regular expression."""
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return f".{name}." in f".{module}."


def _names(value: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(value or ())


def _groups(config: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], Scheme], ...]:
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        refuse("quantization_status", status, "'compressed'", COMPRESSED_TENSORS)
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        refuse("sparsity_config.format", sparsity, "'dense'", COMPRESSED_TENSORS)
    if config.get("transform_config"):
        refuse("transform_config", config["transform_config"], "null", COMPRESSED_TENSORS)
    default = config.get("format", "pack-quantized")
    return tuple(
        (_names(group.get("targets", ["Linear"])), scheme_of_group(group, default))
        for group in need(config, "config_groups").values()
    )
