"""Small GGUF files, made from Hugging Face tensors as llama.cpp's converter makes them (convert_hf_to_gguf.py)."""

from pathlib import Path

import gguf
import numpy as np

SIZES = {
    "hidden": 32,
    "mlp": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "vocab": 40,
}

LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA3_NAMES = LLAMA_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NAMES = {"llama": LLAMA_NAMES, "gemma3": GEMMA3_NAMES}


def hugging_face_tensors(architecture: str) -> dict[str, np.ndarray]:
    """Random float32 tensors under their Hugging Face names; multiples of 1/64, so that adding 1 is exact."""
    rng = np.random.default_rng(0)
    E, M, H = SIZES["hidden"], SIZES["mlp"], SIZES["head_dim"]
    N, K = SIZES["heads"] * H, SIZES["kv_heads"] * H
    shapes = {
        "self_attn.q_proj": (N, E),
        "self_attn.k_proj": (K, E),
        "self_attn.v_proj": (K, E),
        "self_attn.o_proj": (E, N),
        "mlp.gate_proj": (M, E),
        "mlp.up_proj": (M, E),
        "mlp.down_proj": (E, M),
        "self_attn.q_norm": (H,),
        "self_attn.k_norm": (H,),
    }
    found = {"model.embed_tokens.weight": (SIZES["vocab"], E), "model.norm.weight": (E,)}
    for layer in range(SIZES["layers"]):
        for name in NAMES[architecture]:
            found[f"model.layers.{layer}.{name}.weight"] = shapes.get(name, (E,))
    return {
        name: rng.integers(-64, 64, shape).astype(np.float32) / 64 for name, shape in found.items()
    }


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of the converter: halves to neighbours."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def as_llama_cpp(architecture: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    converted = {}
    for name, value in tensors.items():
        if name == "model.embed_tokens.weight":
            converted["token_embd.weight"] = value
            continue
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        if name == "model.norm.weight":
            converted["output_norm.weight"] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        rest, kind = rest.rsplit(".", 1)
        if architecture == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
            value = _permute(value, SIZES["heads" if "q_proj" in rest else "kv_heads"])
        converted[f"blk.{layer}.{NAMES[architecture][rest]}.{kind}"] = value
    return converted


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, int | float | str] | None = None,
) -> Path:
    """`tensors` have llama.cpp's names; those with two dimensions are stored as `matrix_type`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_feed_forward_length(SIZES["mlp"])
    writer.add_block_count(SIZES["layers"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(SIZES["head_dim"])
    if architecture == "gemma3":
        writer.add_sliding_window(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(SIZES["vocab"])])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, value in tensors.items():
        if value.ndim > 1 and matrix_type != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(value, matrix_type), raw_dtype=matrix_type)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
