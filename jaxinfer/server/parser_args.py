"""Flags that say how tool calls are found in what a model writes: vLLM's names."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.frontend.plugins import load_plugin
from jaxinfer.frontend.tool_parsers import tool_parsers


def add_parser_args(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("tools")
    section.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="let the model choose whether to call a tool; needs --tool-call-parser",
    )
    section.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help=f"how the model writes calls: {', '.join(tool_parsers.names)}, or one of the plugin's",
    )
    section.add_argument(
        "--tool-parser-plugin", metavar="FILE", help="Python file that registers tool parsers"
    )
    section.add_argument(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="don't tell the model of tools that it must not call",
    )


def parser_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerSettings`. Raises `ValueError` for a file that can't be run."""
    if parsed.tool_parser_plugin is not None:
        try:
            load_plugin(parsed.tool_parser_plugin)
        except ValueError as error:
            raise ValueError(f"tool_parser_plugin: {error}") from error
    names = (
        "enable_auto_tool_choice",
        "tool_call_parser",
        "exclude_tools_when_tool_choice_none",
    )
    return {name: getattr(parsed, name) for name in names}
