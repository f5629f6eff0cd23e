"""What `mla_attention` and `mla_cache_update` refuse, and that they say which argument is wrong."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import mla_attention, mla_cache_update
from kernels_pallas.mla_attention.mosaic_gpu_config import MlaConfig, tuned_config


def attend(**changes):
    arguments = {
        "q_latent_tnl": jnp.zeros((2, 4, 8)),
        "q_rope_tnr": jnp.zeros((2, 4, 4)),
        "latent_pages": jnp.zeros((3, 4, 12)),
        "block_tables": jnp.zeros((2, 5), jnp.int32),
        "seq_lens": jnp.zeros(2, jnp.int32),
        "query_start_loc": jnp.zeros(3, jnp.int32),
        "scale": 1.0,
    }
    return mla_attention(**(arguments | changes))


def update(**changes):
    arguments = {
        "latent_pages": jnp.zeros((3, 4, 12)),
        "latent_tl": jnp.zeros((2, 8)),
        "k_rope_tr": jnp.zeros((2, 4)),
        "slot_mapping": jnp.array([1, 5], jnp.int32),
    }
    return mla_cache_update(**(arguments | changes))


def test_accepts_valid_calls():
    assert jax.eval_shape(attend).shape == (2, 4, 8)
    assert jax.eval_shape(update).shape == (3, 4, 12)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"q_latent_tnl must have shape \[T, N, L\], got \(2, 32\)", {"q_latent_tnl": jnp.zeros((2, 32))}),
        ("q_latent_tnl must have a dtype of .* got int32", {"q_latent_tnl": jnp.zeros((2, 4, 8), jnp.int32)}),
        (r"q_rope_tnr must have shape \[2, 4, R\].*\(3, 4, 4\)", {"q_rope_tnr": jnp.zeros((3, 4, 4))}),
        ("q_rope_tnr must have q_latent_tnl's dtype float32, got bfloat16", {"q_rope_tnr": jnp.zeros((2, 4, 4), jnp.bfloat16)}),
        (r"latent_pages must have shape \[num_pages, page_size, 12\].*\(3, 4, 16\)", {"latent_pages": jnp.zeros((3, 4, 16))}),
        (r"latent_pages must have shape .*\(3, 1, 4, 12\)", {"latent_pages": jnp.zeros((3, 1, 4, 12))}),
        ("latent_pages must have q_latent_tnl's dtype float32, got bfloat16", {"latent_pages": jnp.zeros((3, 4, 12), jnp.bfloat16)}),
        (r"block_tables must have shape \[B, P\]", {"block_tables": jnp.zeros(2, jnp.int32)}),
        ("block_tables must be int32, got float32", {"block_tables": jnp.zeros((2, 5))}),
        (r"seq_lens must have shape \[2\].*\(3,\)", {"seq_lens": jnp.zeros(3, jnp.int32)}),
        ("seq_lens must be int32", {"seq_lens": jnp.zeros(2)}),
        (r"query_start_loc must have shape \[3\].*\(2,\)", {"query_start_loc": jnp.zeros(2, jnp.int32)}),
        ("scale must be a positive finite number, got 0", {"scale": 0.0}),
        ("scale must be a positive finite number, got inf", {"scale": float("inf")}),
        (
            r"decode_only needs one token per row.*\(3, 4, 8\) has 3 tokens",
            {"q_latent_tnl": jnp.zeros((3, 4, 8)), "q_rope_tnr": jnp.zeros((3, 4, 4)), "decode_only": True},
        ),
        ("implementation must be one of .*got 'cuda'", {"implementation": "cuda"}),
        (r"Mosaic GPU .* q_latent_tnl has dtype float32", {"implementation": "mosaic_gpu"}),
    ],
)  # fmt: skip
def test_attention_refuses(message, changes):
    with pytest.raises(ValueError, match=message):
        attend(**changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"latent_pages must have shape .*\(3, 48\)", {"latent_pages": jnp.zeros((3, 48))}),
        (r"latent_tl must have shape \[2, size\].*\(3, 8\)", {"latent_tl": jnp.zeros((3, 8))}),
        (r"k_rope_tr must have shape \[2, size\].*\(2,\)", {"k_rope_tr": jnp.zeros(2)}),
        (r"must fill the 12 columns", {"k_rope_tr": jnp.zeros((2, 5))}),
        ("latent_tl must have latent_pages' dtype float32, got bfloat16", {"latent_tl": jnp.zeros((2, 8), jnp.bfloat16)}),
        ("slot_mapping must be int32", {"slot_mapping": jnp.zeros(2)}),
    ],
)  # fmt: skip
def test_update_refuses(message, changes):
    with pytest.raises(ValueError, match=message):
        update(**changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("MlaConfig.stages must be at least 3, got 2", {"stages": 2}),
        ("MlaConfig.query_tiles must be 0 to 3, got 4", {"query_tiles": 4}),
        ("MlaConfig.cores must be at least 1, got 0", {"cores": 0}),
        ("MlaConfig.start_blocks must not be negative, got -1", {"start_blocks": -1}),
        ("MlaConfig needs .* bytes of shared memory; a block has 232448", {"stages": 6}),
    ],
)  # fmt: skip
def test_configs_that_can_not_run_are_refused(message, changes):
    with pytest.raises(ValueError, match=message):
        MlaConfig(**({"stages": 4, "query_tiles": 2} | changes))


def test_the_tuned_config_keeps_enough_loads_in_flight():
    assert tuned_config().bytes_in_flight >= 64 << 10
