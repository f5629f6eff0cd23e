"""Each example of docs/clients.md prints what the model says, or does what it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.live_server import live_server
from tests.clients.snippets import ADDRESS, node_modules, run, run_python, snippets

RIVERS = "The Po, the Tiber and the Arno."
WARM = "It is 21 degrees in Rome."
CITY = '{"name": "Rome", "country": "Italy"}'
ARGUMENTS = '{"city": "Rome"}'


def guide(prompt: str) -> str | Sequence[str]:
    """A model that has the weather looked up, and answers what it was asked in the form that masks leave it."""
    if "How warm" in prompt:
        if "21 degrees" not in prompt:
            return calls("weather", ARGUMENTS)
        return calls("final_answer", f'{{"answer": "{WARM}"}}') if AGENT in prompt else WARM
    if "Tell me of" in prompt:
        forms = ("City", CITY), ("Weather", ARGUMENTS), ("final_result", CITY)
        return [CITY, *(text for form in forms for text in calls(*form))]
    return ['{"country": "Italy"}'] if "country" in prompt else RIVERS


AGENT = "final_answer"
"""The tool by which smolagents' models end."""


def calls(name: str, arguments: str) -> list[str]:
    """In the model's own notation, as grammars demand it, and where only the arguments are left to write."""
    return [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        f'[{{"name": "{name}", "parameters": {arguments}}}]',
        arguments,
    ]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = dict(
        served_model_name=("smollm2-135m",), enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    with live_server(guide, settings, max_model_len=16384) as url:
        yield url


TOKENS = len(RIVERS) + 1
PRINTED = {
    "openai-chat": ("openai", [RIVERS, RIVERS, f"{TOKENS} tokens"]),
    "openai-forms": ("openai", ["name='Rome' country='Italy'", "city='Rome'", "name='Rome' country='Italy'"]),
    "anthropic-messages": ("anthropic", [RIVERS, RIVERS]),
    "langchain": (
        "langchain_openai",
        [f"{RIVERS} {TOKENS}", RIVERS, "weather {'city': 'Rome'}", WARM]
        + ["name='Rome' country='Italy'"] * 2,
    ),
    "llama-index": (
        "llama_index",
        [RIVERS, RIVERS, "weather {'city': 'Rome'} 21 degrees", "name='Rome' country='Italy'"],
    ),
    "instructor": ("instructor", ["name='Rome' country='Italy'"] * 3),
    "litellm": ("litellm", [RIVERS, RIVERS, ARGUMENTS]),
    "dspy": ("dspy", ["Italy"]),
    "pydantic-ai": ("pydantic_ai", [WARM, "name='Rome' country='Italy'"]),
    "openai-agents": ("agents", [WARM, WARM]),
    "smolagents": ("smolagents", [WARM]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_python_example(name: str, url: str, tmp_path: Path):
    package, lines = PRINTED[name]
    assert run_python(name, package, url, tmp_path).splitlines() == lines


def test_javascript_example(url: str, tmp_path: Path):
    home = node_modules("@ai-sdk/openai-compatible")
    (tmp_path / "node_modules").symlink_to(home / "node_modules")
    path = tmp_path / "example.mjs"
    path.write_text(snippets()["ai-sdk"][1].replace(ADDRESS, url))
    printed = run(["node", str(path)], tmp_path)
    assert printed.splitlines() == [
        RIVERS, f"{TOKENS} tokens", WARM, "{ name: 'Rome', country: 'Italy' }",
    ]  # fmt: skip
