"""When a request ends, and why. A token has been appended before the rules are asked."""

from __future__ import annotations

from jaxinfer.engine.messages import FinishedRequest, FinishReason
from jaxinfer.engine.plan import Bool, Int32
from jaxinfer.engine.request import Request
from jaxinfer.engine.row_table import RowTable


def rows_to_check(table: RowTable, rows: Int32, tokens: Int32, num_output: Int32) -> Bool:
    """Which of `rows` [N] may end with their new token: it is a stop token, or there is no room for another.
    `num_output` [N] counts it."""
    is_full = table.num_prompt[rows] + num_output >= table.max_total[rows]
    return table.is_stop_token(rows, tokens) | is_full


def end_of(request: Request, token: int, num_output: int) -> FinishedRequest | None:
    """How the request ends with `token`, the last of its `num_output` tokens; None when it goes on.

    A stop token counts only once there are `min_tokens`; the end of the grammar and of the room count always.
    """
    if num_output >= request.min_tokens:
        if token in request.eos_token_ids:
            return FinishedRequest(request.request_id, FinishReason.STOP)
        if token in request.stop_token_ids:
            return FinishedRequest(request.request_id, FinishReason.STOP, token)
    if request.matcher is not None and request.matcher.is_finished:
        return FinishedRequest(request.request_id, FinishReason.STOP)
    if len(request.prompt_token_ids) + num_output >= request.max_total_tokens:
        return FinishedRequest(request.request_id, FinishReason.LENGTH)
    return None
