"""From the tensors of a Hugging Face checkpoint to the decoder's leaves, sharding padding included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from jaxinfer.models.latent_layout import latent_attention_plan
from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.moe_layout import QWEN_MOE_NAMES, MoeNames, moe_plan
from jaxinfer.models.moe_spec import MoeSpec
from jaxinfer.models.sharded_dims import ShardedDims, pad_axis
from jaxinfer.models.spec import (
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    GatedMlpSpec,
    LearnedPositions,
    MlpSpec,
    NormSpec,
)
from jaxinfer.models.state_layout import DeltaNetNames, state_plan
from jaxinfer.weights.plan import Assemble, LeafSource, LoadPlan, sole


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a checkpoint calls its tensors, Llama's names by default, and how it lays out the fused ones.

    All but `head` stand under `prefix`, those from `qkv` on under a layer's `layer` too; ".weight" or ".bias" follows.
    """

    prefix: str = "model."
    embed: str = "embed_tokens"
    embed_norm: str = "embed_norm"
    positions: str = "embed_positions"
    norm: str = "norm"
    head: str = "lm_head"
    layer: str = "layers.{}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name: they are fused, as `qkv_layout` says."""
    qkv_layout: Literal["stacked", "grouped"] = "stacked"
    """Fused rows of all queries, then keys, then values; or for each kv head its queries, its key and its value."""
    interleaved_rope: bool = False
    """Neighbouring elements of a head are rotated against each other; here it is halves."""
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """Of the tensor itself: nothing follows."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """One name: gate's rows, then up's."""
    up: str = "mlp.up_proj"
    """Of an MLP without a gate."""
    down: str = "mlp.down_proj"
    xielu: str = "mlp.act_fn"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    state: str = "mamba."
    """What the tensors of a layer's states begin with."""
    delta_net: DeltaNetNames | None = None
    transposed: bool = False
    """Matrices of the layers are stored [in, out]."""
    latent: str = "self_attn."
    """What latent attention's tensors stand under."""
    moe: MoeNames = QWEN_MOE_NAMES


LLAMA_NAMES = Names()


def decoder_plan(spec: DecoderSpec, dims: ShardedDims, names: Names = LLAMA_NAMES) -> LoadPlan:
    """Where each leaf of the decoder comes from."""
    E, V = spec.embed_dim, spec.vocab_size
    vocabulary = padded(axis=0, size=dims.vocab_size)
    plan: LoadPlan = {
        ("embed",): LeafSource((f"{names.prefix}{names.embed}.weight",), ((V, E),), vocabulary),
    }
    if isinstance(spec.positions, LearnedPositions):
        tensor = f"{names.prefix}{names.positions}.weight"
        plan["position_embed",] = LeafSource((tensor,), ((spec.positions.num_rows, E),))
    if spec.embed_norm:
        plan |= norm_plan("embed_norm", f"{names.prefix}{names.embed_norm}", spec.norm, (E,))
    if spec.final_norm:
        plan |= norm_plan("norm", f"{names.prefix}{names.norm}", spec.norm, (E,))
    if not spec.tied_head:
        plan["lm_head",] = LeafSource((f"{names.head}.weight",), ((V, E),), vocabulary)
    if spec.head_bias:
        plan["head_bias",] = LeafSource((f"{names.head}.bias",), ((V,),), vocabulary)
    for i, layer in enumerate(spec.layers):
        prefix = f"{names.prefix}{names.layer.format(i)}"
        sources: LoadPlan = {}
        if layer.attention is not None:
            sources |= _attention(layer.attention, E, dims, prefix, names)
        if layer.state is not None:
            state = state_plan(
                layer.state, E, dims.tensor_parallel_size, f"{prefix}{names.state}", names.delta_net
            )
            sources |= {("state", *path): source for path, source in state.items()}
        if layer.mlp is not None:
            sources |= mlp_plan(layer.mlp, E, dims, prefix, names)
        for name in layer.norm_names:
            sources |= norm_plan(name, f"{prefix}{getattr(names, name)}", spec.norm, (E,))
        plan |= {("layers", str(i), *path): source for path, source in sources.items()}
    return plan


def _attention(
    spec: AnyAttentionSpec, embed_dim: int, dims: ShardedDims, prefix: str, names: Names
) -> LoadPlan:
    if not isinstance(spec, LatentAttentionSpec):
        return attention_plan(spec, embed_dim, dims, prefix, names)
    return latent_attention_plan(
        spec,
        embed_dim,
        dims,
        f"{prefix}{names.latent}",
        interleaved_rope=names.interleaved_rope,
    )


def norm_plan(
    leaf: str, tensor: str, norm: NormSpec, shape: tuple[int, ...], assemble: Assemble = sole
) -> LoadPlan:
    """The leaves of a norm, `leaf` and `{leaf}_bias`, as it has them."""
    plan: LoadPlan = {}
    if norm.has_weight:
        plan[leaf,] = LeafSource((f"{tensor}.weight",), (shape,), assemble)
    if norm.has_bias:
        plan[f"{leaf}_bias",] = LeafSource((f"{tensor}.bias",), (shape,), assemble)
    return plan


def attention_plan(
    spec: AttentionSpec,
    embed_dim: int,
    dims: ShardedDims,
    prefix: str,
    names: Names,
    *,
    input_dim: int | None = None,
) -> LoadPlan:
    """The leaves of `Attention`, of the same `input_dim`."""
    E, K, H = embed_dim, spec.num_kv_heads, spec.head_dim
    G, heads = spec.num_heads // K, dims.heads(spec)
    rows = (K * G * H, K * H, K * H)
    order = _rotated_order(spec, names)

    def qkv(kind: str, *tail: int) -> LeafSource:
        assemble = partial(_assemble_qkv, spec, dims, names.qkv_layout, order)
        transposed = names.transposed and bool(tail)
        sizes = rows if len(names.qkv) > 1 else (sum(rows),)
        shapes = tuple((*tail, size) if transposed else (size, *tail) for size in sizes)
        tensors = tuple(f"{prefix}{name}.{kind}" for name in names.qkv)
        return LeafSource(tensors, shapes, _untransposed(assemble) if transposed else assemble)

    def gated_qkv(*tail: int) -> LeafSource:
        """Queries whose projection has each head's gate after it."""
        plain = qkv("weight", *tail)

        def assemble(tensors: list[np.ndarray]) -> np.ndarray:
            q = tensors[0].reshape(K * G, 2, H, *tail)[:, 0].reshape(K * G * H, *tail)
            return plain.assemble([q, *tensors[1:]])

        return LeafSource(plain.names, ((2 * rows[0], *tail), *plain.shapes[1:]), assemble)

    def gate(tensors: list[np.ndarray]) -> np.ndarray:
        """[N*2*H, E] -> [K', G', H, E]"""
        return heads.deal_queries(tensors[0].reshape(K, G, 2, H, -1)[:, :, 1])

    def output(tensors: list[np.ndarray]) -> np.ndarray:
        """[E, N*H] -> [E, K', G', H]"""
        o = np.moveaxis(tensors[0].reshape(E, K, G, H), 0, -1)
        return np.moveaxis(heads.deal_queries(o), -1, 0)

    in_dim = input_dim or E
    sources: LoadPlan = {
        ("attention", "qkv"): gated_qkv(in_dim) if spec.gated else qkv("weight", in_dim),
        ("attention", "o"): _matrix(f"{prefix}{names.o}", (E, rows[0]), output, names),
    }
    if spec.gated:
        sources["attention", "gate"] = LeafSource(
            (f"{prefix}{names.qkv[0]}.weight",), ((2 * rows[0], in_dim),), gate
        )
    if spec.qkv_bias:
        sources["attention", "qkv_bias"] = qkv("bias")
    if spec.o_bias:
        sources["attention", "o_bias"] = LeafSource((f"{prefix}{names.o}.bias",), ((E,),))
    if spec.sinks:
        sources["attention", "sinks"] = LeafSource(
            (f"{prefix}{names.sinks}",),
            ((K * G,),),
            lambda tensors: heads.deal_queries(tensors[0].reshape(K, G)),
        )
    if spec.qk_norm is not None:
        for leaf, tensor, group in (("q_norm", names.q_norm, G), ("k_norm", names.k_norm, 1)):
            count = K * group
            shape = {"head": (H,), "own_head": (count, H), "projection": (count * H,)}[
                spec.qk_norm.over
            ]
            assemble = partial(_assemble_qk_norm, spec, dims, leaf, order)
            norm = norm_plan(leaf, f"{prefix}{tensor}", spec.qk_norm.norm, shape, assemble)
            sources |= {("attention", *path): source for path, source in norm.items()}
    return sources


def mlp_plan(
    spec: MlpSpec, embed_dim: int, dims: ShardedDims, prefix: str, names: Names
) -> LoadPlan:
    """The leaves of the layer's MLP."""
    if isinstance(spec, MoeSpec):
        return moe_plan(spec, embed_dim, dims, prefix, names.moe)
    E, M = embed_dim, spec.mlp_dim
    padded_dim = dims.mlp_dim(M)
    down = _matrix(f"{prefix}{names.down}", (E, M), padded(axis=1, size=padded_dim), names)
    sources: LoadPlan = {("mlp", "down"): down}
    if isinstance(spec, GatedMlpSpec):
        sources["mlp", "gate_up"] = _gate_up(spec, dims, prefix, names, "weight", E)
        if spec.bias:
            sources["mlp", "gate_up_bias"] = _gate_up(spec, dims, prefix, names, "bias")
    else:
        rows = padded(axis=0, size=padded_dim)
        sources["mlp", "up"] = _matrix(f"{prefix}{names.up}", (M, E), rows, names)
        if spec.activation == "xielu":
            tensors = tuple(
                f"{prefix}{names.xielu}.{x}" for x in ("alpha_p", "alpha_n", "beta", "eps")
            )
            sources["mlp", "xielu"] = LeafSource(tensors, ((1,), (1,), (), ()), _numbers)
        if spec.bias:
            sources["mlp", "up_bias"] = LeafSource((f"{prefix}{names.up}.bias",), ((M,),), rows)
    if spec.bias:
        sources["mlp", "down_bias"] = LeafSource((f"{prefix}{names.down}.bias",), ((E,),))
    return sources


def _gate_up(
    spec: GatedMlpSpec, dims: ShardedDims, prefix: str, names: Names, kind: str, *tail: int
) -> LeafSource:
    M = spec.mlp_dim
    fused = len(names.gate_up) == 1

    def assemble(tensors: list[np.ndarray]) -> np.ndarray:
        stacked = tensors[0].reshape(2, M, *tail) if fused else np.stack(tensors)
        return pad_axis(stacked, axis=1, size=dims.mlp_dim(M))

    tensors = tuple(f"{prefix}{name}.{kind}" for name in names.gate_up)
    shape = (2 * M, *tail) if fused else (M, *tail)
    return LeafSource(tensors, (shape,) * len(tensors), assemble)


def _matrix(name: str, shape: tuple[int, int], assemble: Assemble, names: Names) -> LeafSource:
    """The weight [out, in] of `name`."""
    if names.transposed:
        return LeafSource((f"{name}.weight",), (shape[::-1],), _untransposed(assemble))
    return LeafSource((f"{name}.weight",), (shape,), assemble)


def _numbers(tensors: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensor.reshape(1) for tensor in tensors])


def _untransposed(assemble: Assemble) -> Assemble:
    return lambda tensors: assemble([tensor.T for tensor in tensors])


def _rotated_order(spec: AttentionSpec, names: Names) -> np.ndarray | None:
    """The order of a head's elements in which halves are rotated against each other, where the checkpoint has another.
    Scores don't depend on the order, as queries and keys share it."""
    if not names.interleaved_rope or spec.rope is None:
        return None
    rotated = 2 * len(spec.rope.inverse_frequencies)
    pairs = np.arange(rotated).reshape(-1, 2)
    return np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(rotated, spec.head_dim)])


def _assemble_qkv(
    spec: AttentionSpec,
    dims: ShardedDims,
    layout: str,
    order: np.ndarray | None,
    tensors: Sequence[np.ndarray],
) -> np.ndarray:
    """q [N*H, ...], k and v [K*H, ...], or all in one, -> [K', G'+2, H, ...], each kv head with its queries before it."""
    K, H, heads, tail = spec.num_kv_heads, spec.head_dim, dims.heads(spec), tensors[0].shape[1:]
    if len(tensors) == 1 and layout == "grouped":
        grouped = tensors[0].reshape(K, -1, H, *tail)
        q, k, v = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
    else:
        if len(tensors) == 1:
            N = spec.num_heads
            tensors = np.split(tensors[0], [N * H, (N + K) * H])
        q, k, v = (tensor.reshape(K, -1, H, *tail) for tensor in tensors)
    if order is not None:
        q, k = q[:, :, order], k[:, :, order]
    parts = [heads.deal_queries(q), heads.copy_keys(k), heads.copy_keys(v)]
    return np.concatenate(parts, axis=1)


def _assemble_qk_norm(
    spec: AttentionSpec,
    dims: ShardedDims,
    leaf: str,
    order: np.ndarray | None,
    tensors: Sequence[np.ndarray],
) -> np.ndarray:
    """[H], one for all heads, as it is; [K*G*H] -> [K', G', H], [K*H] -> [K', H]."""
    (weight,) = tensors
    weight = weight.reshape(-1, spec.head_dim)
    if order is not None:
        weight = weight[:, order]
    if spec.qk_norm.over == "head":
        return weight[0]
    heads = dims.heads(spec)
    if leaf == "k_norm":
        return heads.copy_keys(weight)
    return heads.deal_queries(weight.reshape(spec.num_kv_heads, -1, spec.head_dim))


def padded(axis: int, size: int) -> Assemble:
    """The assembly of a leaf that is one tensor, with zeros appended up to `size` rows of `axis`."""
    return lambda tensors: pad_axis(tensors[0], axis, size)
