"""Parsers of reasoning by name. A file of your own (`--reasoning-parser-plugin`) adds others:

from jaxinfer.frontend.reasoning_parsers import ReasoningParser, register_reasoning_parser

@register_reasoning_parser("mine")
class MyParser(ReasoningParser): ...
"""

from jaxinfer.frontend.plugins import Registry
from jaxinfer.frontend.reasoning_parsers.base import (
    ReasoningParser,
    ReasoningPiece,
    TaggedReasoningParser,
)

_HERE = "jaxinfer.frontend.reasoning_parsers"

reasoning_parsers: Registry[ReasoningParser] = Registry(
    "reasoning parser",
    {
        "deepseek_r1": f"{_HERE}.deepseek_r1:DeepSeekR1Parser",
        "qwen3": f"{_HERE}.qwen3:Qwen3Parser",
    },
)

register_reasoning_parser = reasoning_parsers.register

__all__ = [
    "ReasoningParser",
    "ReasoningPiece",
    "TaggedReasoningParser",
    "reasoning_parsers",
    "register_reasoning_parser",
]
