"""From `StructuredOutputsParams` to a grammar as llguidance takes it, checked before it reaches the core."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from jaxinfer.frontend.json_schema import (
    check_terminates,
    without_additional_properties,
    without_foreign_formats,
)
from jaxinfer.structured_outputs import StructuredOutputsParams

WHITESPACE = r"[ ]?|\n[ \t]{0,32}"
"""Between JSON's tokens, unless asked otherwise. Bounded, or a model may go on with blank lines for ever."""

_CACHED = 256
_MAX_MESSAGE = 600


def grammar_of(params: StructuredOutputsParams) -> str:
    """The grammar, as text. Raises `ValueError` that names the field and what is wrong with it."""
    if params.regex is not None:
        return _regex(params.regex)
    if params.choice is not None:
        return _choice(tuple(params.choice))
    if params.grammar is not None:
        return _grammar(params.grammar)
    options = _json_options(params)
    if params.structural_tag is not None:
        text = _as_json("structural_tag", params.structural_tag)
        return _structural_tag(text, params.disable_additional_properties, options)
    schema = '{"type": "object"}' if params.json_object else _as_json("json", params.json)
    return _json(schema, params.disable_additional_properties, options)


def _json_options(params: StructuredOutputsParams) -> str:
    if params.disable_any_whitespace:
        return '{"whitespace_flexible": false}'
    return json.dumps({"whitespace_pattern": params.whitespace_pattern or WHITESPACE})


def _as_json(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: {name} is not JSON: {error}.") from None


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: {name} is not JSON: {error}.") from None


@functools.lru_cache(_CACHED)
def _json(text: str, closed: bool, options: str) -> str:
    return _checked("json", _schema_grammar("json", _parsed("json", text), closed, options))


def _schema_grammar(name: str, schema: Any, closed: bool, options: str) -> str:
    from llguidance import LLMatcher

    if not isinstance(schema, dict | bool):
        raise ValueError(f"structured_outputs: {name} must be a JSON schema, got {schema!r:.100}.")
    try:
        schema = without_foreign_formats(schema)
        if closed:
            schema = without_additional_properties(schema)
        text = json.dumps(schema)
    except RecursionError:
        raise ValueError(f"structured_outputs: {name} is nested too deeply.") from None
    try:
        check_terminates(schema)
        return LLMatcher.grammar_from_json_schema(text, overrides=json.loads(options))
    except ValueError as error:
        raise ValueError(f"structured_outputs: {name}: {error}") from None


@functools.lru_cache(_CACHED)
def _regex(pattern: str) -> str:
    from llguidance import LLMatcher, regex_to_lark

    # \d, \w and \s as in other engines: of ASCII. Rust's would take the digits of every script.
    lark = f"start: /{regex_to_lark(pattern, 'dws')}/"
    return _checked("regex", LLMatcher.grammar_from_lark(lark))


@functools.lru_cache(_CACHED)
def _choice(options: tuple[str, ...]) -> str:
    from llguidance import LLMatcher

    # JSON's escapes are Lark's.
    rule = " | ".join(json.dumps(option) for option in options)
    return _checked("choice", LLMatcher.grammar_from_lark(f"start: {rule}"))


@functools.lru_cache(_CACHED)
def _grammar(text: str) -> str:
    from llguidance import grammar_from
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text) if re.search(r"^\s*root\s*::=", text, re.MULTILINE) else text
        return _checked("grammar", grammar_from("grammar", lark))
    except ValueError:
        raise
    except Exception as error:  # the converter raises whatever it comes across
        raise ValueError(f"structured_outputs: grammar: {error}") from None


@functools.lru_cache(_CACHED)
def _structural_tag(text: str, closed: bool, options: str) -> str:
    """Free text, and after each trigger one of the tagged structures that begin with it."""
    tag = _parsed("structural_tag", text)
    structures = tag.get("structures") if isinstance(tag, dict) else None
    triggers = tag.get("triggers") if isinstance(tag, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise ValueError(
            'structured_outputs: structural_tag needs "structures", a list of {"begin", "schema", "end"}, and "triggers", '
            "a list of texts."
        )
    from llguidance import StructTag

    tags = []
    for i, structure in enumerate(structures):
        name = f"structural_tag.structures[{i}]"
        if not isinstance(structure, dict):
            raise ValueError(f"structured_outputs: {name} must be an object, got {structure!r}.")
        begin, end = structure.get("begin"), structure.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(
                f'structured_outputs: {name} needs the texts "begin" and "end", got {structure!r:.100}.'
            )
        trigger = next(
            (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None
        )
        if trigger is None:
            raise ValueError(
                f"structured_outputs: {name} begins with {begin!r}, which starts with none of the triggers."
            )
        schema = without_foreign_formats(structure.get("schema", True))
        # Checked on its own first: a message about the whole would not say which part is meant.
        _checked(name, _schema_grammar(name, schema, closed, options))
        if closed:
            schema = without_additional_properties(schema)
        schema = {"x-guidance": json.loads(options)} | (schema if isinstance(schema, dict) else {})
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return _checked("structural_tag", StructTag.to_grammar(tags, assume_special=False))


def _checked(name: str, grammar: str) -> str:
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(f"structured_outputs: {name}: {messages[0].strip()[:_MAX_MESSAGE]}")
    return grammar
