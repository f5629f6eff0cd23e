"""From the tensors of a Hugging Face checkpoint to the decoder's leaves, sharding padding included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxinfer.models.sharded_dims import ShardedDims
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.weights.plan import Assemble, LeafSource, LoadPlan


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a checkpoint calls the norms of a layer."""

    attention: str = "input_layernorm"
    attention_post: str = "post_attention_layernorm"
    mlp: str = "post_attention_layernorm"
    mlp_post: str = "post_feedforward_layernorm"


def decoder_plan(
    spec: DecoderSpec,
    dims: ShardedDims,
    *,
    prefix: str = "model.",
    head: str = "lm_head.weight",
    norms: NormNames = NormNames(),
    fused: bool = False,
) -> LoadPlan:
    """The plan for Llama's tensor names. `fused`: the checkpoint stacks q, k, v as `qkv_proj` and gate, up as
    `gate_up_proj`."""
    E, V = spec.embed_dim, spec.vocab_size
    vocabulary = padded(axis=0, size=dims.vocab_size)
    plan: LoadPlan = {
        ("embed",): LeafSource((f"{prefix}embed_tokens.weight",), ((V, E),), vocabulary),
        ("norm",): LeafSource((f"{prefix}norm.weight",), ((E,),)),
    }
    if not spec.tied_head:
        plan["lm_head",] = LeafSource((head,), ((V, E),), vocabulary)
    for i in range(len(spec.layers)):
        layer = f"{prefix}layers.{i}."
        sources = attention_plan(spec, dims, f"{layer}self_attn.", fused=fused)
        sources |= mlp_plan(spec, dims, f"{layer}mlp.", fused=fused)
        sources["attention_norm",] = LeafSource((f"{layer}{norms.attention}.weight",), ((E,),))
        sources["mlp_norm",] = LeafSource((f"{layer}{norms.mlp}.weight",), ((E,),))
        if spec.post_norms:
            for name in ("attention_post", "mlp_post"):
                tensor = f"{layer}{getattr(norms, name)}.weight"
                sources[f"{name}_norm",] = LeafSource((tensor,), ((E,),))
        plan |= {("layers", str(i), *path): source for path, source in sources.items()}
    return plan


def attention_plan(
    spec: DecoderSpec,
    dims: ShardedDims,
    prefix: str,
    *,
    fused: bool = False,
    input_dim: int | None = None,
) -> LoadPlan:
    """The leaves of `Attention`, of the same `input_dim`."""
    E, H = spec.embed_dim, spec.head_dim
    rows = (spec.num_heads * H, spec.num_kv_heads * H, spec.num_kv_heads * H)
    names = [f"{prefix}{p}_proj" for p in "qkv"]

    def qkv(kind: str, *tail: int) -> LeafSource:
        assemble = partial(_assemble_qkv, spec, dims)
        if fused:
            return LeafSource(
                (f"{prefix}qkv_proj.{kind}",),
                ((sum(rows), *tail),),
                lambda tensors: assemble(np.split(tensors[0], np.cumsum(rows)[:-1])),
            )
        return LeafSource(
            tuple(f"{n}.{kind}" for n in names), tuple((r, *tail) for r in rows), assemble
        )

    sources: LoadPlan = {
        ("attention", "qkv"): qkv("weight", input_dim or E),
        ("attention", "o"): LeafSource(
            (f"{prefix}o_proj.weight",), ((E, rows[0]),), partial(_assemble_o, spec, dims)
        ),
    }
    if spec.qkv_bias:
        sources["attention", "qkv_bias"] = qkv("bias")
    if spec.o_bias:
        sources["attention", "o_bias"] = LeafSource((f"{prefix}o_proj.bias",), ((E,),))
    if spec.qk_norm:
        for name in ("q_norm", "k_norm"):
            sources["attention", name] = LeafSource((f"{prefix}{name}.weight",), ((H,),))
    return sources


def mlp_plan(spec: DecoderSpec, dims: ShardedDims, prefix: str, *, fused: bool = False) -> LoadPlan:
    """The leaves of `GatedMlp`."""
    E, M = spec.embed_dim, spec.mlp_dim

    def gate_up(kind: str, *tail: int) -> LeafSource:
        def assemble(tensors: list[np.ndarray]) -> np.ndarray:
            stacked = tensors[0].reshape(2, M, *tail) if fused else np.stack(tensors)
            return _pad_axis(stacked, axis=1, size=dims.mlp_dim)

        if fused:
            return LeafSource((f"{prefix}gate_up_proj.{kind}",), ((2 * M, *tail),), assemble)
        names = tuple(f"{prefix}{p}_proj.{kind}" for p in ("gate", "up"))
        return LeafSource(names, ((M, *tail),) * 2, assemble)

    sources: LoadPlan = {
        ("mlp", "gate_up"): gate_up("weight", E),
        ("mlp", "down"): LeafSource(
            (f"{prefix}down_proj.weight",), ((E, M),), padded(axis=1, size=dims.mlp_dim)
        ),
    }
    if spec.mlp_bias:
        sources["mlp", "gate_up_bias"] = gate_up("bias")
        sources["mlp", "down_bias"] = LeafSource((f"{prefix}down_proj.bias",), ((E,),))
    return sources


def _assemble_qkv(
    spec: DecoderSpec, dims: ShardedDims, tensors: Sequence[np.ndarray]
) -> np.ndarray:
    """q [N*H, ...], k and v [K*H, ...] -> [K', G'+2, H, ...], each kv head with its queries before it."""
    q, k, v = tensors
    K, H, tail = spec.num_kv_heads, spec.head_dim, q.shape[1:]
    q = _deal_queries(q.reshape(K, -1, H, *tail), dims)
    k, v = (np.repeat(t.reshape(K, 1, H, *tail), dims.kv_replicas, axis=0) for t in (k, v))
    return _pad_axis(np.concatenate([q, k, v], axis=1), axis=0, size=dims.num_kv_heads)


def _assemble_o(spec: DecoderSpec, dims: ShardedDims, tensors: Sequence[np.ndarray]) -> np.ndarray:
    """[E, N*H] -> [E, K', G', H]"""
    (o,) = tensors
    E, K, H = spec.embed_dim, spec.num_kv_heads, spec.head_dim
    o = np.moveaxis(o.reshape(E, K, -1, H), 0, -1)
    o = _pad_axis(_deal_queries(o, dims), axis=0, size=dims.num_kv_heads)
    return np.moveaxis(o, -1, 0)


def _deal_queries(x: np.ndarray, dims: ShardedDims) -> np.ndarray:
    """[K, G, ...] -> [K * kv_replicas, G', ...]: a group's query heads, dealt out to the copies of its kv head."""
    x = _pad_axis(x, axis=1, size=dims.kv_replicas * dims.queries_per_kv)
    return x.reshape(x.shape[0] * dims.kv_replicas, dims.queries_per_kv, *x.shape[2:])


def _pad_axis(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Zeros appended up to `size`; the array itself where nothing is missing."""
    if x.shape[axis] == size:
        return x
    widths = [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return np.pad(x, widths)


def padded(axis: int, size: int) -> Assemble:
    """The assembly of a leaf that is one tensor, with zeros appended up to `size` rows of `axis`."""
    return lambda tensors: _pad_axis(tensors[0], axis, size)
