"""Grammars that hold an output to calls of a request's tools, whatever the model's own way of writing them is, or leave
room for calls beside an answer of a certain form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.frontend.grammar import WHITESPACE, grammar_of
from jaxinfer.frontend.json_schema import (
    Schema,
    without_additional_properties,
    without_foreign_formats,
)
from jaxinfer.structured_outputs import StructuredOutputsParams

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def required_calls(tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    """A grammar in Lark's notation of `[{"name": …, "parameters": {…}}, …]`: one call or more, exactly one if not
    `parallel`. Raises `ValueError` as `arguments_schema`."""
    functions = [tool["function"] for tool in tools]
    calls = "call" if not parallel else 'call (", " call)*'
    rules = [
        f'start: "[" {calls} "]"',
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        # JSON's escapes are Lark's.
        begin = json.dumps(f'{{"name": {json.dumps(function["name"])}, "parameters": ')
        schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}} | arguments_schema(tools, i)
        rules += [
            f'call_{i}: {begin} arguments_{i} "}}"',
            f"arguments_{i}: %json {json.dumps(schema)}",
        ]
    return "\n".join(rules) + "\n"


def answer_or_calls(schema: Schema | str, call_tag: str) -> str:
    """A grammar in Lark's notation of a JSON document that the schema accepts, or of calls in the model's own notation,
    which begin with `call_tag`. Raises `ValueError` as `grammar_of`."""
    grammar_of(StructuredOutputsParams(json=schema))
    parsed = without_foreign_formats(json.loads(schema) if isinstance(schema, str) else schema)
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    rules = [
        "start: answer | calls",
        f"answer: %json {json.dumps(options | (parsed if isinstance(parsed, dict) else {}))}",
        f"calls: {json.dumps(call_tag)} REST",
        r"REST: /(.|\n)*/",
    ]
    return "\n".join(rules) + "\n"


def arguments_schema(tools: Sequence[Mapping[str, Any]], index: int) -> dict[str, Any]:
    """What the arguments of one of the tools have to look like: no properties but those that its schema names, unless
    that says otherwise. Raises `ValueError`, which names the tool, for a schema that can't be enforced."""
    schema = tools[index]["function"].get("parameters") or _NO_PARAMETERS
    try:
        schema = without_foreign_formats(schema)
        if not _is_combined(schema):
            schema = without_additional_properties(schema)
        grammar_of(StructuredOutputsParams(json=schema))
    except ValueError as error:
        reason = str(error).removeprefix("structured_outputs: json: ")
        raise ValueError(f"tools[{index}].function.parameters: {reason}") from None
    except RecursionError:
        raise ValueError(f"tools[{index}].function.parameters is nested too deeply.") from None
    return schema


def _is_combined(schema: Schema) -> bool:
    """Whether an object takes its properties from several places, each of which must then allow the others'."""
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            if "allOf" in part or (
                "properties" in part and part.keys() & {"anyOf", "oneOf", "$ref"}
            ):
                return True
            todo += part.values()
    return False
