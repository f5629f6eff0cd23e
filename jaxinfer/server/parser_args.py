"""Flags that say how tool calls and thoughts are found in what a model writes: vLLM's names."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.frontend.plugins import load_plugin
from jaxinfer.frontend.reasoning_parsers import reasoning_parsers
from jaxinfer.frontend.tool_parsers import tool_parsers


def add_parser_args(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("tools and reasoning")
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
    section.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help=f"how the model marks its thoughts: {', '.join(reasoning_parsers.names)}, or one of the plugin's",
    )
    section.add_argument(
        "--reasoning-parser-plugin",
        metavar="FILE",
        help="Python file that registers reasoning parsers",
    )


def parser_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerSettings`. Raises `ValueError` for a file that can't be run."""
    plugins: list[str] = []
    for name in ("tool_parser_plugin", "reasoning_parser_plugin"):
        path = getattr(parsed, name)
        if path is not None:
            plugins.append(path)
            try:
                load_plugin(path)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    names = (
        "enable_auto_tool_choice",
        "tool_call_parser",
        "exclude_tools_when_tool_choice_none",
        "reasoning_parser",
    )
    return {"plugins": tuple(plugins), **{name: getattr(parsed, name) for name in names}}
