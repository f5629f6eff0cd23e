"""Tokens that a grammar leaves no choice of: they join the output without being sampled, and are computed in one step."""

from __future__ import annotations

import numpy as np

from jaxinfer.engine.plan import Int32, TokenMask
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable
from jaxinfer.engine.scheduled_step import ScheduledStep


def forced_runs(step: ScheduledStep, mask: TokenMask | None, table: RowTable) -> dict[int, Int32]:
    """By position in the step's plan: at least two tokens that must come next, the first of which the step samples.

    Those that end the request are left to the ordinary way, and rows with drafts go as far as these.
    """
    if mask is None or not table.num_guided:
        return {}
    runs: dict[int, Int32] = {}
    guided = np.flatnonzero(table.guided[step.batch.rows[mask.positions]])
    certain = np.bitwise_count(mask.words[guided]).sum(axis=1) == 1
    drafts = step.plan.drafts
    for i in guided[certain].tolist():
        position = int(mask.positions[i])
        if drafts is not None and drafts.num_drafts[position]:
            continue
        request = step.batch.requests[position]
        if not may_jump(request):
            continue
        assert request.matcher is not None
        room = request.max_total_tokens - int(table.num_tokens[request.row]) + 1
        tokens = request.matcher.forced_tokens()[: max(room, 0)]
        ends = request.eos_token_ids | request.stop_token_ids
        length = next((n for n, token in enumerate(tokens) if token in ends), len(tokens))
        if length > 1 and mask.words[i, tokens[0] >> 5] >> np.uint32(tokens[0] & 31) & 1:
            runs[position] = np.array(tokens[:length], np.int32)
    return runs


def may_jump(request: Request) -> bool:
    """Whether nothing but the token itself is wanted of a sampled token: no logprobs, no counts for penalties, no rules
    beside the grammar."""
    params = request.sampling_params
    return (
        params.logprobs is None
        and params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
        and params.allowed_token_ids is None
        and not params.bad_words_token_ids
    )
