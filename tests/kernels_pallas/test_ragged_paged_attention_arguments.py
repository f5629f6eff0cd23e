"""What `ragged_paged_attention` refuses, and that it says which argument is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import ragged_paged_attention

INT8 = jnp.zeros((3, 2, 4, 8), jnp.int8)
FULL = {"seq_lens": jnp.full(2, 20, jnp.int32)}


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


def test_accepts_numpy_arrays():
    arrays = {
        "q_tnh": np.zeros((2, 4, 8), np.float32),
        "block_tables": np.zeros((2, 5), np.int32),
        "seq_lens": np.array([4, 0], np.int32),
        "query_start_loc": np.array([0, 2, 2], np.int32),
    }
    assert call(**arrays).shape == (2, 4, 8)


def test_more_tokens_than_context_are_for_whole_contexts_only():
    batch = {
        "query_start_loc": jnp.array([0, 2, 2], jnp.int32),
        "seq_lens": jnp.array([1, 0], jnp.int32),
    }
    with pytest.raises(ValueError, match="row 0 has 2"):
        call(**batch)
    assert call(**batch, causal=False).shape == (2, 4, 8)


def test_numbers_are_looked_at_where_they_are_known_though_the_queries_are_not():
    batch = {
        "block_tables": np.zeros((2, 5), np.int32),
        "seq_lens": np.array([21, 0], np.int32),
        "query_start_loc": np.zeros(3, np.int32),
    }

    def attend(q_tnh):
        return call(q_tnh=q_tnh, **batch)

    with pytest.raises(ValueError, match="seq_lens must be from 0 to 20"):
        jax.eval_shape(attend, jnp.zeros((2, 4, 8)))


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
        ("sliding_window must be None with causal=False", {"causal": False, "sliding_window": 3}),
        (r"sinks must be float32 \[4\].*float32 \(2,\)", {"sinks": jnp.zeros(2)}),
        (r"alibi_slopes must be float32 \[4\].*\(2,\)", {"alibi_slopes": jnp.zeros(2)}),
        (
            "alibi_slopes must be None with causal=False",
            {"alibi_slopes": jnp.zeros(4), "causal": False},
        ),
        ("sinks must be float32 .*bfloat16", {"sinks": jnp.zeros(4, jnp.bfloat16)}),
        ("kv_scales must be given for pages of int8", {"kv_pages": (INT8, INT8)}),
        (
            "kv_scales must be None unless the pages have one of .*pages of float32",
            {"kv_scales": (jnp.ones(2), jnp.ones(2))},
        ),
        (
            "kv_scales must be a pair",
            {"kv_pages": (INT8, INT8), "kv_scales": (jnp.ones(2),)},
        ),
        (
            r"kv_scales: v_scale must be float32 \[2\].*\(4,\)",
            {"kv_pages": (INT8, INT8), "kv_scales": (jnp.ones(2), jnp.ones(4))},
        ),
        (
            "k_pages int8 .* and v_pages float8_e4m3fn .* must agree in shape and dtype",
            {"kv_pages": (INT8, jnp.zeros((3, 2, 4, 8), jnp.float8_e4m3fn))},
        ),
        (
            r"block_tables must hold pages from 0 to 2, got 3 at \[1, 4\]",
            {"block_tables": jnp.zeros((2, 5), jnp.int32).at[1, 4].set(3)},
        ),
        (
            r"block_tables must hold pages from 0 to 2, got -1 at \[0, 2\]",
            {"block_tables": np.array([[0, 0, -1], [0, 0, 0]], np.int32)},
        ),
        (
            r"seq_lens must be from 0 to 20 \(5 pages of 4\), got 21 at \[1\]",
            {"seq_lens": jnp.array([20, 21], jnp.int32)},
        ),
        ("seq_lens must be from 0 to 20 .*got -2 at", {"seq_lens": np.array([-2, 3], np.int32)}),
        (
            r"query_start_loc must not decrease, got 2 and then 1 at \[1\]",
            {"query_start_loc": jnp.array([0, 2, 1], jnp.int32)} | FULL,
        ),
        (
            "query_start_loc must be from 0 to 2 .*got 0 to 3",
            {"query_start_loc": jnp.array([0, 2, 3], jnp.int32)} | FULL,
        ),
        (
            "row 1 has 2 in query_start_loc, and 1 in seq_lens",
            {
                "query_start_loc": jnp.array([0, 0, 2], jnp.int32),
                "seq_lens": jnp.array([0, 1], jnp.int32),
            },
        ),
    ],
)
def test_refuses(message, changes):
    with pytest.raises(ValueError, match=message):
        call(**changes)
