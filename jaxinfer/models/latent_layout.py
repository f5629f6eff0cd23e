"""From the tensors of a Hugging Face checkpoint to the leaves of multi-head latent attention."""

from __future__ import annotations

import numpy as np

from jaxinfer.models.latent_spec import LatentAttentionSpec
from jaxinfer.models.sharded_dims import ShardedDims, pad_axis
from jaxinfer.weights.plan import LeafSource, LoadPlan


def latent_attention_plan(
    spec: LatentAttentionSpec,
    embed_dim: int,
    dims: ShardedDims,
    prefix: str,
    *,
    interleaved_rope: bool,
) -> LoadPlan:
    """The leaves of `LatentAttention` from DeepSeek's tensors.

    `interleaved_rope`: neighbouring elements of the rotated parts are rotated against each other; here it is halves.
    Scores don't depend on the order, as queries and keys share it.
    """
    E, N, L = embed_dim, spec.num_heads, spec.latent_rank
    D, R, V = spec.plain_dim, spec.rope_dim, spec.value_dim
    heads = dims.shared_by_devices(N)
    order = np.arange(R)
    if interleaved_rope:
        order = np.concatenate([order[::2], order[1::2]])

    def queries(tensors: list[np.ndarray]) -> np.ndarray:
        x = tensors[0].reshape(N, D + R, -1)
        if interleaved_rope:
            x = np.concatenate([x[:, :D], x[:, D:][:, order]], axis=1)
        return pad_axis(x, axis=0, size=heads)

    def compressed(tensors: list[np.ndarray]) -> np.ndarray:
        x = tensors[0]
        return np.concatenate([x[:L], x[L:][order]]) if interleaved_rope else x

    def expanded(part: slice):
        def assemble(tensors: list[np.ndarray]) -> np.ndarray:
            return pad_axis(tensors[0].reshape(N, D + V, L)[:, part], axis=0, size=heads)

        return LeafSource((f"{prefix}kv_b_proj.weight",), ((N * (D + V), L),), assemble)

    def source(name: str, shape: tuple[int, ...], **more) -> LeafSource:
        return LeafSource((f"{prefix}{name}",), (shape,), **more)

    plan: LoadPlan = {
        ("kv_down",): source("kv_a_proj_with_mqa.weight", (L + R, E), assemble=compressed),
        ("kv_norm",): source("kv_a_layernorm.weight", (L,)),
        ("k_up",): expanded(slice(D)),
        ("v_up",): expanded(slice(D, None)),
        ("o",): source(
            "o_proj.weight",
            (E, N * V),
            assemble=lambda tensors: pad_axis(tensors[0].reshape(E, N, V), axis=1, size=heads),
        ),
    }
    rows = N * (D + R)
    if (rank := spec.query_rank) is None:
        plan["q_up",] = source("q_proj.weight", (rows, E), assemble=queries)
    else:
        plan["q_down",] = source("q_a_proj.weight", (rank, E))
        plan["q_norm",] = source("q_a_layernorm.weight", (rank,))
        plan["q_up",] = source("q_b_proj.weight", (rows, rank), assemble=queries)
    if spec.bias:
        if spec.query_rank is not None:
            plan["q_down_bias",] = source("q_a_proj.bias", (spec.query_rank,))
        plan["kv_down_bias",] = source("kv_a_proj_with_mqa.bias", (L + R,), assemble=compressed)
        plan["o_bias",] = source("o_proj.bias", (E,))
    return {("attention", *path): leaf for path, leaf in plan.items()}
