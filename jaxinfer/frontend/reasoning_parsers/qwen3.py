"""Qwen3: `<think>` begins thoughts, in the prompt or in the output; without it there are none."""

from __future__ import annotations

from jaxinfer.frontend.reasoning_parsers.base import TaggedReasoningParser


class Qwen3Parser(TaggedReasoningParser):
    begins_within = False
