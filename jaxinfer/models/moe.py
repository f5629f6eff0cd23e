"""Mixture of experts: tokens sorted by expert, two grouped matmuls, and a weighted sum. No token is dropped.

With tensor parallelism the devices share each expert's MLP rows, or, with expert parallelism, the experts; either way
each adds up what it has for every token, and the sums are added up between them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.layers import leaf, linear, product_dtype
from jaxinfer.models.mlp import ACTIVATION_FUNCTIONS, GatedMlp
from jaxinfer.models.moe_spec import ClampedSwiglu, MoeSpec
from jaxinfer.models.norms import sum_of_parts
from jaxinfer.models.routing import Choice, route
from jaxinfer.models.sharded_dims import round_up
from jaxinfer.models.stored_weight import StoredWeight
from jaxinfer.parallel.mesh import MODEL_AXIS, LogicalAxes, partition_spec, tensor_parallel_size
from kernels_pallas import QuantizedWeight, grouped_matmul

EXPERT_LEAVES = ("gate_up", "down", "gate_up_bias", "down_bias")
"""Of `MoeMlp`, those that each expert has a part of."""


class MoeMlp(nnx.Module):
    """X experts of M rows each, of which a token takes A."""

    def __init__(
        self,
        spec: MoeSpec,
        embed_dim: int,
        mesh: Mesh,
        dtype: jnp.dtype,
        *,
        expert_parallel: bool = False,
    ):
        E, X, M = embed_dim, spec.routing.num_experts, spec.mlp_dim
        devices = tensor_parallel_size(mesh)
        if expert_parallel:
            X = round_up(X, devices)
        else:
            M = round_up(M, devices)
        self.spec, self.mesh, self.expert_parallel = spec, mesh, expert_parallel
        router_dtype = jnp.float32 if spec.routing.float32 else dtype
        self.router = leaf((spec.routing.num_experts, E), (None, "embed"), router_dtype)
        if spec.routing.bias:
            self.router_bias = leaf((spec.routing.num_experts,), (None,), router_dtype)
        if spec.routing.correction_bias:
            self.correction_bias = leaf((spec.routing.num_experts,), (None,), jnp.float32)
        axes = expert_axes(expert_parallel)
        experts = {"num_in_axes": 1, "grouped": True}
        self.gate_up = leaf((X, 2, M, E), axes["gate_up"], dtype, **experts)
        self.down = leaf((X, E, M), axes["down"], dtype, **experts)
        if spec.bias:
            self.gate_up_bias = leaf((X, 2, M), axes["gate_up_bias"], dtype)
            self.down_bias = leaf((X, E), axes["down_bias"], dtype)
        if spec.output_bias:
            self.output_bias = leaf((E,), ("embed",), dtype)
        if spec.shared is not None:
            self.shared = GatedMlp(spec.shared, E, mesh, dtype)
        if spec.shared_gate:
            self.shared_gate = leaf((1, E), (None, "embed"), dtype)

    def __call__(self, x_te: jax.Array, num_tokens: jax.Array) -> jax.Array:
        """[T, E] -> [T, E]; the tokens from `num_tokens` on are padding, which no expert gets."""
        spec, dtype = self.spec, product_dtype(self.mesh, x_te.dtype)
        router = self.router[...]
        logits_tx = linear(x_te.astype(router.dtype), router)
        if spec.routing.bias:
            logits_tx += self.router_bias[...].astype(jnp.float32)
        correction_x = self.correction_bias[...] if spec.routing.correction_bias else None
        experts_ta, weights_ta = route(spec.routing, logits_tx, correction_x)
        real = jnp.arange(len(x_te), dtype=jnp.int32)[:, None] < num_tokens
        out_te = self._experts(
            x_te, (jnp.where(real, experts_ta, self.gate_up.shape[0]), weights_ta)
        )
        if spec.output_bias:
            out_te += self.output_bias[...].astype(dtype)
        if spec.shared is not None:
            shared_te = sum_of_parts(self.shared(x_te)).astype(jnp.float32) * spec.shared_scale
            if spec.shared_gate:
                shared_te *= jax.nn.sigmoid(linear(x_te, self.shared_gate[...]))
            out_te = (out_te.astype(jnp.float32) + shared_te).astype(dtype)
        return out_te

    def _experts(self, x_te: jax.Array, choice: Choice) -> jax.Array:
        leaves = {"gate_up": self.gate_up[...], "down": self.down[...]}
        if self.spec.bias:
            leaves |= {
                "gate_up_bias": self.gate_up_bias[...],
                "down_bias": self.down_bias[...],
            }
        run = partial(
            _add_up_experts,
            self.spec,
            dtype=product_dtype(self.mesh, x_te.dtype),
            expert_parallel=self.expert_parallel,
            devices=tensor_parallel_size(self.mesh),
        )
        if tensor_parallel_size(self.mesh) > 1:
            everywhere = PartitionSpec()
            axes = expert_axes(self.expert_parallel)
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(
                    everywhere,
                    everywhere,
                    {
                        name: weight.partition_specs()
                        if isinstance(weight, StoredWeight)
                        else partition_spec(axes[name])
                        for name, weight in leaves.items()
                    },
                ),
                out_specs=everywhere,
                check_vma=False,
            )
        return run(x_te, choice, leaves)


def expert_axes(expert_parallel: bool) -> dict[str, LogicalAxes]:
    """The logical axes of the experts' leaves: along the mesh go the experts, or each one's MLP rows."""
    X, M = ("experts", None) if expert_parallel else (None, "mlp")
    return {
        "gate_up": (X, None, M, "embed"),
        "down": (X, "embed", M),
        "gate_up_bias": (X, None, M),
        "down_bias": (X, "embed"),
    }


def _add_up_experts(
    spec: MoeSpec,
    x_te: jax.Array,
    choice: Choice,
    leaves: dict[str, jax.Array | StoredWeight],
    *,
    dtype: jnp.dtype,
    expert_parallel: bool,
    devices: int,
) -> jax.Array:
    """[T, E] in `dtype`, from this device's part of the experts, added up between the devices.

    A token's experts are added up in the order of its choice, so that its result depends on nothing else in the batch.
    """
    experts_ta, weights_ta = choice
    num_tokens, per_token = experts_ta.shape
    num_experts, _, mlp_dim, embed_dim = leaves["gate_up"].shape
    expert_i = experts_ta.reshape(-1)
    order_m = jnp.argsort(expert_i, stable=True)
    token_m = order_m // per_token
    total = num_experts * devices if expert_parallel else num_experts
    sizes_x = jnp.bincount(expert_i, length=total).astype(jnp.int32)
    first_expert, first_row = 0, 0
    if expert_parallel and devices > 1:
        first_expert = jax.lax.axis_index(MODEL_AXIS) * num_experts
        first_row = jnp.sum(jnp.where(jnp.arange(total) < first_expert, sizes_x, 0))
        sizes_x = jax.lax.dynamic_slice_in_dim(sizes_x, first_expert, num_experts)
    rows_me = x_te[token_m]
    if spec.scale_inputs:
        scaled = rows_me.astype(jnp.float32) * weights_ta.reshape(-1)[order_m, None]
        rows_me = scaled.astype(x_te.dtype)
    matmul = partial(grouped_matmul, group_sizes=sizes_x, first_row=first_row, dtype=dtype)
    gate_up = matmul(rows_me, _matrices(leaves["gate_up"]))
    gate_up = gate_up.astype(jnp.float32).reshape(-1, 2, mlp_dim)
    # Rows of no expert here, or of another device's, have none of their biases.
    local_m = expert_i[order_m] - first_expert
    mine_m1 = ((local_m >= 0) & (local_m < num_experts))[:, None]
    if spec.bias:
        bias = leaves["gate_up_bias"].at[local_m].get(mode="clip")
        gate_up += jnp.where(mine_m1[..., None], bias.astype(jnp.float32), 0)
    out_me = matmul(_activate(spec, gate_up).astype(x_te.dtype), _matrices(leaves["down"]))
    if spec.bias:
        bias = leaves["down_bias"].at[local_m].get(mode="clip").astype(dtype)
        if (
            not expert_parallel and devices > 1
        ):  # each has a part of the sum that the bias joins once
            mine_m1 &= jax.lax.axis_index(MODEL_AXIS) == 0
        out_me += jnp.where(mine_m1, bias, 0)
    place_i = jnp.zeros_like(order_m).at[order_m].set(jnp.arange(len(order_m), dtype=order_m.dtype))
    out_tae = out_me[place_i].reshape(num_tokens, per_token, embed_dim).astype(jnp.float32)
    if not spec.scale_inputs:
        out_tae *= weights_ta[..., None]
    out_te = jnp.sum(out_tae, axis=1).astype(dtype)
    return jax.lax.psum(out_te, MODEL_AXIS) if devices > 1 else out_te


def _matrices(weight: jax.Array | StoredWeight) -> jax.Array | QuantizedWeight:
    """[X, *out, in] to [X, N, in]"""

    def merged(x: jax.Array, num_in_axes: int) -> jax.Array:
        return x.reshape(x.shape[0], -1, *x.shape[x.ndim - num_in_axes :])

    if not isinstance(weight, StoredWeight):
        return merged(weight, 1)
    rows = weight.ndim - 1
    return weight.sole().map_arrays(lambda x: merged(x, x.ndim - rows))


def _activate(spec: MoeSpec, gate_up: jax.Array) -> jax.Array:
    """[M, 2, mlp] -> [M, mlp], float32."""
    gate, up = gate_up[:, 0], gate_up[:, 1]
    if isinstance(spec.activation, ClampedSwiglu):
        gate = jnp.minimum(gate, spec.activation.limit)
        up = jnp.clip(up, -spec.activation.limit, spec.activation.limit)
        return (up + 1) * gate * jax.nn.sigmoid(spec.activation.alpha * gate)
    return ACTIVATION_FUNCTIONS[spec.activation](gate) * up
