"""What `ragged_paged_attention` refuses, and that it says which argument is wrong."""

import jax.numpy as jnp
import pytest

from kernels_pallas import ragged_paged_attention


def call(**changes):
    arguments = {
        "q_tnh": jnp.zeros((2, 4, 8)),
        "kv_pages": (jnp.zeros((3, 2, 4, 8)), jnp.zeros((3, 2, 4, 8))),
        "block_tables": jnp.zeros((2, 5), jnp.int32),
        "seq_lens": jnp.zeros(2, jnp.int32),
        "query_start_loc": jnp.zeros(3, jnp.int32),
        "scale": 1.0,
    }
    return ragged_paged_attention(**(arguments | changes))


def test_accepts_the_valid_call():
    assert call().shape == (2, 4, 8)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"q_tnh must have shape \[T, N, H\], got \(2, 32\)", {"q_tnh": jnp.zeros((2, 32))}),
        ("q_tnh must have a dtype of .* got int32", {"q_tnh": jnp.zeros((2, 4, 8), jnp.int32)}),
        ("kv_pages must be a pair", {"kv_pages": (jnp.zeros((3, 2, 4, 8)),)}),
        (
            r"kv_pages: v_pages must have shape \[num_pages, K, page_size, 8\].*\(3, 2, 4, 16\)",
            {"kv_pages": (jnp.zeros((3, 2, 4, 8)), jnp.zeros((3, 2, 4, 16)))},
        ),
        (
            "kv_pages: k_pages must have q_tnh's dtype float32 or one of .*int8.*got bfloat16",
            {"kv_pages": (jnp.zeros((3, 2, 4, 8), jnp.bfloat16),) * 2},
        ),
        (
            "must agree in shape",
            {"kv_pages": (jnp.zeros((3, 2, 4, 8)), jnp.zeros((4, 2, 4, 8)))},
        ),
        (
            "4 query heads, which is not a multiple of the 3 kv heads",
            {"kv_pages": (jnp.zeros((3, 3, 4, 8)),) * 2},
        ),
        (r"block_tables must have shape \[R, P\]", {"block_tables": jnp.zeros(2, jnp.int32)}),
        ("block_tables must be int32, got float32", {"block_tables": jnp.zeros((2, 5))}),
        (r"seq_lens must have shape \[2\].*\(3,\)", {"seq_lens": jnp.zeros(3, jnp.int32)}),
        ("seq_lens must be int32", {"seq_lens": jnp.zeros(2)}),
        (
            r"query_start_loc must have shape \[3\].*\(2,\)",
            {"query_start_loc": jnp.zeros(2, jnp.int32)},
        ),
        ("scale must be a positive finite number, got 0", {"scale": 0.0}),
        ("scale must be a positive finite number, got nan", {"scale": float("nan")}),
        ("sliding_window must be at least 1 or None, got 0", {"sliding_window": 0}),
        ("soft_cap must be a positive finite number or None, got -1", {"soft_cap": -1.0}),
        (
            r"decode_only needs one token per row.*\(3, 4, 8\) has 3 tokens",
            {"q_tnh": jnp.zeros((3, 4, 8)), "decode_only": True},
        ),
        ("implementation must be one of .*got 'cuda'", {"implementation": "cuda"}),
    ],
)
def test_refuses(message, changes):
    with pytest.raises(ValueError, match=message):
        call(**changes)
