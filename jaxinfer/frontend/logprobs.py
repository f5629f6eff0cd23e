"""From the core's columns of logprobs to what users read, with the text of each candidate."""

from __future__ import annotations

from jaxinfer.engine.messages import TokenLogprobs
from jaxinfer.frontend.token_text import TextStream
from jaxinfer.outputs import Logprob, PositionLogprobs


def position_logprobs(scored: TokenLogprobs, stream: TextStream | None) -> PositionLogprobs:
    """One position, in the context of `stream`, which advances by the chosen token. No stream, no text."""
    ids, values = scored.token_ids, scored.logprobs
    texts = [None] * len(ids) if stream is None else [stream.peek(token_id) for token_id in ids]
    chosen = Logprob(values[0], scored.rank, texts[0])
    entries = {ids[0]: chosen}
    for rank in range(1, len(ids)):
        if ids[rank] != ids[0]:
            entries[ids[rank]] = Logprob(values[rank], rank, texts[rank])
    if stream is not None:
        stream.push(ids[:1])
    return entries
