"""Command-line flags: one per field of `EngineArgs`, and one per sampling parameter that can be typed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

from jaxinfer.engine_args import EngineArgs
from jaxinfer.sampling_params import SamplingParams

_GROUPS: dict[str, dict[str, str]] = {
    "model": {
        "tokenizer": "id or path of the tokenizer, when it isn't the model's",
        "revision": "branch, tag or commit of a model on the hub",
        "download_dir": "where downloads are kept",
        "load_format": "auto, safetensors, gguf, orbax, or dummy for random weights",
        "quantization": "how the checkpoint must be quantized: awq, gptq, … (default: whatever it says)",
        "dequantize": "hold quantized weights in dtype (default: of GGUF files on a CPU)",
        "dtype": "auto (the checkpoint's), float32, bfloat16 or float16",
        "max_model_len": "longest request, prompt and output together (default: the model's limit)",
        "hf_overrides": "JSON object that replaces fields of the model's config.json",
        "generation_config": "auto: sampling defaults of the model; vllm: none; or a folder",
        "served_model_name": "name under which the model answers",
        "seed": "seed of requests that bring none",
        "max_logprobs": "most logprobs that a request may ask for",
        "logits_processors": "functions that requests may have applied to their logits",
        "logprobs_mode": "report log probabilities or logits, as the model gives them or after processing",
    },
    "vectors": {
        "runner": "auto, generate or pooling: write tokens, or make vectors",
        "convert": "auto, embed or classify: what a pooling model's vectors are; none: as the checkpoint has it",
        "pooler_config": 'JSON object: {"pooling_type": "CLS", "LAST" or "MEAN", "use_activation": …}',
        "override_pooler_config": "the old name of --pooler-config",
    },
    "memory": {
        "gpu_memory_utilization": "fraction of the device's memory to use, in (0, 1]",
        "kv_cache_dtype": "auto (the model's), float32, bfloat16, float16, or 8 bits: fp8 or int8",
        "kv_cache_memory_bytes": "size of the KV cache; accepts 512M, 2G, …",
        "num_gpu_blocks_override": "size of the KV cache in blocks",
        "block_size": "tokens per block of the KV cache",
        "enable_prefix_caching": "compute the equal beginnings of requests once (default: where the model allows it)",
        "disable_hybrid_kv_cache_manager": "keep all blocks of layers with a sliding window",
        "prefix_caching_hash_algo": "sha256, or xxhash: quicker, for prompts from people who trust each other",
    },
    "scheduling": {
        "max_num_seqs": "most requests that run at once",
        "max_num_batched_tokens": "most tokens in a step",
        "long_prefill_token_threshold": "longest chunk of a prompt in a step, 0 for no limit",
        "scheduling_policy": "fcfs, or priority: lower values first",
        "cache_aware_scheduling": "of requests of equal priority, the longest cached prefix first",
        "max_cache_overtakes": "how often a request may be overtaken for that",
        "async_scheduling": "launch a step before the tokens of the last one are read",
        "grammar_jump_ahead": "don't sample tokens that a grammar leaves no choice of",
        "grammar_jump_ahead_max_rows": "most requests in a step that does so (default: 8 on a CPU, 64 on a GPU)",
    },
    "adapters": {
        "enable_lora": "serve LoRA adapters of the model",
        "max_loras": "most adapters in a step",
        "max_lora_rank": "highest rank of an adapter",
        "max_cpu_loras": "most adapters in the host's memory, at least max_loras (default: max_loras)",
        "lora_dtype": "of their matrices: auto (the model's), float32, bfloat16 or float16",
        "fully_sharded_loras": "not supported",
    },
    "execution": {
        "disable_cascade_attn": "let each request attend to a beginning that it shares by itself",
        "cascade_min_rows": "fewest requests that attend to a shared beginning together",
        "cascade_min_tokens": "shortest beginning for which they do (default: 256 on a CPU, 1024 on a GPU)",
        "deterministic": "equal logits to the bit whatever shares the batch: docs/reproducibility.md",
        "speculative_config": 'JSON object that says how to draft tokens: {"method": "ngram", …}',
        "tensor_parallel_size": "number of devices that share each layer",
        "enable_expert_parallel": "they share the experts of a mixture, and not each expert's rows",
        "data_parallel_size": "number of engine cores behind the server, each with devices of its own (jaxinfer serve)",
        "data_parallel_rank": "number of this engine among several: requests without a seed get others on each",
        "warmup": "compile all programs at the start, or each when first needed",
        "compilation_cache_dir": "where compiled programs are kept",
    },
}

_SAMPLING: dict[str, str] = {
    "max_tokens": "longest output",
    "min_tokens": "shortest output",
    "temperature": "0 is greedy",
    "top_p": "keep the likeliest tokens whose probabilities sum to this, in (0, 1]",
    "top_k": "keep the k likeliest tokens, 0 for all",
    "min_p": "keep tokens at least this fraction as likely as the likeliest, in [0, 1]",
    "n": "outputs per prompt",
    "seed": "the same seed gives the same text",
    "repetition_penalty": "divides logits of tokens that occurred, > 0",
    "presence_penalty": "subtracted from logits of tokens in the output, in [-2, 2]",
    "frequency_penalty": "subtracted once per occurrence, in [-2, 2]",
    "ignore_eos": "generate on after the end of the text",
}

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_engine_args(
    parser: argparse.ArgumentParser,
    leave_out: Collection[str] = (),
    *,
    model_is_flag: bool = False,
    **defaults: Any,
) -> None:
    """`defaults` replace those of `EngineArgs` in the help text; `engine_args` takes them too."""
    if model_is_flag:
        parser.add_argument("--model", required=True, help="model id, folder or file")
    else:
        parser.add_argument("model", help="model id, folder or file")
    hints = typing.get_type_hints(EngineArgs)
    names = {field.name for field in dataclasses.fields(EngineArgs)} - {"model", *leave_out}
    described = {name for group in _GROUPS.values() for name in group}
    others = dict.fromkeys(sorted(names - described), "see EngineArgs")
    for title, group in [*_GROUPS.items(), ("other engine options", others)]:
        section = parser.add_argument_group(title)
        for name, text in group.items():
            if name == "logits_processors":
                _add_processors(section, text)
            elif name in names:
                default = defaults.get(name, _engine_default(name))
                _add_flag(section, name, hints[name], text, default)


def engine_args(parsed: argparse.Namespace, **defaults: Any) -> EngineArgs:
    """Raises `ValueError` for values that `EngineArgs` refuses."""
    return EngineArgs(
        **defaults
        | {
            field.name: getattr(parsed, field.name)
            for field in dataclasses.fields(EngineArgs)
            if hasattr(parsed, field.name)
        }
    )


def add_sampling_args(parser: argparse.ArgumentParser) -> None:
    """Their destinations start with `sampling_`, as the engine has a seed too."""
    section = parser.add_argument_group("sampling (default: the model's own)")
    hints = typing.get_type_hints(SamplingParams)
    for name, text in _SAMPLING.items():
        flag = "sampling_seed" if name == "seed" else name
        _add_flag(section, flag, hints[name], text, None, dest=f"sampling_{name}")
    section.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        dest="sampling_stop",
        metavar="TEXT",
        help="end the output before this text (may be repeated)",
    )


def sampling_params(
    parsed: argparse.Namespace, defaults: SamplingParams, **more: Any
) -> SamplingParams:
    """`defaults` with what was typed. Raises `ValueError` for values that `SamplingParams` refuses."""
    import msgspec

    typed = {
        name: getattr(parsed, f"sampling_{name}")
        for name in (*_SAMPLING, "stop")
        if hasattr(parsed, f"sampling_{name}")
    }
    return msgspec.structs.replace(defaults, **(more | typed))


def _engine_default(name: str) -> Any:
    field = next(f for f in dataclasses.fields(EngineArgs) if f.name == name)
    return None if field.default is dataclasses.MISSING else field.default


def _add_flag(
    section: Any, name: str, hint: Any, text: str, default: Any, dest: str | None = None
) -> None:
    """What isn't typed is left out of the parsed arguments, so that defaults stay in one place."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": dest or name}
    kind, choices = _kind(hint)
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = {int: _integer, dict: json_object}.get(kind, kind)
        options["choices"] = choices
        if choices is None:
            options["metavar"] = {int: "N", float: "X", dict: "JSON"}.get(kind, "TEXT")
    if default not in (None, ""):
        text = f"{text} (default: {default})"
    options["help"] = text.replace("%", "%%")
    section.add_argument("--" + name.replace("_", "-"), **options)


def _add_processors(section: Any, text: str) -> None:
    section.add_argument(
        "--logits-processors",
        nargs="+",
        type=_processor,
        action=_StoreByName,
        default=argparse.SUPPRESS,
        metavar="[NAME=]MODULE:FUNCTION",
        help=text,
    )


class _StoreByName(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        by_name = dict(values)
        if len(by_name) < len(values):
            raise argparse.ArgumentError(self, "two of them have the same name")
        setattr(namespace, self.dest, by_name)


def _processor(text: str) -> tuple[str, str]:
    """Its name, that of the function where none is given, and where it is found."""
    name, equals, path = text.rpartition("=")
    module, colon, function = path.partition(":")
    if not (module and colon and function) or (equals and not name):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form [NAME=]MODULE:FUNCTION")
    return name or function, path


def _kind(hint: Any) -> tuple[Callable[[str], Any], tuple[str, ...] | None]:
    """The type to read, and the allowed values of a Literal."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return str, typing.get_args(hint)
    return (origin or hint), None


def _integer(text: str) -> int:
    """Plain, or with a suffix: k, m, g, t are powers of 1000, K, M, G, T of 1024."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT])", text)
    if match is not None:
        return int(float(match[1]) * _SUFFIXES[match[2]])
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
