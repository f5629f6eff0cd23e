"""Batches and planted faults for test_mosaic_decode: (case, config), and (case and config, module, edits of its text)."""

from __future__ import annotations

from typing import Any


def sizes(cores: int, min_blocks: int = 1, slots: int = 3, block_tokens: int = 64) -> dict:
    return {
        "block_tokens": block_tokens,
        "slots": slots,
        "blocks_per_core": 1,
        "cores": cores,
        "min_blocks": min_blocks,
    }


ONE_WALK = sizes(1, min_blocks=9)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # 20 tiles through 3 slots.
    "one_walk": ({"rows": [(500, 1), (64, 1), (1, 1)]}, ONE_WALK),
    # The window begins in the last page, which is not full, and every page before it is poisoned.
    "window_in_the_last_page": (
        {"rows": [(289, 1)], "kv_heads": 1, "group": 1, "sliding_window": 1},
        ONE_WALK,
    ),
    # 19 blocks and starts in shares of 4: three requests are cut.
    "up_to_eight_tokens_cut_between_walks": (
        {
            "rows": [(300, 3), (130, 8), (7, 7), (65, 1)],
            "group": 5,
            "head_size": 128,
            "return_lse": True,
            "padding_tokens": 2,
        },
        sizes(5),
    ),
    # 14 blocks and starts for each head in shares of 7: one request is cut for either.
    "two_loops_with_every_option": (
        {
            "rows": [(200, 8), (130, 1), (90, 2)],
            "group": 8,
            "kv_heads": 2,
            "sliding_window": 120,
            "soft_cap": 5.0,
            "sinks": True,
            "return_lse": True,
        },
        sizes(4),
    ),
    "float8": (
        {
            "rows": [(300, 4), (64, 1)],
            "head_size": 128,
            "page_size": 32,
            "page_dtype": "float8_e4m3fn",
        },
        sizes(1),
    ),
    "int8_odd_head_size": (
        {
            "rows": [(330, 1), (64, 2)],
            "group": 1,
            "head_size": 80,
            "page_size": 128,
            "dtype": "float16",
            "page_dtype": "int8",
            "sinks": True,
            "return_lse": True,
        },
        sizes(2),
    ),
    "not_causal": (
        {
            "rows": [(130, 3), (64, 1)],
            "group": 7,
            "head_size": 96,
            "kv_heads": 2,
            "page_size": 64,
            "causal": False,
            "return_lse": True,
        },
        sizes(2),
    ),
    "requests_left_out": (
        {
            "rows": [(130, 2), (64, 30), (0, 0), (5, 1)],
            "left_out": [1],
            "return_lse": True,
            "padding_tokens": 3,
        },
        sizes(3),
    ),
    # Five slots let the producer run two items ahead.
    "more_items_than_walks": ({"rows": [(20, 1)] * 7, "kv_heads": 2}, sizes(2, slots=5)),
}

LONG_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wide_heads": (
        {"rows": [(330, 2), (64, 1)], "group": 2, "head_size": 256, "sliding_window": 300},
        sizes(1, slots=4),
    ),
    "no_items": (
        {"rows": [(64, 30), (0, 0)], "left_out": [0], "return_lse": True, "padding_tokens": 3},
        sizes(3),
    ),
    "more_walks_than_items": ({"rows": [(300, 1)], "group": 16}, sizes(7, block_tokens=128)),
    "query_heads_in_two_parts": (
        {"rows": [(130, 1), (7, 1)], "group": 64, "head_size": 256, "sinks": True},
        sizes(2),
    ),
}

FAULT_CASE = CASES["one_walk"]
TOKENS_CASE = CASES["up_to_eight_tokens_cut_between_walks"]
OPTIONS_CASE = CASES["two_loops_with_every_option"]
MANY_CASE = CASES["more_items_than_walks"]
NARROW_CASE = CASES["float8"]
_FREE_KEYS = "plgpu.barrier_arrive(r.free.at[slots[0]])"
_QK = "scores = tiles.matmul(keys, queries_t, None, interpret)\n"
_FREE_VALUES = "plgpu.barrier_arrive(r.free.at[slots[1]])"

FAULTS: dict[str, tuple[tuple[dict, dict], str, list[tuple[str, str]]]] = {
    "no_wait_for_keys": (
        FAULT_CASE, "decode_kernel", [("plgpu.barrier_wait(r.full.at[slots[0]])", "pass")],
    ),
    "no_wait_for_values": (
        FAULT_CASE, "decode_kernel", [("plgpu.barrier_wait(r.full.at[slots[1]])", "pass")],
    ),
    "no_wait_for_queries": (
        FAULT_CASE, "decode_kernel", [("plgpu.barrier_wait(r.q_full.at[stage])", "pass")],
    ),
    "no_wait_for_free_slots": (
        FAULT_CASE, "decode_kernel",
        [("functools.partial(plgpu.barrier_wait, r.free.at[slot])", "lambda: None")],
    ),
    "queries_overwrite_those_of_an_item_before": (
        MANY_CASE, "decode_kernel", [("plgpu.barrier_wait(r.q_free.at[stage])", "None")],
    ),
    "queries_given_up_before_they_are_read": (
        MANY_CASE, "decode_kernel",
        [("        plgpu.barrier_arrive(r.q_free.at[stage])\n", ""),
         ("        plgpu.barrier_wait(r.q_full.at[stage])\n",
          "        plgpu.barrier_wait(r.q_full.at[stage])\n"
          "        plgpu.barrier_arrive(r.q_free.at[stage])\n")],
    ),
    "too_many_arrivals": (
        FAULT_CASE, "decode", [("num_arrivals=copies,", "num_arrivals=copies + 1,")],
    ),
    "too_few_arrivals": (
        FAULT_CASE, "decode", [("num_arrivals=copies,", "num_arrivals=copies // 2,")],
    ),
    "keys_given_up_before_use": (
        FAULT_CASE, "decode_kernel",
        [(f"                {_QK}                {_FREE_KEYS}\n",
          f"                {_FREE_KEYS}\n                {_QK}")],
    ),
    "values_given_up_before_use": (
        FAULT_CASE, "decode_kernel",
        [(f"                {_FREE_VALUES}\n            return accs",
          "                pass\n            return accs"),
         ("            weights_t = weights_s",
          f"            {_FREE_VALUES}\n            weights_t = weights_s")],
    ),
    "narrow_keys_given_up_before_use": (
        NARROW_CASE, "decode_kernel",
        [(f"                widen(keys, wide_s, columns=self.narrow_columns)\n                {_FREE_KEYS}\n",
          f"                {_FREE_KEYS}\n                widen(keys, wide_s, columns=self.narrow_columns)\n")],
    ),
    "result_overwrites_one_that_is_leaving": (
        MANY_CASE, "columns", [("plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass")],
    ),
    "a_token_sees_the_next_one": (
        TOKENS_CASE, "decode_kernel", [("seen = distance >= 0", "seen = distance >= -1")],
    ),
    "the_last_token_does_not_see_itself": (
        TOKENS_CASE, "decode_kernel", [("seen = distance >= 0", "seen = distance >= 1")],
    ),
    "edge_between_tokens_not_masked": (
        TOKENS_CASE, "decode_kernel",
        [("start + block > (first_position + 1", "start + block > (seq_len")],
    ),
    "window_one_too_long": (
        OPTIONS_CASE, "decode_kernel",
        [("distance < c.sliding_window", "distance <= c.sliding_window")],
    ),
    "window_edge_of_later_tokens_not_masked": (
        OPTIONS_CASE, "decode_kernel",
        [("on_edge |= start < first_visible + item.row.num_tokens - 1",
          "on_edge |= start < first_visible - block")],
    ),
    "whole_context_one_too_long": (
        CASES["not_causal"], "decode_kernel", [("position < seq_len", "position <= seq_len")],
    ),
    "unused_values_not_cleared": (
        FAULT_CASE, "tiles", [("row < end", "row < end + 128")],
    ),
    "pages_before_the_window_loaded": (
        CASES["window_in_the_last_page"], "tiles",
        [("return min(page_size, block_tokens)", "return block_tokens")],
    ),
    "page_off_by_one": (
        FAULT_CASE, "tiles",
        [("jnp.minimum(page, last_page)", "jnp.minimum(page + 1, last_page)")],
    ),
    "last_item_of_a_walk_not_loaded": (
        MANY_CASE, "decode_kernel",
        [("lax.fori_loop(0, self.walk.count, load_item", "lax.fori_loop(0, self.walk.count - 1, load_item")],
    ),
    "last_item_of_a_walk_left_out": (
        MANY_CASE, "decode_kernel",
        [("lax.fori_loop(0, self.walk.count,", "lax.fori_loop(0, self.walk.count - 1,")],
    ),
    "a_walk_takes_one_block_of_the_next": (
        TOKENS_CASE, "decode_plan",
        [("walk.end - start, row.num_blocks", "walk.end - start + 1, row.num_blocks")],
    ),
    "a_token_too_many_written": (
        TOKENS_CASE, "columns", [("@pl.loop(0, num_tokens)", "@pl.loop(0, num_tokens + 1)")],
    ),
    "merge_drops_the_last_part": (
        TOKENS_CASE, "merge", [("last_walk - index + 1, item", "last_walk - index, item")],
    ),
    "part_in_the_wrong_place": (
        TOKENS_CASE, "merge", [("+ (safe == 0).astype(jnp.int32)", "")],
    ),
    "log_sum_exp_in_base_2": (
        TOKENS_CASE, "columns", [("lse * (1 / tiles.LOG2_E)", "lse")],
    ),
    "sink_counted_in_every_part": (
        OPTIONS_CASE, "decode_kernel",
        [("        factor, lse = col.finish(peak, total, None)\n",
          "        sinks = col.sinks_of(self.r.sinks, item.head * 8, 8, 8, peak.shape[0])\n"
          "        factor, lse = col.finish(peak, total, sinks)\n")],
    ),
    "sink_forgotten_in_the_merge": (
        OPTIONS_CASE, "merge", [('if hasattr(self.r, "sinks"):', "if False:")],
    ),
    "tokens_of_no_request_left_as_they_are": (
        CASES["requests_left_out"], "decode_kernel", [('hasattr(self.r, "num_owned")', "False")],
    ),
}  # fmt: skip
CORE_FAULTS = [
    "no_wait_for_values",
    "no_wait_for_free_slots",
    "too_many_arrivals",
    "keys_given_up_before_use",
    "edge_between_tokens_not_masked",
    "a_walk_takes_one_block_of_the_next",
    "sink_counted_in_every_part",
]
