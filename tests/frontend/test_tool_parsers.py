"""Every parser against outputs that are written from known calls, whole and in pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer.frontend.tool_parsers import ParsedText, ToolParser, tool_parsers
from jaxinfer.frontend.tool_parsers.required import NamedCallParser, RequiredCallsParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "$defs": {"Place": {"type": "object"}},
                "properties": {
                    "text": {"type": "string"},
                    "number": {"type": ["integer", "null"]},
                    "ratio": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
                    "items": {"type": "array"},
                    "place": {"$ref": "#/$defs/Place"},
                },
            },
        },
    }
    for name in ("get_weather", "search")
]

HOSTILE = [
    '{"x": "}',
    "}]",
    '\\"',
    "é\n\t",
    "🙂",
    "\\u00e9",
    "',",
    ")",
    "a=[",
    "<b>",
    "[TOOL",
    "{" * 9,
]
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "number": st.none() | st.integers(-999, 999),
        "ratio": st.booleans() | st.integers(0, 9) | st.floats(0, 9),
        "items": st.lists(json_values, max_size=3),
        "place": st.dictionaries(texts, json_values, max_size=2),
    },
)
names = st.sampled_from(["get_weather", "search"])
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
contents = st.sampled_from(["", "Let me look {it} up.", "I know [that], no?\n\n", "1 < 2"])

type Call = tuple[str, dict[str, Any]]


def as_json(value: Any, ascii_only: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ascii_only)


def hermes(content: str, calls: list[Call]) -> str:
    written = [
        f"<tool_call>\n{as_json({'name': name, 'arguments': given})}\n</tool_call>"
        for name, given in calls
    ]
    return content + "\n".join(written)


def llama3_json(content: str, calls: list[Call]) -> str:
    written = "; ".join(as_json({"name": n, "parameters": given}, True) for n, given in calls)
    return (f"{content}<|python_tag|>" if content else "") + written


def mistral_list(content: str, calls: list[Call]) -> str:
    return f"{content}[TOOL_CALLS]" + as_json([{"arguments": g, "name": n} for n, g in calls])


def mistral_named(content: str, calls: list[Call]) -> str:
    return content + "".join(f"[TOOL_CALLS]{n}[ARGS]{as_json(given)}" for n, given in calls)


def pythonic(content: str, calls: list[Call]) -> str:
    written = [f"{n}({', '.join(f'{k}={v!r}' for k, v in g.items())})" for n, g in calls]
    return f"[{', '.join(written)}]"


def qwen3_coder(content: str, calls: list[Call]) -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else as_json(given)

    return content + "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def required(content: str, calls: list[Call]) -> str:
    return as_json([{"name": name, "parameters": given} for name, given in calls])


WRITERS = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama3_json),
    "mistral": ("mistral", mistral_list),
    "mistral, version 11": ("mistral", mistral_named),
    "pythonic": ("pythonic", pythonic),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "required": (None, required),
}


def make(name: str | None) -> ToolParser:
    return RequiredCallsParser(TOOLS) if name is None else tool_parsers.get(name)(TOOLS)


def in_pieces(parser: ToolParser, text: str, cuts: list[int]) -> ParsedText:
    """Also checks that each piece is one that a client can add to what it has."""
    parsed = ParsedText()
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(places):
        parsed.add(parser.feed(text[start:end]))
    parsed.add(parser.finish())
    return parsed


def seen(parsed: ParsedText) -> tuple[str, list[tuple[str, str]]]:
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls]


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=60, deadline=None)
@given(content=contents, calls=calls, cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_calls_come_out_as_they_were_written(
    kind: str, content: str, calls: list[Call], cuts: list[int]
):
    name, write = WRITERS[kind]
    text = write(content, calls)
    whole = make(name).parse(text)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
    if name not in ("pythonic", None):
        assert whole.content == content.rstrip()
    assert len({call.id for call in whole.calls}) == len(calls)
    assert seen(in_pieces(make(name), text, cuts)) == seen(whole)
    assert seen(in_pieces(make(name), text, list(range(len(text))))) == seen(whole)


MARKS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<function=f>", "<parameter=text>", "<parameter=number>", "</parameter>", "</function>", "<function=",
    '{"name": "f", "arguments": ', '{"name": "f", "parameters": {', '"name"', ":", "{", "}", "[", "]", "f(", "[f(",
    "a=", "text=", ")", ",", ";", "'", '"', '"""', "\\", "\n", " ", "null", "x", "<", "3",
]  # fmt: skip
wild = st.lists(st.sampled_from(MARKS), max_size=14).map("".join)


@pytest.mark.parametrize("name", [*tool_parsers.names, None])
@settings(max_examples=250, deadline=None)
@given(text=wild, cut=st.integers(0, 2000), cuts=st.lists(st.integers(0, 2000), max_size=6))
@example(text="[f(a='')", cut=7, cuts=[6])
@example(text="<tool_call><function=f><parameter=text>\n\n</parameter>", cut=0, cuts=[40])
def test_no_text_reads_differently_in_pieces(
    name: str | None, text: str, cut: int, cuts: list[int]
):
    """Nonsense, and outputs that break off anywhere: never an error, and the same whatever the pieces are."""
    whole = make(name).parse(text)
    assert seen(in_pieces(make(name), text, cuts)) == seen(whole)
    assert seen(in_pieces(make(name), text, list(range(len(text))))) == seen(whole)
    beginning = make(name).parse(text[: cut % (len(text) + 1)])
    for early, late in zip(beginning.calls, whole.calls, strict=False):
        assert late.name == early.name and late.arguments.startswith(early.arguments)


@pytest.mark.parametrize("name", tool_parsers.names)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_characters="<[{"), max_size=60))
def test_text_without_calls_stays_as_it_is(name: str, text: str):
    assert seen(make(name).parse(text)) == (text, [])


def test_arguments_come_while_they_are_written():
    outputs = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"text": "abc',
        "llama3_json": '{"name": "f", "parameters": {"text": "abc',
        "mistral": '[TOOL_CALLS]f{"text": "abc',
        "qwen3_coder": "<tool_call><function=get_weather><parameter=text>\nabc",
    }
    for name, text in outputs.items():
        parser, parsed = make(name), ParsedText()
        parsed.add(parser.feed(text))
        assert parsed.calls[0].arguments == '{"text": "abc', name
        parsed.add(parser.feed("def"))
        assert parsed.calls[0].arguments == '{"text": "abcdef', name


def test_pythonic_values_that_are_no_literals_are_strings():
    parsed = make("pythonic").parse("[f(a=true, b=None, c=x + 1, d=(1, 2), e=-1.5, g='''a'b''')]")
    assert json.loads(parsed.calls[0].arguments) == {
        "a": True, "b": None, "c": "x + 1", "d": [1, 2], "e": -1.5, "g": "a'b",
    }  # fmt: skip


def test_what_looks_like_a_call_and_is_none():
    for name, text in {
        "llama3_json": '{"name": "Ann", "age": 7}',
        "pythonic": "[1] is a list (x)",
        "hermes": "<tool_call>soon</tool_call>",
        "mistral": "[TOOL_CALLS] to come",
        "qwen3_coder": "<tool_call> and <function= are tags",
    }.items():
        parsed = make(name).parse(text)
        assert not parsed.calls
        assert parsed.content.replace(" ", "") == text.replace(" ", "")


def test_forgotten_tags_and_odd_forms():
    parsed = make("qwen3_coder").parse(
        "<function=get_weather>\n<parameter=text>\nx\n<parameter=number>\nmany\n</function>"
    )
    assert json.loads(parsed.calls[0].arguments) == {"text": "x", "number": "many"}
    for arguments, expected in (("null", "{}"), ('"{\\"a\\": 1}"', '{"a": 1}')):
        text = f'<tool_call>{{"arguments": {arguments}, "id": 3, "name": "f"}}'
        assert seen(make("hermes").parse(text)) == ("", [("f", expected)])
    assert len(make("mistral").parse("[TOOL_CALLS]f{}").calls[0].id) == 9


def test_the_arguments_of_a_named_function():
    assert seen(NamedCallParser("f").parse('{"a": 1}')) == ("", [("f", '{"a": 1}')])
    assert seen(NamedCallParser("f").parse("")) == ("", [])


def test_an_unknown_parser_is_refused_with_the_list():
    with pytest.raises(
        ValueError, match=r"no tool parser 'hermess'; there are hermes, llama3_json"
    ):
        tool_parsers.get("hermess")
