"""Llama 3.2 and 4, ToolACE: an output that is a Python list of calls, `[weather(city="Rome", days=3), time()]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.frontend.tool_parsers.base import ScanningParser

_NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(\s*")
_NAME_START = re.compile(r"\s*([A-Za-z_][\w.]*\s*)?(\(\s*)?")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_KEY_START = re.compile(r"\s*([A-Za-z_]\w*\s*)?")
_IN_VALUE = re.compile(r"[\"'()\[\]{},]")
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser(ScanningParser):
    """Arguments come when they are complete, one by one. What is no literal is passed on as a string of its source."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._state = self._scan_start
        self._raw = ""
        """What was read of a list that has no call yet."""
        self._num_arguments = 0
        self._at = self._depth = 0
        """How far the value at the front of the text has been read, and the brackets that are open there."""
        self._quote = ""

    def _scan(self) -> bool:
        return self._state()

    def _scan_start(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        if rest[0] == "[":
            self._raw += self._take(len(self._text) - len(rest) + 1)
            self._state = self._scan_name
        else:
            self._state = self._scan_content
        return True

    def _scan_content(self) -> bool:
        self._out.content(self._raw + self._text)
        self._raw = self._text = ""
        return False

    def _scan_name(self) -> bool:
        """A call counts once its arguments begin as arguments do."""
        match = _NAME.match(self._text)
        if match is None:
            return self._wait_or_end(_NAME_START)
        rest = self._text[match.end() :]
        if rest[:1] != ")" and not _KEY.match(rest):
            return self._wait_or_end(_KEY_START, match.end())
        self._raw = ""
        self._take(match.end())
        self._out.begin(match[1], self._new_id())
        self._out.arguments("{")
        self._num_arguments = 0
        self._state = self._scan_key
        return True

    def _wait_or_end(self, begun: re.Pattern[str], start: int = 0) -> bool:
        """Wait while all of the text may be the beginning of what is expected; else the calls end here."""
        if begun.fullmatch(self._text, start):
            return False
        self._state = self._scan_content
        return True

    def _scan_key(self) -> bool:
        self._text = self._text.lstrip(" \t\r\n,")
        if not self._text:
            return False
        if self._text[0] == ")":
            self._take(1)
            self._out.arguments("}")
            self._state = self._scan_after_call
            return True
        match = _KEY.match(self._text)
        if match is None:
            if _KEY_START.fullmatch(self._text):
                return False
            self._out.arguments("}")
            self._state = self._scan_content
            return True
        self._take(match.end())
        self._key = match[1]
        self._at, self._depth, self._quote = 0, 0, ""
        self._state = self._scan_value
        return True

    def _scan_value(self) -> bool:
        """Find the comma or the bracket that ends the value."""
        text = self._text
        while self._at < len(text):
            if self._quote:
                if not self._leave_string(text):
                    return False
                continue
            found = _IN_VALUE.search(text, self._at)
            if found is None:
                self._at = len(text)
                return False
            mark = found[0]
            if mark in "\"'":
                # Whether a string is closed at once or has three quotes is seen two characters later.
                if len(text) < found.start() + 3:
                    self._at = found.start()
                    return False
                self._quote = mark * 3 if text.startswith(mark * 3, found.start()) else mark
                self._at = found.start() + len(self._quote)
                continue
            if self._depth == 0 and mark in ",)":
                self._end_value(self._take(found.start()))
                return True
            self._depth += (mark in "([{") - (mark in ")]}")
            self._at = found.end()
        return False

    def _leave_string(self, text: str) -> bool:
        """Read on to the end of a string; False when it isn't there yet."""
        while self._at < len(text):
            if text[self._at] == "\\":
                if len(text) < self._at + 2:
                    return False
                self._at += 2
            elif text.startswith(self._quote, self._at):
                self._at += len(self._quote)
                self._quote = ""
                return True
            elif self._quote.startswith(text[self._at :]):
                return False
            else:
                self._at += 1
        return False

    def _end_value(self, source: str) -> None:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._out.arguments(f"{comma}{json.dumps(self._key)}: {_as_json(source.strip())}")
        self._state = self._scan_key

    def _scan_after_call(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._text[0] == ",":
            self._take(1)
            self._state = self._scan_name
        else:
            self._text = self._text.removeprefix("]")
            self._state = self._scan_content
        return True

    def _cut_off(self) -> None:
        if self._raw or self._state in (self._scan_start, self._scan_content):
            self._out.content(self._raw + self._text)


def _as_json(source: str) -> str:
    if source in _JSON_NAMES:
        return source
    try:
        return json.dumps(ast.literal_eval(source), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(source, ensure_ascii=False)
