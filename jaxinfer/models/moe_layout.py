"""From the tensors of a Hugging Face checkpoint to the leaves of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxinfer.models.moe_spec import MoeSpec
from jaxinfer.models.sharded_dims import ShardedDims, pad_axis
from jaxinfer.weights.plan import LeafSource, LoadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """What a checkpoint calls the tensors of a mixture, Qwen's names by default. All stand under the layer's prefix.

    Experts are stored one by one, as hubs have most of them, or all in one tensor, as transformers has them in memory;
    either is read where it is there.
    """

    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.bias"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str | None = "mlp.experts.{}."
    """Of one expert; None where they are always in one tensor."""
    gate_up: tuple[str, str] = ("gate_proj.weight", "up_proj.weight")
    down: str = "down_proj.weight"
    all_gate_up: tuple[str, ...] = ("mlp.experts.gate_up_proj",)
    """One name: gate's rows, then up's."""
    all_down: str = "mlp.experts.down_proj"
    all_gate_up_bias: str = "mlp.experts.gate_up_proj_bias"
    all_down_bias: str = "mlp.experts.down_proj_bias"
    layout: Literal["out_in", "in_out", "interleaved", "flat"] = "out_in"
    """Of the tensors of all experts: [X, 2 M, E] and [X, E, M]; both transposed; that with gate and up in turn; or
    [X * M, E] for gate, up and down alike."""
    output_bias: str = "mlp.bias"
    shared_gate_up: tuple[str, ...] = (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    )
    """One name: gate's rows, then up's."""
    shared_down: str = "mlp.shared_experts.down_proj.weight"
    shared_gate: str = "mlp.shared_expert_gate.weight"


QWEN_MOE_NAMES = MoeNames()


def moe_plan(
    spec: MoeSpec, embed_dim: int, dims: ShardedDims, prefix: str, names: MoeNames
) -> LoadPlan:
    """The leaves of `MoeMlp`."""
    E, routing = embed_dim, spec.routing
    X = routing.num_experts

    def vector(name: str, size: int) -> LeafSource:
        return LeafSource((f"{prefix}{name}",), ((size,),))

    plan: LoadPlan = {
        ("mlp", "router"): LeafSource((f"{prefix}{names.router}",), ((X, E),)),
        ("mlp", "gate_up"): _gate_up(spec, E, dims, prefix, names),
        ("mlp", "down"): _down(spec, E, dims, prefix, names),
    }
    if routing.bias:
        plan["mlp", "router_bias"] = vector(names.router_bias, X)
    if routing.correction_bias:
        flat = vector(names.correction_bias, X)
        row = LeafSource(flat.names, ((1, X),), lambda tensors: tensors[0][0])
        plan["mlp", "correction_bias"] = flat.or_else(row)
    if spec.bias:
        plan |= _biases(spec, E, dims, prefix, names)
    if spec.output_bias:
        plan["mlp", "output_bias"] = vector(names.output_bias, E)
    if spec.shared is not None:
        plan |= _shared(spec.shared.mlp_dim, E, dims, prefix, names)
    if spec.shared_gate:
        plan["mlp", "shared_gate"] = LeafSource((f"{prefix}{names.shared_gate}",), ((1, E),))
    return plan


def _padded(x: np.ndarray, dims: ShardedDims, mlp_axis: int) -> np.ndarray:
    """Zeros appended up to what the devices share: experts, or each expert's MLP rows."""
    if dims.expert_parallel:
        return pad_axis(x, axis=0, size=dims.shared_by_devices(x.shape[0]))
    return pad_axis(x, axis=mlp_axis, size=dims.shared_by_devices(x.shape[mlp_axis]))


def _one_by_one(
    prefix: str, names: MoeNames, num_experts: int, kinds: tuple[str, ...]
) -> list[str]:
    """The names of all experts' tensors, each expert's together."""
    return [f"{prefix}{names.expert.format(x)}{kind}" for x in range(num_experts) for kind in kinds]


def _gate_up(
    spec: MoeSpec, embed_dim: int, dims: ShardedDims, prefix: str, names: MoeNames
) -> LeafSource:
    """[X', 2, M', E]"""
    X, M, E = spec.routing.num_experts, spec.mlp_dim, embed_dim

    def from_all(tensors: list[np.ndarray]) -> np.ndarray:
        match names.layout:
            case "out_in":
                x = tensors[0].reshape(X, 2, M, E)
            case "in_out":
                x = np.moveaxis(tensors[0].reshape(X, E, 2, M), 1, 3)
            case "interleaved":
                x = np.transpose(tensors[0].reshape(X, E, M, 2), (0, 3, 2, 1))
            case "flat":
                x = np.stack([t.reshape(X, M, E) for t in tensors], axis=1)
        return _padded(x, dims, mlp_axis=2)

    shapes = {"out_in": (X, 2 * M, E), "flat": (X * M, E)}
    together = LeafSource(
        tuple(f"{prefix}{name}" for name in names.all_gate_up),
        (shapes.get(names.layout, (X, E, 2 * M)),) * len(names.all_gate_up),
        from_all,
    )
    if names.expert is None:
        return together
    tensors = _one_by_one(prefix, names, X, names.gate_up)
    return LeafSource(
        tuple(tensors),
        ((M, E),) * len(tensors),
        lambda tensors: _padded(np.stack(tensors).reshape(X, 2, M, E), dims, mlp_axis=2),
    ).or_else(together)


def _down(
    spec: MoeSpec, embed_dim: int, dims: ShardedDims, prefix: str, names: MoeNames
) -> LeafSource:
    """[X', E, M']"""
    X, M, E = spec.routing.num_experts, spec.mlp_dim, embed_dim

    def from_all(tensors: list[np.ndarray]) -> np.ndarray:
        x = tensors[0] if names.layout == "out_in" else tensors[0].reshape(X, M, E).swapaxes(1, 2)
        return _padded(x, dims, mlp_axis=2)

    shapes = {"out_in": (X, E, M), "flat": (X * M, E)}
    together = LeafSource(
        (f"{prefix}{names.all_down}",), (shapes.get(names.layout, (X, M, E)),), from_all
    )
    if names.expert is None:
        return together
    tensors = _one_by_one(prefix, names, X, (names.down,))
    return LeafSource(
        tuple(tensors),
        ((E, M),) * X,
        lambda tensors: _padded(np.stack(tensors), dims, mlp_axis=2),
    ).or_else(together)


def _biases(
    spec: MoeSpec, embed_dim: int, dims: ShardedDims, prefix: str, names: MoeNames
) -> LoadPlan:
    X, M = spec.routing.num_experts, spec.mlp_dim

    def gate_up(tensors: list[np.ndarray]) -> np.ndarray:
        interleaved = names.layout == "interleaved"
        x = (
            tensors[0].reshape(X, M, 2).swapaxes(1, 2)
            if interleaved
            else tensors[0].reshape(X, 2, M)
        )
        return _padded(x, dims, mlp_axis=2)

    def down(tensors: list[np.ndarray]) -> np.ndarray:
        size = dims.shared_by_devices(X) if dims.expert_parallel else X
        return pad_axis(tensors[0], axis=0, size=size)

    return {
        ("mlp", "gate_up_bias"): LeafSource(
            (f"{prefix}{names.all_gate_up_bias}",), ((X, 2 * M),), gate_up
        ),
        ("mlp", "down_bias"): LeafSource(
            (f"{prefix}{names.all_down_bias}",), ((X, embed_dim),), down
        ),
    }


def _shared(
    mlp_dim: int, embed_dim: int, dims: ShardedDims, prefix: str, names: MoeNames
) -> LoadPlan:
    M, E = mlp_dim, embed_dim

    def gate_up(tensors: list[np.ndarray]) -> np.ndarray:
        x = np.concatenate(tensors).reshape(2, M, E)
        return pad_axis(x, axis=1, size=dims.shared_by_devices(M))

    rows = 2 * M // len(names.shared_gate_up)
    return {
        ("mlp", "shared", "gate_up"): LeafSource(
            tuple(f"{prefix}{name}" for name in names.shared_gate_up),
            ((rows, E),) * len(names.shared_gate_up),
            gate_up,
        ),
        ("mlp", "shared", "down"): LeafSource(
            (f"{prefix}{names.shared_down}",),
            ((E, M),),
            lambda tensors: pad_axis(tensors[0], axis=1, size=dims.shared_by_devices(M)),
        ),
    }
