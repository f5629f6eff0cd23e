"""Mixtures of experts: routing against brute force, experts shared by devices, checkpoints in either spelling."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxinfer.executor.compile_presets import PRESETS
from jaxinfer.models.functional import FunctionalDecoder
from jaxinfer.models.moe import MoeMlp
from jaxinfer.models.moe_spec import ClampedSwiglu, MoeSpec, RoutingSpec
from jaxinfer.models.registry import describe_model
from jaxinfer.models.routing import route
from jaxinfer.models.spec import GatedMlpSpec
from jaxinfer.parallel.mesh import make_mesh, named_sharding
from tests.models.architectures.entry import checkpoint
from tests.models.architectures.oracle import prove
from tests.models.architectures.table import ENTRIES
from tests.models.paged_harness import load_checkpoint

E, X, A, M, T = 16, 6, 3, 10, 7


def mixture(**changes: Any) -> MoeSpec:
    routing = {"num_experts": X, "experts_per_token": A, "renormalize": True, "bias": True}
    return MoeSpec(
        **{
            "routing": RoutingSpec(**routing | changes.pop("routing", {})),
            "mlp_dim": M,
            "activation": ClampedSwiglu(1.3, 0.8),
            "bias": True,
            "output_bias": True,
            "shared": GatedMlpSpec(6),
            "shared_gate": True,
            "shared_scale": 0.5,
            **changes,
        }
    )


def module(spec: MoeSpec, devices: int = 1, **options: Any) -> tuple[MoeMlp, dict[str, np.ndarray]]:
    """With random leaves, and those by name; what is padding are zeros."""
    mesh = make_mesh(devices)
    made = MoeMlp(spec, E, mesh, jnp.dtype(jnp.float32), **options)
    rng, values = np.random.default_rng(0), {}
    sizes = {"router": (X, E), "router_bias": (X,), "gate_up": (X, 2, M, E), "down": (X, E, M)}
    sizes |= {"gate_up_bias": (X, 2, M), "down_bias": (X, E), "output_bias": (E,)}
    sizes |= {"shared_gate": (1, E), "shared.gate_up": (2, 6, E), "shared.down": (E, 6)}
    for path, leaf in nnx.to_flat_state(nnx.state(made)):
        name = ".".join(map(str, path))
        values[name] = rng.standard_normal(sizes[name]).astype(np.float32)
        widths = [(0, have - want) for have, want in zip(leaf.shape, sizes[name], strict=True)]
        leaf[...] = jax.device_put(
            np.pad(values[name], widths), named_sharding(mesh, leaf.logical_axes)
        )
    return made, values


def expected(spec: MoeSpec, leaves: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """One token and one expert at a time, in float64."""
    w = {name: leaf.astype(np.float64) for name, leaf in leaves.items()}
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    out = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        logits = w["router"] @ row + w["router_bias"]
        chosen = np.argsort(-logits)[:A]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = w["gate_up"][expert] @ row + w["gate_up_bias"][expert]
            gate, up = np.minimum(gate, 0.8), np.clip(up, -0.8, 0.8)
            hidden = (up + 1) * gate * sigmoid(1.3 * gate)
            out[token] += weight * (w["down"][expert] @ hidden + w["down_bias"][expert])
        gate, up = w["shared.gate_up"] @ row
        shared = w["shared.down"] @ (gate * sigmoid(gate) * up)
        out[token] += 0.5 * sigmoid(w["shared_gate"] @ row) * shared + w["output_bias"]
    return out


def tokens() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((T, E)).astype(np.float32)


@pytest.mark.parametrize(
    ("devices", "options"), [(1, {}), (2, {}), (2, {"expert_parallel": True}), (4, {"expert_parallel": True})]
)  # fmt: skip
def test_one_token_and_expert_at_a_time(devices: int, options: dict[str, Any]) -> None:
    spec = mixture()
    made, leaves = module(spec, devices, **options)
    found = jax.jit(lambda x: made(x, jnp.int32(T)))(tokens())
    np.testing.assert_allclose(found, expected(spec, leaves, tokens()), rtol=0, atol=2e-5)


def test_padding_tokens_go_to_no_expert() -> None:
    made, _ = module(mixture(shared=None, shared_gate=False, output_bias=False))
    x = tokens()
    x[5:] = np.nan
    found = np.asarray(made(x, jnp.int32(5)))
    clean = np.asarray(made(tokens(), jnp.int32(T)))
    np.testing.assert_array_equal(found[:5], clean[:5])


def test_a_token_does_not_depend_on_the_others_to_the_bit() -> None:
    made, _ = module(mixture())
    run = jax.jit(made)
    x = tokens()
    others = np.random.default_rng(2).standard_normal((T, E)).astype(np.float32)
    others[4] = x[1]
    assert np.array_equal(run(x, jnp.int32(T))[1], run(others, jnp.int32(T))[4])


def brute_force(spec: RoutingSpec, logits: np.ndarray, bias: np.ndarray) -> dict[int, float]:
    """Experts and weights of one token."""
    scores = (
        np.exp(logits) / np.exp(logits).sum()
        if spec.scores == "softmax"
        else 1 / (1 + np.exp(-logits))
    )
    choice = (logits if spec.correction_bias == "logits" else scores) + bias
    groups = np.arange(len(logits)) // (len(logits) // spec.num_groups)
    best = {}
    for group in set(groups):
        of_group = np.sort(choice[groups == group])[::-1]
        best[group] = of_group[0] if spec.group_score == "best" else of_group[:2].sum()
    allowed = sorted(best, key=best.__getitem__, reverse=True)[: spec.groups_per_token]
    experts = [x for x in np.argsort(-choice) if groups[x] in allowed][: spec.experts_per_token]
    total = scores[experts].sum() if spec.renormalize else 1.0
    return {int(x): spec.scale * scores[x] / total for x in experts}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalize": True, "scale": 2.5},
        {"scores": "sigmoid", "correction_bias": "scores", "renormalize": True},
        {"scores": "sigmoid", "correction_bias": "logits"},
        {"num_groups": 4, "groups_per_token": 2, "group_score": "best"},
        {"scores": "sigmoid", "correction_bias": "scores", "num_groups": 4, "groups_per_token": 2},
    ],
)
def test_routing_against_brute_force(changes: dict[str, Any]) -> None:
    spec = RoutingSpec(num_experts=12, experts_per_token=4, **changes)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((50, 12)).astype(np.float32)
    bias = 0.5 * rng.standard_normal(12).astype(np.float32)
    given = bias if spec.correction_bias else None
    experts, weights = jax.jit(route, static_argnums=0)(spec, logits, given)
    for row, chosen, found in zip(logits, np.asarray(experts), np.asarray(weights), strict=True):
        want = brute_force(spec, row.astype(np.float64), bias if given is not None else 0 * bias)
        assert set(chosen.tolist()) == set(want)
        np.testing.assert_allclose(found, [want[int(x)] for x in chosen], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token must be between 1 and num_experts"),
        ({"num_groups": 3}, "num_groups must divide num_experts"),
        ({"num_groups": 4, "groups_per_token": 1}, "leave experts_per_token"),
        ({"scores": "sparse_mixer"}, "experts_per_token must be 2"),
    ],
)
def test_routing_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingSpec(**{"num_experts": 8, "experts_per_token": 3, **changes})


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_logits_and_greedy_tokens_equal_transformers(name: str, tensor_parallel_size: int) -> None:
    prove(ENTRIES[name], tensor_parallel_size)


def test_devices_that_share_the_experts_give_what_transformers_gives() -> None:
    prove(ENTRIES["qwen2_moe"], 2, expert_parallel=True)


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 46.70), ("deepseek-v3", 671.03)])
def test_published_sizes_have_the_published_number_of_parameters(
    name: str, billions: float
) -> None:
    description = describe_model(PRESETS[name])
    decoder = FunctionalDecoder.create(description.spec, make_mesh(), "bfloat16")
    assert sum(prod(leaf.shape) for leaf in decoder.leaves.values()) / 1e9 == pytest.approx(
        billions, abs=0.01
    )


def test_experts_in_one_tensor_or_one_by_one(tmp_path: Path) -> None:
    original = checkpoint(ENTRIES["qwen3_moe"])
    shutil.copy(original / "config.json", tmp_path)
    num_experts = json.loads((original / "config.json").read_text())["num_local_experts"]
    tensors = load_file(original / "model.safetensors")
    layers = {name.split(".mlp.")[0] for name in tensors if ".experts.0." in name}
    for layer in layers:

        def each(kind: str, layer: str = layer) -> np.ndarray:
            names = [f"{layer}.mlp.experts.{x}.{kind}_proj.weight" for x in range(num_experts)]
            return np.stack([tensors.pop(name) for name in names])

        tensors[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate(
            [each("gate"), each("up")], axis=1
        )
        tensors[f"{layer}.mlp.experts.down_proj"] = each("down")
    assert layers
    save_file(tensors, tmp_path / "model.safetensors")
    for one, other in zip(load_checkpoint(original)[2], load_checkpoint(tmp_path)[2], strict=True):
        np.testing.assert_array_equal(one, other)
