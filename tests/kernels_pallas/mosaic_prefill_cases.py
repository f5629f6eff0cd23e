"""Batches and planted faults for test_mosaic_prefill: (case, config), and (case and config, module, edits of its text)."""

from __future__ import annotations

from typing import Any

# Two slots: a tile of seven blocks fills each of them at least three times.
IN_TILES = {"block_tokens": 64, "stages": 2, "cores": 2, "queries_in_registers": False}
IN_REGISTERS = {"block_tokens": 64, "stages": 2, "cores": 3}
ONE_CONSUMER = {"block_tokens": 128, "stages": 2, "cores": 132, "consumers": 1}
SHARED_RESULT = {"block_tokens": 64, "stages": 3, "cores": 1, "own_result_tile": False}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunk_onto_context": ({"rows": [(440, 40), (7, 7)], "padding_tokens": 3}, IN_TILES),
    # The window begins in the last page, which is not full, and every page before it is poisoned.
    "window_in_the_last_page": (
        {"rows": [(300, 12)], "kv_heads": 1, "group": 1, "sliding_window": 1},
        IN_TILES,
    ),
    "sinks_and_lse_of_skipped_and_empty_requests": (
        {
            "rows": [(90, 2), (3, 1), (75, 70), (0, 0), (37, 37)],
            "group": 3,
            "kv_heads": 2,
            "head_size": 96,
            "page_size": 32,
            "padding_tokens": 5,
            "left_out": [0, 1],
            "sinks": True,
            "return_lse": True,
        },
        IN_REGISTERS,
    ),
    "window_and_cap": (
        {
            # The windows of a tile of (365, 16) begin on both sides of a block border.
            "rows": [(365, 16), (40, 40)],
            "group": 8,
            "page_size": 64,
            "sliding_window": 100,
            "soft_cap": 5.0,
            "return_lse": True,
        },
        IN_REGISTERS,
    ),
    "not_causal": (
        {
            "rows": [(200, 20), (64, 3), (0, 5)],
            "group": 5,
            "head_size": 80,
            "causal": False,
            "sinks": True,
            "return_lse": True,
        },
        ONE_CONSUMER,
    ),
    "float8": (
        {
            "rows": [(300, 20), (70, 10), (5, 5)],
            "group": 7,
            "page_dtype": "float8_e4m3fn",
            "return_lse": True,
        },
        IN_TILES,
    ),
    "int8_shared_result_tile": (
        {
            "rows": [(200, 20), (130, 40)],
            "group": 16,
            "page_dtype": "int8",
            "dtype": "float16",
            "soft_cap": 5.0,
            "sinks": True,
            "page_size": 128,
        },
        SHARED_RESULT,
    ),
    "wide_heads": (
        {
            "rows": [(300, 30), (5, 2)],
            "group": 1,
            "head_size": 256,
            "page_size": 64,
            "dtype": "float16",
        },
        {**ONE_CONSUMER, "block_tokens": 64, "queries_in_registers": False},
    ),
}

CORE_CASES = [
    "chunk_onto_context",
    "sinks_and_lse_of_skipped_and_empty_requests",
    "window_and_cap",
    "not_causal",
    "float8",
]

FAULT_CASE = CASES["chunk_onto_context"]
WINDOW_FAULT_CASE = CASES["window_and_cap"]
NARROW_FAULT_CASE = CASES["float8"]
SHARED_FAULT_CASE = CASES["int8_shared_result_tile"]
# Tiles of one or two blocks: nothing but its own barriers keeps the producer from running into the next tile.
SHORT_FAULT_CASE = CASES["sinks_and_lse_of_skipped_and_empty_requests"]
_ARRIVE_Q = "plgpu.barrier_arrive(refs.q_free)"

FAULTS: dict[str, tuple[tuple[dict, dict], str, list[tuple[str, str]]]] = {
    "no_wait_for_keys": (
        FAULT_CASE, "prefill_consumer", [("plgpu.barrier_wait(refs.k_full.at[here])", "pass")],
    ),
    "no_wait_for_values": (
        FAULT_CASE, "prefill_consumer",
        [("lambda: plgpu.barrier_wait(refs.v_full.at[before])", "lambda: None")],
    ),
    "no_wait_for_queries": (
        FAULT_CASE, "prefill_consumer", [("plgpu.barrier_wait(refs.q_full)", "pass")],
    ),
    "no_wait_for_free_slots": (
        FAULT_CASE, "prefill_producer",
        [("pl.when(filled + i >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))",
          "pass")],
    ),
    "next_queries_overwrite_the_current_ones": (
        SHORT_FAULT_CASE, "prefill_producer",
        [("pl.when(turn > 0)(lambda: plgpu.barrier_wait(refs.q_free))", "pass")],
    ),
    "queries_given_up_before_they_are_taken": (
        SHORT_FAULT_CASE, "prefill_consumer",
        [("        queries = take_queries(refs,",
          f"        {_ARRIVE_Q}\n        queries = take_queries(refs,"),
         (f"            {_ARRIVE_Q}\n        acc", "            pass\n        acc")],
    ),
    "result_tile_reused_before_its_store_has_been_read": (
        FAULT_CASE, "prefill_consumer",
        [("    plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n    o_tile", "    o_tile")],
    ),
    "shared_result_tile_given_up_too_early": (
        SHARED_FAULT_CASE, "prefill_consumer",
        [("            plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n", "")],
    ),
    "kernel_ends_before_its_stores": (
        FAULT_CASE, "prefill_consumer", [("    plgpu.wait_smem_to_gmem(0)\n", "")],
    ),
    "too_many_arrivals": (
        FAULT_CASE, "prefill",
        [('"k_full": plgpu.Barrier(num_arrivals=arrivals,',
          '"k_full": plgpu.Barrier(num_arrivals=arrivals + 1,')],
    ),
    "too_few_arrivals": (
        FAULT_CASE, "prefill",
        [('"v_full": plgpu.Barrier(num_arrivals=arrivals,',
          '"v_full": plgpu.Barrier(num_arrivals=arrivals // 2,')],
    ),
    "one_consumer_frees_for_both": (
        FAULT_CASE, "prefill",
        [('"v_free": plgpu.Barrier(num_arrivals=consumers,',
          '"v_free": plgpu.Barrier(num_arrivals=1,')],
    ),
    "values_freed_before_use": (
        FAULT_CASE, "prefill_consumer",
        [("        plgpu.barrier_arrive(refs.v_free.at[before])\n", ""),
         ("        plgpu.barrier_wait(refs.k_full.at[here])\n",
          "        plgpu.barrier_wait(refs.k_full.at[here])\n"
          "        plgpu.barrier_arrive(refs.v_free.at[before])\n")],
    ),
    "unused_values_not_cleared": (
        FAULT_CASE, "tiles", [("row < end", "row < end + 128")],
    ),
    "pages_before_the_window_loaded": (
        CASES["window_in_the_last_page"], "tiles",
        [("return min(page_size, block_tokens)", "return block_tokens")],
    ),
    "no_wait_for_cleared_values": (
        FAULT_CASE, "prefill_consumer", [("plgpu.barrier_wait(refs.cleared)", "pass")],
    ),
    "sees_the_next_token": (
        FAULT_CASE, "prefill_consumer", [("seen = columns <= last", "seen = columns <= last + 1")],
    ),
    "edge_one_block_late": (
        FAULT_CASE, "prefill_consumer",
        [("whole_until = own_position + 1 ", "whole_until = own_position + block ")],
    ),
    "page_off_by_one": (
        FAULT_CASE, "tiles",
        [("jnp.minimum(page, last_page)", "jnp.minimum(page + 1, last_page)")],
    ),
    "window_one_too_long": (
        WINDOW_FAULT_CASE, "prefill_consumer",
        [("seen &= columns > last - window", "seen &= columns >= last - window")],
    ),
    "window_edge_not_masked": (
        WINDOW_FAULT_CASE, "prefill_consumer",
        [("seen_by_all - tile.begin + (block - 1), ", "seen_by_all - tile.begin, ")],
    ),
    "not_faded": (
        FAULT_CASE, "prefill_consumer", [("tiles.faded(acc, fade)", "acc")],
    ),
    "tiles_skipped": (
        FAULT_CASE, "prefill_work",
        [("index = turn * problem.cores +", "index = turn * (problem.cores + 1) +")],
    ),
    "rows_of_the_next_request_written": (
        FAULT_CASE, "prefill_consumer", [("own_tokens == share", "own_tokens > 0")],
    ),
    "sink_of_the_next_head": (
        SHORT_FAULT_CASE, "prefill_consumer",
        [("problem.share.bit_length() - 1", "problem.share.bit_length() - 2")],
    ),
    "narrow_no_wait": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("plgpu.barrier_wait(refs.narrow_full.at[slot])", "pass")],
    ),
    "narrow_refilled_before_use": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("            cursor = issue(n + stages, cursor)\n", ""),
         ("            plgpu.barrier_wait(refs.narrow_full.at[slot])\n",
          "            plgpu.barrier_wait(refs.narrow_full.at[slot])\n"
          "            cursor = issue(n + stages, cursor)\n")],
    ),
    "widened_over_keys_in_use": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.k_free.at[0]))", "pass")],
    ),
    "widened_over_values_in_use": (
        NARROW_FAULT_CASE, "prefill_producer",
        [("pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.v_free.at[0]))", "pass")],
    ),
    "narrow_unused_values_not_cleared": (
        NARROW_FAULT_CASE, "dequant", [("row < end", "row < end + rows")],
    ),
    "value_scale_forgotten": (
        NARROW_FAULT_CASE, "prefill_consumer", [("refs.scales[1, tile.kv_head]", "1.0")],
    ),
}  # fmt: skip
CORE_FAULTS = [
    "no_wait_for_values",
    "no_wait_for_free_slots",
    "next_queries_overwrite_the_current_ones",
    "result_tile_reused_before_its_store_has_been_read",
    "sees_the_next_token",
]
