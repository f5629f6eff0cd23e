"""Parsers of tool calls by name. A file of your own (`--tool-parser-plugin`) adds others:

from jaxinfer.frontend.tool_parsers import ToolParser, register_tool_parser

@register_tool_parser("mine")
class MyParser(ToolParser): ...
"""

from jaxinfer.frontend.plugins import Registry
from jaxinfer.frontend.tool_parsers.base import (
    CallPiece,
    ContentPiece,
    ParsedText,
    Piece,
    ToolCall,
    ToolParser,
    new_call_id,
)

_HERE = "jaxinfer.frontend.tool_parsers"

tool_parsers: Registry[ToolParser] = Registry(
    "tool parser",
    {
        "hermes": f"{_HERE}.hermes:HermesParser",
        "llama3_json": f"{_HERE}.llama3_json:Llama3JsonParser",
        "mistral": f"{_HERE}.mistral:MistralParser",
        "pythonic": f"{_HERE}.pythonic:PythonicParser",
        "qwen3_coder": f"{_HERE}.qwen3_coder:Qwen3CoderParser",
    },
)

register_tool_parser = tool_parsers.register

__all__ = [
    "CallPiece",
    "ContentPiece",
    "ParsedText",
    "Piece",
    "ToolCall",
    "ToolParser",
    "new_call_id",
    "register_tool_parser",
    "tool_parsers",
]
