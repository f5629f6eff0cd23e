"""Norms with their leaves, and the additions to the residual stream that they follow. All compute in float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.models.layers import leaf, on_gpu
from jaxinfer.models.spec import NormSpec
from jaxinfer.parallel.mesh import LogicalAxes, tensor_parallel_size
from kernels_pallas import add_rms_norm as fused_add_rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Norm:
    """A norm and its weights."""

    spec: NormSpec = field(metadata={"static": True})
    weight: jax.Array | None
    bias: jax.Array | None = None

    def __call__(self, x: jax.Array, num_axes: int = 1, count: int | None = None) -> jax.Array:
        """Normalises the last `num_axes` axes together; float32, whatever the input's dtype.

        `count`: what their sum of squares is divided by, where zeros among them stand for nothing.
        """
        spec, x = self.spec, x.astype(jnp.float32)
        axes = tuple(range(-num_axes, 0))
        if spec.kind == "layer":
            x = x - jnp.mean(x, axis=axes, keepdims=True)
        if count is None:
            mean = jnp.mean(x * x, axis=axes, keepdims=True)
        else:
            mean = jnp.sum(x * x, axis=axes, keepdims=True) / count
        x = x * jax.lax.rsqrt(mean + spec.eps)
        if self.weight is not None:
            x = x * (self.weight.astype(jnp.float32) + spec.weight_offset)
        return x if self.bias is None else x + self.bias.astype(jnp.float32)


def add_norm_leaves(
    module: nnx.Module,
    name: str,
    spec: NormSpec,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: jnp.dtype,
) -> None:
    """The norm's weight as the module's leaf `name`, its bias as `{name}_bias`, where it has them."""
    if spec.has_weight:
        setattr(module, name, leaf(shape, axes, dtype))
    if spec.has_bias:
        setattr(module, f"{name}_bias", leaf(shape, axes, dtype))


def norm_of(module: nnx.Module, name: str, spec: NormSpec) -> Norm:
    """The norm whose leaves `add_norm_leaves` made."""
    weight = getattr(module, name)[...] if spec.has_weight else None
    return Norm(spec, weight, getattr(module, f"{name}_bias")[...] if spec.has_bias else None)


def add_norm(
    mesh: Mesh, x_te: jax.Array, update: jax.Array, update_norm: Norm | None, norm: Norm | None
) -> tuple[jax.Array, jax.Array]:
    """Adds `update` ([T, E], or [S, T, E] partial sums), normed itself where that is asked for, to the residual stream;
    the sum, and its norm for the next block (the sum again where `norm` is None)."""
    if norm is not None and _fused(norm) and (update_norm is None or update_norm.spec == norm.spec):
        update_weight = None if update_norm is None else update_norm.weight
        return _add_rms_norm(mesh, x_te, update, norm, update_weight)
    update = sum_of_parts(update)
    if update_norm is not None:
        update = update_norm(update)
    x_te = x_te + update.astype(x_te.dtype)
    return x_te, x_te if norm is None else norm(x_te).astype(x_te.dtype)


def sum_of_parts(update: jax.Array) -> jax.Array:
    """[T, E], or [S, T, E] partial sums, to [T, E]."""
    return update if update.ndim == 2 else jnp.sum(update.astype(jnp.float32), axis=0)


def _fused(norm: Norm) -> bool:
    """Whether `kernels_pallas.add_rms_norm` can say it."""
    return norm.spec.kind == "rms" and norm.spec.has_weight and not norm.spec.has_bias


def _add_rms_norm(
    mesh: Mesh,
    x_te: jax.Array,
    update: jax.Array,
    norm: Norm,
    update_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """`kernels_pallas.add_rms_norm`, on each device for itself."""
    devices = tensor_parallel_size(mesh)
    # XLA adds a matmul's whole product to the stream where the matmul writes it, which moves fewer bytes than a kernel that
    # reads both; it can't where sums over devices or another norm come between.
    is_epilogue = update.ndim == 2 and devices == 1 and update_weight is None
    fused = partial(
        fused_add_rms_norm,
        eps=norm.spec.eps,
        weight_offset=norm.spec.weight_offset,
        implementation="xla" if is_epilogue else None,
    )

    def run(x_te, update, weight, update_weight):
        return fused(x_te, update, weight, update_weight=update_weight)

    if on_gpu(mesh) and devices > 1:  # a kernel can't be partitioned by XLA
        everywhere = PartitionSpec()
        run = jax.shard_map(
            run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
    return run(x_te, update, norm.weight, update_weight)
