"""Calls that are written as JSON objects with a name and arguments, read while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from jaxinfer.frontend.tool_parsers.base import PieceWriter

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_BLANK = re.compile(r"\s*")
_VALUE_STARTS = frozenset('"{[-0123456789tfn')


class JsonValue:
    """Finds the end of one JSON value, the first character of which is the first that it is given."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_scalar", "_started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_scalar = self._started = False

    def feed(self, text: str, start: int) -> int | None:
        """The index after the value's end, None when it goes on after `text[start:]`."""
        at = start
        if not self._started:
            self._started = True
            self._is_scalar = text[at] not in '"{['
        if self._is_scalar:
            end = _SCALAR_END.search(text, at)
            return None if end is None else end.start()
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return None
            at = found.end()
            mark = found[0]
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
            if not self._in_string and self._depth <= 0:
                return at
        return None


class CallReader:
    """Reads `{"name": …, "arguments": {…}}`, the keys in any order and among others, into a call.

    `is_done`: the object is complete. `has_failed`: it is no call; then `raw` is what was read of it, unless `has_begun`,
    the call has been reported. Arguments may be called "parameters". Without `needs_arguments`, a call may have none.
    """

    def __init__(
        self, out: PieceWriter, new_id: Callable[[], str], needs_arguments: bool = False
    ) -> None:
        self._out = out
        self._new_id = new_id
        self._needs_arguments = needs_arguments
        self._state = self._open
        self._value = JsonValue()
        self._collected = ""
        self._key = ""
        self._name: str | None = None
        self._has_arguments = False
        self._held = ""
        self.raw = ""
        self.has_begun = self.is_done = self.has_failed = False

    def feed(self, text: str) -> int:
        """How much of the text was read: all of it, unless the object ends in it or it is none."""
        at = 0
        while at < len(text) and not (self.is_done or self.has_failed):
            at = self._state(text, at)
        if not self.has_begun:
            self.raw += text[:at]
        return at

    def _open(self, text: str, at: int) -> int:
        return self._expect("{", self._next_key, text, at)

    def _expect(self, mark: str, state: Callable[[str, int], int], text: str, at: int) -> int:
        """Go on with `state` after blanks and the mark."""
        at = _blank_end(text, at)
        if at == len(text):
            return at
        if text[at] != mark:
            self.has_failed = True
            return at
        self._state = state
        return at + 1

    def _next_key(self, text: str, at: int) -> int:
        at = _blank_end(text, at)
        if at == len(text):
            return at
        if text[at] == "}":
            return self._close(at)
        if text[at] != '"':
            self.has_failed = True
            return at
        self._start_value(self._read_key)
        return at

    def _start_value(self, state: Callable[[str, int], int]) -> None:
        self._value, self._collected, self._state = JsonValue(), "", state

    def _collect(self, text: str, at: int) -> tuple[int, bool]:
        end = self._value.feed(text, at)
        until = len(text) if end is None else end
        self._collected += text[at:until]
        return until, end is not None

    def _read_key(self, text: str, at: int) -> int:
        at, complete = self._collect(text, at)
        if complete:
            key = _parsed(self._collected)
            self._key = key if isinstance(key, str) else ""
            self._state = self._colon
        return at

    def _colon(self, text: str, at: int) -> int:
        return self._expect(":", self._begin_value, text, at)

    def _begin_value(self, text: str, at: int) -> int:
        at = _blank_end(text, at)
        if at == len(text):
            return at
        if text[at] not in _VALUE_STARTS:
            self.has_failed = True
            return at
        if self._key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            self._start_value(self._stream if text[at] == "{" else self._read_arguments)
            if text[at] == "{":
                self._begin_if_known()
        elif self._key == "name" and self._name is None:
            self._start_value(self._read_name)
        else:
            self._start_value(self._skip)
        return at

    def _stream(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        until = len(text) if end is None else end
        self._add_arguments(text[at:until])
        if end is not None:
            self._state = self._after_value
        return until

    def _add_arguments(self, text: str) -> None:
        if self.has_begun:
            self._out.arguments(text)
        else:
            self._held += text

    def _begin_if_known(self) -> None:
        if self._name is not None and not self.has_begun:
            self.has_begun = True
            self._out.begin(self._name, self._new_id())
            self._out.arguments(self._held)

    def _read_arguments(self, text: str, at: int) -> int:
        """Arguments that are no object: null for none, or a string that holds the JSON."""
        at, complete = self._collect(text, at)
        if complete:
            value = _parsed(self._collected)
            if value is None:
                value = "{}"
            self._begin_if_known()
            self._add_arguments(value if isinstance(value, str) else self._collected)
            self._state = self._after_value
        return at

    def _read_name(self, text: str, at: int) -> int:
        at, complete = self._collect(text, at)
        if complete:
            name = _parsed(self._collected)
            if not isinstance(name, str) or not name:
                self.has_failed = True
                return at
            self._name = name
            if self._has_arguments:
                self._begin_if_known()
            self._state = self._after_value
        return at

    def _skip(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        if end is None:
            return len(text)
        self._state = self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        at = _blank_end(text, at)
        if at < len(text) and text[at] == "}":
            return self._close(at)
        return self._expect(",", self._next_key, text, at)

    def _close(self, at: int) -> int:
        if self._name is None or (self._needs_arguments and not self._has_arguments):
            self.has_failed = True
            return at
        if not self.has_begun:
            self._held = "{}"
            self._begin_if_known()
        self.is_done = True
        return at + 1


def _blank_end(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    assert match is not None
    return match.end()


def _parsed(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
