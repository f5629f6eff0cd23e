"""A GGUF's metadata as the configuration that Hugging Face would write for the same model."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxinfer.weights.gguf_file import GGUFFile
from jaxinfer.weights.reader import CheckpointError

ARCHITECTURES = ("llama", "gemma3")

# Not in the metadata: llama.cpp's gemma3 has them in its code (src/models/gemma3.cpp).
_GEMMA3_LOCAL_ROPE_THETA = 10000.0
_GEMMA3_SLIDING_WINDOW_PATTERN = 6
_GEMMA3_27B_LAYERS = 62


def architecture_of(file: GGUFFile) -> str:
    """Raises `CheckpointError` for an architecture that isn't supported, and names those that are."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds a model of architecture {name!r}; as GGUF, {', '.join(ARCHITECTURES)} are supported."
        )
    return name


class _Fields:
    """The metadata under the architecture's prefix; numbers as Python numbers."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.prefix = file, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        # The file has float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file.path} lacks the metadata {self.prefix}.{key}.")
        return value


def config_of(file: GGUFFile) -> dict[str, Any]:
    """`config.json` of the model. Raises `CheckpointError` where the metadata doesn't say enough."""
    architecture = architecture_of(file)
    fields = _Fields(file, architecture)
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise CheckpointError(f"Tensor token_embd.weight is missing in {file.path}.")
    num_heads = fields.need("attention.head_count")
    hidden_size = fields.need("embedding_length")
    config = {
        "hidden_size": hidden_size,
        "intermediate_size": fields.need("feed_forward_length"),
        "num_hidden_layers": fields.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": fields.get("attention.key_length", hidden_size // num_heads),
        "rms_norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "max_position_embeddings": fields.need("context_length"),
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": checkpoint_dtype(file),
        **token_ids_of(file),
    }
    return config | (_llama(fields) if architecture == "llama" else _gemma3(fields, config))


def token_ids_of(file: GGUFFile) -> dict[str, int | list[int]]:
    """`bos_token_id`, `eos_token_id` (a list when there are several ends of a turn), `pad_token_id`, where known."""
    meta = file.metadata
    ids: dict[str, int | list[int]] = {}
    for name, key in (("bos", "bos"), ("pad", "padding")):
        if (value := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            ids[f"{name}_token_id"] = value
    ends = [meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def checkpoint_dtype(file: GGUFFile) -> str:
    """The dtype of the matrices; bfloat16 when any is quantized."""
    types = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    whole = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return whole[types.pop()] if len(types) == 1 and types <= whole.keys() else "bfloat16"


def _llama(fields: _Fields) -> dict[str, Any]:
    kind = fields.get("rope.scaling.type", "none")
    original = fields.get("rope.scaling.original_context_length", fields.need("context_length"))
    scaling: dict[str, Any] | None = None
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": fields.need("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
    elif kind != "none":
        raise CheckpointError(
            f"{fields.file.path} has rope scaling {kind!r}; linear and yarn are supported."
        )
    if (factors := rope_factors(fields.file)) is not None:
        # Llama 3's scaling comes as its outcome, one divisor per frequency: what "longrope" takes.
        scaling = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in fields.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in fields.file.tensors,
        "rope_scaling": scaling,
    }


def rope_factors(file: GGUFFile) -> list[float] | None:
    """Divisors of the rotary frequencies [head_dim / 2], where the file has them (Llama 3.1 and later)."""
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    return np.fromfile(file.path, "<f4", info.shape[0], offset=info.offset).tolist()


def _gemma3(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    layers, pattern = config["num_hidden_layers"], _GEMMA3_SLIDING_WINDOW_PATTERN
    scale_of = config["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:
        scale_of = config["hidden_size"] // config["num_attention_heads"]
    scaling = None
    if fields.get("rope.scaling.type") == "linear":
        scaling = {"rope_type": "linear", "factor": fields.need("rope.scaling.factor")}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rope_theta": fields.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": fields.get("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA),
        "rope_scaling": scaling,
        "sliding_window": fields.need("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(layers)
        ],
        "query_pre_attn_scalar": scale_of,
        "attn_logit_softcapping": fields.get("attn_logit_softcapping"),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
    }
