"""DeepSeek R1 and its distilled models, QwQ: every output begins with thoughts, and `<think>` may be missing."""

from __future__ import annotations

from jaxinfer.frontend.reasoning_parsers.base import TaggedReasoningParser


class DeepSeekR1Parser(TaggedReasoningParser):
    begins_within = True
