"""From the tensors of a Hugging Face checkpoint to the leaves of layers with states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.models.sharded_groups import ShardedGroups
from jaxinfer.models.state_spec import (
    DeltaNetSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    RgLruSpec,
    ShortConvSpec,
    StateSpec,
)
from jaxinfer.weights.plan import Assemble, LeafSource, LoadPlan


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """What a checkpoint calls the tensors of a `DeltaNet`.

    `in_proj`: names, and which projections each tensor stacks: queries, keys, values, gates (z), betas, decays (a).
    `interleaved`: it does so for each key head in turn.
    """

    in_proj: tuple[tuple[str, str], ...]
    interleaved: bool = False
    conv: tuple[str, ...] = ("conv1d",)
    """Of queries, keys and values together, or of each."""
    norm: str = "norm"
    out_proj: str = "out_proj"


def state_plan(
    spec: StateSpec,
    embed_dim: int,
    tensor_parallel_size: int,
    prefix: str,
    delta_net: DeltaNetNames | None,
) -> LoadPlan:
    """The leaves of a layer's states, from tensors whose names start with `prefix`."""
    match spec:
        case MambaSpec():
            return mamba_plan(spec, embed_dim, prefix)
        case Mamba2Spec():
            return mamba2_plan(spec, embed_dim, prefix, tensor_parallel_size)
        case DeltaNetSpec():
            assert delta_net is not None, "the family must name the tensors"
            return delta_net_plan(spec, embed_dim, prefix, tensor_parallel_size, delta_net)
        case KimiDeltaSpec():
            return kimi_delta_plan(spec, embed_dim, prefix)
        case ShortConvSpec():
            return short_conv_plan(spec, embed_dim, prefix)
        case RgLruSpec():
            return rg_lru_plan(spec, embed_dim, prefix)


def mamba_plan(spec: MambaSpec, embed_dim: int, prefix: str) -> LoadPlan:
    """The leaves of `Mamba`."""
    E, D, N, R = embed_dim, spec.inner_dim, spec.state_dim, spec.step_rank
    plan: LoadPlan = {
        ("in_proj",): LeafSource((f"{prefix}in_proj.weight",), ((2 * D, E),), _dealt(2)),
        ("conv",): _taps(f"{prefix}conv1d.weight", spec.conv_kernel, D),
        ("x_proj",): LeafSource((f"{prefix}x_proj.weight",), ((R + 2 * N, D),)),
        ("dt_proj",): LeafSource((f"{prefix}dt_proj.weight",), ((D, R),)),
        ("dt_bias",): LeafSource((f"{prefix}dt_proj.bias",), ((D,),)),
        ("a_log",): LeafSource((f"{prefix}A_log",), ((D, N),)),
        ("d",): LeafSource((f"{prefix}D",), ((D,),)),
        ("out_proj",): LeafSource((f"{prefix}out_proj.weight",), ((E, D),)),
    }
    if spec.conv_bias:
        plan["conv_bias",] = LeafSource((f"{prefix}conv1d.bias",), ((D,),))
    if spec.bias:
        plan["in_bias",] = LeafSource((f"{prefix}in_proj.bias",), ((2 * D,),), _dealt(2))
        plan["out_bias",] = LeafSource((f"{prefix}out_proj.bias",), ((E,),))
    if spec.step_norms == "weighted":
        for name, size in (("dt", R), ("b", N), ("c", N)):
            plan[f"{name}_norm",] = LeafSource((f"{prefix}{name}_layernorm.weight",), ((size,),))
    return plan


def mamba2_plan(
    spec: Mamba2Spec, embed_dim: int, prefix: str, tensor_parallel_size: int
) -> LoadPlan:
    """The leaves of `Mamba2`."""
    groups = ShardedGroups.create(spec.num_groups, spec.num_heads, tensor_parallel_size)
    E, H, K, inner = embed_dim, spec.num_heads, spec.conv_kernel, spec.num_heads * spec.head_dim
    x, vector = _Part(inner), _Part(spec.num_groups * spec.state_dim, shared=True)
    convolved = (x, vector, vector)
    projected = (x, *convolved, _Part(H))

    def source(name: str, parts: tuple[_Part, ...], *tail: int) -> LeafSource:
        shape = (sum(part.num_rows for part in parts), *tail)
        return LeafSource((f"{prefix}{name}",), (shape,), lambda t: groups_of(groups, parts, t[0]))

    plan: LoadPlan = {
        ("in_proj",): source("in_proj.weight", projected, E),
        ("conv",): _group_taps(groups, convolved, [f"{prefix}conv1d.weight"], K),
        ("out_proj",): _group_columns(groups, f"{prefix}out_proj.weight", E, inner),
        ("dt_bias",): source("dt_bias", (_Part(H),)),
        ("a_log",): source("A_log", (_Part(H),)),
        ("d",): source("D", (_Part(H),)),
    }
    if spec.conv_bias:
        plan["conv_bias",] = source("conv1d.bias", convolved)
    if spec.norm != "none":
        plan["norm",] = source("norm.weight", (x,))
    if spec.in_bias:
        plan["in_bias",] = source("in_proj.bias", projected)
    if spec.out_bias:
        plan["out_bias",] = LeafSource((f"{prefix}out_proj.bias",), ((E,),))
    return plan


def delta_net_plan(
    spec: DeltaNetSpec,
    embed_dim: int,
    prefix: str,
    tensor_parallel_size: int,
    names: DeltaNetNames,
) -> LoadPlan:
    """The leaves of `DeltaNet`."""
    groups = ShardedGroups.create(spec.num_key_heads, spec.num_value_heads, tensor_parallel_size)
    E, G, H, V = embed_dim, spec.num_key_heads, spec.num_value_heads, spec.value_dim
    key, value, head = _Part(G * spec.key_dim, shared=True), _Part(H * V), _Part(H)
    parts = {"q": key, "k": key, "v": value, "z": value, "b": head, "a": head}
    convolved = (key, key, value)
    tensor_names, projections = zip(*names.in_proj, strict=True)

    def in_proj(tensors: list[np.ndarray]) -> np.ndarray:
        found = {}
        for tensor, stacked in zip(tensors, projections, strict=True):
            sizes = [parts[p].num_rows for p in stacked]
            if names.interleaved:
                tensor = tensor.reshape(G, -1, E)
                sizes = [size // G for size in sizes]
            axis = int(names.interleaved)
            pieces = np.split(tensor, np.cumsum(sizes)[:-1], axis=axis)
            found |= {p: piece.reshape(-1, E) for p, piece in zip(stacked, pieces, strict=True)}
        return groups_of(groups, tuple(parts.values()), np.concatenate([found[p] for p in parts]))

    return {
        ("in_proj",): LeafSource(
            tuple(f"{prefix}{name}.weight" for name in tensor_names),
            tuple((sum(parts[p].num_rows for p in stacked), E) for stacked in projections),
            in_proj,
        ),
        ("conv",): _group_taps(
            groups, convolved, [f"{prefix}{name}.weight" for name in names.conv], spec.conv_kernel
        ),
        ("norm",): LeafSource((f"{prefix}{names.norm}.weight",), ((V,),)),
        ("out_proj",): _group_columns(groups, f"{prefix}{names.out_proj}.weight", E, H * V),
        ("dt_bias",): LeafSource(
            (f"{prefix}dt_bias",), ((H,),), lambda t: groups_of(groups, (head,), t[0])
        ),
        ("a_log",): LeafSource(
            (f"{prefix}A_log",), ((H,),), lambda t: groups_of(groups, (head,), t[0])
        ),
    }


def kimi_delta_plan(spec: KimiDeltaSpec, embed_dim: int, prefix: str) -> LoadPlan:
    """The leaves of `KimiDelta`."""
    E, H, D, R = embed_dim, spec.num_heads, spec.head_dim, spec.gate_rank
    # Heads are groups of their own, and nothing is stored twice.
    groups, head, number = ShardedGroups(H, 1, 1), _Part(H * D), _Part(H)
    parts = {"q": head, "k": head, "v": head, "b": number}
    gates = ("f", "g")

    def by_head(name: str, part: _Part, *tail: int) -> LeafSource:
        shape = (part.num_rows, *tail)
        return LeafSource(
            (f"{prefix}{name}",), (shape,), lambda t: groups_of(groups, (part,), t[0])
        )

    plan: LoadPlan = {
        ("in_proj",): LeafSource(
            tuple(f"{prefix}{part}_proj.weight" for part in parts),
            tuple((part.num_rows, E) for part in parts.values()),
            lambda t: groups_of(groups, tuple(parts.values()), np.concatenate(t)),
        ),
        ("conv",): _group_taps(
            groups,
            (head, head, head),
            [f"{prefix}{part}_conv1d.weight" for part in "qkv"],
            spec.conv_kernel,
        ),
        ("dt_bias",): by_head("dt_bias", head),
        ("a_log",): LeafSource((f"{prefix}A_log",), ((1, 1, H, 1),), lambda t: t[0].reshape(H)),
        ("norm",): LeafSource((f"{prefix}o_norm.weight",), ((D,),)),
        ("out_proj",): _group_columns(groups, f"{prefix}o_proj.weight", E, H * D),
    }
    plan["gate_in",] = LeafSource(
        tuple(f"{prefix}{gate}_a_proj.weight" for gate in gates), ((R, E),) * 2, np.stack
    )
    plan["gate_out",] = LeafSource(
        tuple(f"{prefix}{gate}_b_proj.weight" for gate in gates),
        ((H * D, R),) * 2,
        lambda t: np.stack([x.reshape(H, D, R) for x in t], axis=1),
    )
    return plan


def short_conv_plan(spec: ShortConvSpec, embed_dim: int, prefix: str) -> LoadPlan:
    """The leaves of `ShortConv`."""
    E = embed_dim
    plan: LoadPlan = {
        ("in_proj",): LeafSource((f"{prefix}in_proj.weight",), ((3 * E, E),), _dealt(3)),
        ("conv",): _taps(f"{prefix}conv.weight", spec.conv_kernel, E),
        ("out_proj",): LeafSource((f"{prefix}out_proj.weight",), ((E, E),)),
    }
    if spec.bias:
        plan["in_bias",] = LeafSource((f"{prefix}in_proj.bias",), ((3 * E,),), _dealt(3))
        plan["conv_bias",] = LeafSource((f"{prefix}conv.bias",), ((E,),))
        plan["out_bias",] = LeafSource((f"{prefix}out_proj.bias",), ((E,),))
    return plan


def rg_lru_plan(spec: RgLruSpec, embed_dim: int, prefix: str) -> LoadPlan:
    """The leaves of `RgLru`."""
    E, B, W = embed_dim, spec.num_blocks, spec.block_dim
    gates = tuple(f"{prefix}rg_lru.{gate}_gate" for gate in ("input", "recurrent"))

    def branches(kind: str, *tail: int) -> LeafSource:
        names = tuple(f"{prefix}linear_{branch}.{kind}" for branch in "yx")
        shape = (B * W, *tail)
        return LeafSource(
            names, (shape, shape), lambda t: np.stack([x.reshape(B, W, *tail) for x in t], axis=1)
        )

    def stacked_gates(kind: str, *shape: int) -> LeafSource:
        names = tuple(f"{gate}_{kind}" for gate in gates)
        return LeafSource(names, (shape, shape), lambda t: np.stack(t, axis=1))

    def by_block(name: str, *shape: int) -> LeafSource:
        return LeafSource((f"{prefix}{name}",), (shape,), lambda t: t[0].reshape(*shape[:-1], B, W))

    taps = _taps(f"{prefix}conv_1d.weight", spec.conv_kernel, B * W)
    return {
        ("in_proj",): branches("weight", E),
        ("in_bias",): branches("bias"),
        ("conv",): LeafSource(
            taps.names, taps.shapes, lambda t: taps.assemble(t).reshape(-1, B, W)
        ),
        ("conv_bias",): by_block("conv_1d.bias", B * W),
        ("gates",): stacked_gates("weight", B, W, W),
        ("gate_bias",): stacked_gates("bias", B, W),
        ("decay",): by_block("rg_lru.recurrent_param", B * W),
        ("out_proj",): by_block("linear_out.weight", E, B * W),
        ("out_bias",): LeafSource((f"{prefix}linear_out.bias",), ((E,),)),
    }


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a tensor: each head has its own, or the heads of a group share them."""

    num_rows: int
    shared: bool = False


def groups_of(groups: ShardedGroups, parts: tuple[_Part, ...], tensor: np.ndarray) -> np.ndarray:
    """[rows, ...], stacked parts, to [G, rows of a group, ...]."""
    pieces = np.split(tensor, np.cumsum([part.num_rows for part in parts])[:-1])
    by_group = []
    for part, piece in zip(parts, pieces, strict=True):
        if part.shared:
            piece = piece.reshape(groups.num_groups // groups.copies, -1, *piece.shape[1:])
            by_group.append(np.repeat(piece, groups.copies, axis=0))
        else:
            by_group.append(piece.reshape(groups.num_groups, -1, *piece.shape[1:]))
    return by_group[0] if len(by_group) == 1 else np.concatenate(by_group, axis=1)


def _group_taps(
    groups: ShardedGroups, parts: tuple[_Part, ...], names: Sequence[str], num_taps: int
) -> LeafSource:
    """Convolutions [C, 1, K], one of all parts or one of each, to [K, G, C of a group]."""
    channels = [part.num_rows for part in parts]
    if len(names) == 1:
        channels = [sum(channels)]
    return LeafSource(
        tuple(names),
        tuple((size, 1, num_taps) for size in channels),
        lambda t: np.moveaxis(groups_of(groups, parts, np.concatenate(t)[:, 0]), -1, 0),
    )


def _group_columns(groups: ShardedGroups, name: str, num_rows: int, num_columns: int) -> LeafSource:
    """[E, columns of each head] to [E, G, columns of a group]."""
    return LeafSource(
        (name,),
        ((num_rows, num_columns),),
        lambda t: t[0].reshape(num_rows, groups.num_groups, -1),
    )


def _taps(name: str, num_taps: int, num_channels: int) -> LeafSource:
    """A convolution [C, 1, K] to [K, C]."""
    return LeafSource((name,), ((num_channels, 1, num_taps),), lambda t: t[0][:, 0].T)


def _dealt(num_parts: int) -> Assemble:
    """`num_parts` stacked parts [n * C, ...] to [C, n, ...]."""
    return lambda t: np.moveaxis(t[0].reshape(num_parts, -1, *t[0].shape[1:]), 0, 1)
