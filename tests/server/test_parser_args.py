from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from jaxinfer.engine_args import EngineArgs
from jaxinfer.frontend.reasoning_parsers import reasoning_parsers
from jaxinfer.frontend.tool_parsers import tool_parsers
from jaxinfer.server.args import add_server_args, server_settings
from jaxinfer.server.settings import ServerSettings

PLUGIN = """
from jaxinfer.frontend.reasoning_parsers import reasoning_parsers
from jaxinfer.frontend.tool_parsers import CallPiece, ContentPiece, ToolParser, register_tool_parser

@register_tool_parser("zz_shouting", "zz_loud")
class Shouting(ToolParser):
    def feed(self, text):
        return [ContentPiece(text.upper())]

    def finish(self):
        return []
"""


def settings_of(*flags: str) -> ServerSettings:
    parser = argparse.ArgumentParser()
    add_server_args(parser)
    return server_settings(parser.parse_args(flags), EngineArgs("some/model"))


def test_flags_reach_their_fields():
    found = settings_of(
        "--enable-auto-tool-choice",
        *("--tool-call-parser", "qwen3_coder", "--exclude-tools-when-tool-choice-none"),
    )
    assert found.enable_auto_tool_choice and found.tool_call_parser == "qwen3_coder"
    assert found.exclude_tools_when_tool_choice_none


def test_a_plugin_brings_parsers_of_its_own(tmp_path: Path):
    file = tmp_path / "shouting.py"
    file.write_text(PLUGIN)
    flags = ("--tool-parser-plugin", str(file), "--tool-call-parser")
    assert settings_of(*flags, "zz_loud").tool_call_parser == "zz_loud"
    assert tool_parsers.get("zz_shouting")().parse("hi").content == "HI"
    with pytest.raises(
        ValueError,
        match="hermes, llama3_json, mistral, pythonic, qwen3_coder, zz_loud, zz_",
    ):
        settings_of(*flags, "zz_louder")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--tool-call-parser", "herms"],
            "tool_call_parser must be one of hermes, llama3_json, .*, got 'herms'",
        ),
        (["--reasoning-parser", "qwen"], "reasoning_parser must be one of deepseek_r1, qwen3"),
        (["--enable-auto-tool-choice"], "needs a tool_call_parser: hermes, llama3_json, mistral"),
        (["--tool-parser-plugin", "/nowhere.py"], "tool_parser_plugin: There is no file /nowhere"),
    ],
)
def test_what_stops_the_start(flags: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        settings_of(*flags)


def test_a_plugin_brings_reasoning_parsers_too(tmp_path: Path):
    file = tmp_path / "thoughts.py"
    file.write_text(
        "from jaxinfer.frontend.reasoning_parsers import *\n"
        '@register_reasoning_parser("zz_thoughts")\n'
        "class Thoughts(TaggedReasoningParser):\n"
        '    start_token, end_token = "<thought>", "</thought>"\n'
    )
    flags = ("--reasoning-parser-plugin", str(file), "--reasoning-parser", "zz_thoughts")
    assert settings_of(*flags).reasoning_parser == "zz_thoughts"
    found = reasoning_parsers.get("zz_thoughts")(None).feed("<thought>a</thought>b")
    assert found == ("a", "b")


def test_a_plugin_that_fails_says_how(tmp_path: Path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    with pytest.raises(ValueError, match=r"tool_parser_plugin: .*broken.py .*ZeroDivisionError"):
        settings_of("--tool-parser-plugin", str(file))
