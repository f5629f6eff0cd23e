"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`, a line for each tag."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.frontend.json_schema import json_type, types_of
from jaxinfer.frontend.tool_parsers.base import ScanningParser, first_tag

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_VALUE_ENDS = (f"\n{_END_PARAMETER}", _END_PARAMETER, f"\n{_PARAMETER}", f"\n{_END_FUNCTION}")
"""The closing tag is sometimes forgotten."""
_NAME = re.compile(r"[^\s<>]+")


class Qwen3CoderParser(ScanningParser):
    """Values have no types in the text: the tools' schemas say what they are. Strings come as they are written, other
    values when they are complete; what can't be read as its type says is passed on as a string."""

    marks = (_OPEN, _CLOSE)
    call_tag = _OPEN

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._state = self._scan_content
        self._is_open = False
        """Within `<tool_call>`, which some outputs lack."""
        self._searched = 0
        self._num_parameters = 0
        self._schema: Mapping[str, Any] = {}
        self._types: frozenset[str] = frozenset()

    def _scan(self) -> bool:
        return self._state()

    def _scan_content(self) -> bool:
        tags = (_OPEN, _FUNCTION, _CLOSE) if self._is_open else (_OPEN, _FUNCTION)
        at, tag = first_tag(self._text, tags)
        self._out.content(self._take(at))
        if tag is None:
            return False
        if tag == _CLOSE:
            self._take(len(tag))
            self._is_open = False
        else:
            self._state = self._scan_opening
        return True

    def _scan_opening(self) -> bool:
        """Up to the end of the function's tag, with which a call begins."""
        rest = self._text.removeprefix(_OPEN).lstrip()
        if not rest.startswith(_FUNCTION):
            if _FUNCTION.startswith(rest):
                return False
            return self._no_call()
        name, mark, body = rest.removeprefix(_FUNCTION).partition(">")
        if name and not _NAME.fullmatch(name):
            return self._no_call()
        if not mark:
            return False
        if not name:
            return self._no_call()
        self._is_open = self._text.startswith(_OPEN)
        self._text = body
        self._schema = self._parameters(name)
        self._num_parameters = 0
        self._out.begin(name, self._new_id())
        self._out.arguments("{")
        self._state = self._scan_function
        return True

    def _no_call(self) -> bool:
        self._out.content(self._take(1))
        self._state = self._scan_content
        return True

    def _parameters(self, name: str) -> Mapping[str, Any]:
        for tool in self.tools:
            function = tool.get("function", {})
            if function.get("name") == name:
                return function.get("parameters") or {}
        return {}

    def _scan_function(self) -> bool:
        """Between parameters; anything else there means nothing."""
        at, tag = first_tag(self._text, (_PARAMETER, _END_FUNCTION, _CLOSE))
        self._take(at)
        if tag is None:
            return False
        if tag == _PARAMETER:
            key, mark, _ = self._text.removeprefix(_PARAMETER).partition(">")
            if not mark:
                return False
            self._take(len(_PARAMETER) + len(key) + 1)
            comma = ", " if self._num_parameters else ""
            self._num_parameters += 1
            self._out.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            self._types = types_of(self._schema, key)
            self._state = self._scan_value_start
            return True
        if tag == _END_FUNCTION:
            self._take(len(tag))
        self._out.arguments("}")
        self._state = self._scan_content
        return True

    def _scan_value_start(self) -> bool:
        at, end = first_tag(self._text, _VALUE_ENDS)
        if at == 0 and end is None:
            # An end that begins with the line break, perhaps: then the value is empty.
            return False
        if end is None or at:
            self._text = self._text.removeprefix("\n")
        self._searched = 0
        self._state = self._scan_other
        if self._types <= {"string"}:
            self._out.arguments('"')
            self._state = self._scan_string
        return True

    def _scan_string(self) -> bool:
        at, end = first_tag(self._text, _VALUE_ENDS)
        self._out.arguments(_escaped(self._take(at)))
        if end is None:
            return False
        self._out.arguments('"')
        self._end_value(end)
        return True

    def _scan_other(self) -> bool:
        at, end = first_tag(self._text, _VALUE_ENDS, self._searched)
        if end is None:
            self._searched = at
            return False
        self._out.arguments(_typed(self._take(at), self._types))
        self._end_value(end)
        return True

    def _end_value(self, tag: str) -> None:
        if tag.endswith(_END_PARAMETER):
            self._take(len(tag))
        self._state = self._scan_function

    def _cut_off(self) -> None:
        if self._state == self._scan_content:
            is_part_of_close = self._is_open and _CLOSE.startswith(self._text)
            self._out.content("" if is_part_of_close else self._text)
        elif self._state == self._scan_opening:
            self._out.content(self._text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed(text: str, types: frozenset[str]) -> str:
    """A value as JSON."""
    stripped = text.strip()
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(stripped)
            as_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        kind = json_type(value)
        if kind in types or (kind == "integer" and "number" in types):
            return as_json
    lowered = stripped.lower()
    if (lowered in ("true", "false") and "boolean" in types) or (
        lowered in ("null", "none") and "null" in types
    ):
        return lowered.replace("none", "null")
    return json.dumps(text, ensure_ascii=False)
