"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on a target's last hidden state, each for a token further ahead.

Head k predicts the token k + 2 places after the hidden state's, from residual blocks x + SiLU(W x + b) and a matrix of
its own. Only public safetensors names are read: those of the authors ("0.0.linear.weight", "0.1.weight") and those of
vLLM's conversion ("blocks.0.layers.0.weight", "lm_heads.0.weight").
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.checkpoint_layout import padded
from jaxinfer.models.decoder import head_logits
from jaxinfer.models.family import Config
from jaxinfer.models.functional import FlatModule
from jaxinfer.models.layers import leaf, linear
from jaxinfer.models.sharded_dims import round_up
from jaxinfer.models.spec import DecoderSpec
from jaxinfer.parallel.mesh import tensor_parallel_size
from jaxinfer.weights.plan import LeafPath, LeafSource, LoadPlan

IGNORED_TENSORS = (r"(medusa_heads?\.)?(\d+\.|blocks\.|lm_heads\.).*",)
"""Of heads beyond the first `num_heads`."""


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    vocab_size: int
    embed_dim: int
    num_heads: int
    """The heads in use, the first ones of the checkpoint."""
    num_blocks: int
    """Residual blocks of each head."""
    bias: bool


class MedusaHead(nnx.Module):
    def __init__(self, spec: MedusaSpec, padded_vocab_size: int, dtype: jnp.dtype):
        E = spec.embed_dim
        self.blocks = nnx.List(
            leaf((E, E), ("embed", "embed"), dtype) for _ in range(spec.num_blocks)
        )
        if spec.bias:
            self.biases = nnx.List(leaf((E,), ("embed",), dtype) for _ in range(spec.num_blocks))
        self.lm_head = leaf((padded_vocab_size, E), ("vocab", "embed"), dtype)
        self.bias = spec.bias

    def __call__(self, x_ne: jax.Array) -> jax.Array:
        """[N, E] -> [N, E], what the head's matrix takes."""
        for i, block in enumerate(self.blocks):
            update = linear(x_ne, block[...])
            if self.bias:
                update += self.biases[i][...].astype(jnp.float32)
            x_ne = (x_ne.astype(jnp.float32) + jax.nn.silu(update)).astype(x_ne.dtype)
        return x_ne


class Medusa(nnx.Module):
    def __init__(self, spec: MedusaSpec, mesh: Mesh, dtype: jnp.dtype):
        rows = round_up(spec.vocab_size, tensor_parallel_size(mesh))
        self.spec, self.mesh = spec, mesh
        self.heads = nnx.List(MedusaHead(spec, rows, dtype) for _ in range(spec.num_heads))

    def __call__(self, hidden_ne: jax.Array) -> list[jax.Array]:
        """The target's last hidden states [N, E] to each head's logits [N, vocab_size] float32."""
        return [
            head_logits(self.mesh, head.lm_head[...], head(hidden_ne), self.spec.vocab_size)
            for head in self.heads
        ]


@dataclass(frozen=True)
class FunctionalMedusa:
    """The heads without their weights."""

    spec: MedusaSpec
    mesh: Mesh
    dtype: jnp.dtype
    module: FlatModule[Medusa]

    @classmethod
    def create(cls, spec: MedusaSpec, mesh: Mesh, dtype: jnp.dtype | str) -> FunctionalMedusa:
        dtype = jnp.dtype(dtype)
        return cls(spec, mesh, dtype, FlatModule.create(lambda: Medusa(spec, mesh, dtype), mesh))

    @property
    def leaves(self) -> dict[LeafPath, jax.ShapeDtypeStruct]:
        return self.module.leaves

    def kv_cache_shapes(self, num_pages: int, page_size: int) -> tuple[()]:
        """Nothing: heads look at no other token."""
        return ()


def medusa_spec(
    config: Config, target: DecoderSpec, num_drafts: int, tensor_names: Collection[str]
) -> MedusaSpec:
    """Read a checkpoint's config and check it against its target. `tensor_names` decide whether blocks have biases.

    Raises `ValueError` for heads of another vocabulary or hidden size, and where `num_drafts` needs more heads.
    """
    num_heads = config.get("num_heads") or config.get("medusa_num_heads")
    if not num_heads or num_heads < num_drafts:
        raise ValueError(
            f"num_speculative_tokens is {num_drafts}, but the medusa checkpoint has {num_heads or 0} heads "
            "(num_heads or medusa_num_heads of its config)."
        )
    for key, ours in (("vocab_size", target.vocab_size), ("hidden_size", target.embed_dim)):
        if config.get(key, ours) != ours:
            raise ValueError(
                f"The medusa checkpoint has {key} {config[key]}, the target's is {ours}."
            )
    num_blocks = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
    has_bias = _names(0, 0, num_blocks, tensor_names)[1] in tensor_names
    return MedusaSpec(target.vocab_size, target.embed_dim, num_drafts, num_blocks, has_bias)


def medusa_plan(model: FunctionalMedusa, tensor_names: Collection[str]) -> LoadPlan:
    """How each leaf is made, whichever of the names in use the checkpoint has."""
    spec = model.spec
    E, V = spec.embed_dim, spec.vocab_size
    vocabulary = padded(axis=0, size=round_up(V, tensor_parallel_size(model.mesh)))
    plan: LoadPlan = {}
    for i in range(spec.num_heads):
        for j in range(spec.num_blocks):
            weight, bias, head = _names(i, j, spec.num_blocks, tensor_names)
            plan["heads", str(i), "blocks", str(j)] = LeafSource((weight,), ((E, E),))
            if spec.bias:
                plan["heads", str(i), "biases", str(j)] = LeafSource((bias,), ((E,),))
        plan["heads", str(i), "lm_head"] = LeafSource((head,), ((V, E),), vocabulary)
    return plan


def _names(
    head: int, block: int, num_blocks: int, tensor_names: Collection[str]
) -> tuple[str, str, str]:
    """What the checkpoint calls a block's weight and bias, and the matrix of its head."""
    if any(name.startswith("blocks.") for name in tensor_names):
        prefix = f"blocks.{head}.layers.{block}."
        return f"{prefix}weight", f"{prefix}bias", f"lm_heads.{head}.weight"
    prefix = "medusa_head." if any(n.startswith("medusa_head.") for n in tensor_names) else ""
    linear_layer = f"{prefix}{head}.{block}.linear."
    return f"{linear_layer}weight", f"{linear_layer}bias", f"{prefix}{head}.{num_blocks}.weight"
