"""Mistral: after `[TOOL_CALLS]` a JSON list of `{"name": …, "arguments": {…}}`, or from tokenizer version 11 on one call
as `name{…}` or `name[ARGS]{…}`, the marker again before the next."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.frontend.tool_parsers.base import ScanningParser, first_tag
from jaxinfer.frontend.tool_parsers.json_calls import CallReader, JsonValue

_TAG, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"\s*([\w.-]+)\s*")
_ALPHABET = string.ascii_letters + string.digits


class MistralParser(ScanningParser):
    marks = (_TAG, _ARGS, _CALL_ID)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._state = self._scan_content
        self._reader: CallReader | None = None
        self._value = JsonValue()
        self._list_has_call = False

    def _new_id(self) -> str:
        """The chat templates demand nine letters or digits."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def _scan(self) -> bool:
        return self._state()

    def _scan_content(self) -> bool:
        at, tag = first_tag(self._text, (_TAG,))
        self._out.content(self._take(at))
        if tag is None:
            return False
        self._take(len(tag))
        self._state = self._scan_form
        return True

    def _scan_form(self) -> bool:
        """A list, or the name of a single call."""
        if not self._skip_blank():
            return False
        if self._text[0] == "[":
            self._list_has_call = False
            self._take(1)
            self._state = self._scan_list
            return True
        at, mark = first_tag(self._text, ("{", _ARGS, _CALL_ID))
        name = _NAME.fullmatch(self._text, 0, at)
        if name is None:
            self._out.content(_TAG)
            self._state = self._scan_content
            return True
        if mark is None:
            return False
        self._name = name[1]
        self._raw = self._take(at)
        self._state = self._scan_marks
        return True

    def _scan_marks(self) -> bool:
        """What stands between the name and its arguments."""
        at, mark = first_tag(self._text, ("{",))
        self._raw += self._take(at)
        if mark is None:
            return False
        self._out.begin(self._name, self._new_id())
        self._value = JsonValue()
        self._state = self._scan_arguments
        return True

    def _scan_arguments(self) -> bool:
        end = self._value.feed(self._text, 0)
        self._out.arguments(self._take(len(self._text) if end is None else end))
        if end is not None:
            self._state = self._scan_content
        return True

    def _scan_list(self) -> bool:
        """Before an object of the list, or after one."""
        self._text = self._text.lstrip(" \t\r\n," if self._list_has_call else None)
        if not self._text:
            return False
        if self._text[0] == "{":
            self._reader = CallReader(self._out, self._new_id)
            self._state = self._scan_object
        elif self._text[0] == "]" and self._list_has_call:
            self._take(1)
            self._state = self._scan_content
        else:
            self._give_up("")
        return True

    def _scan_object(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._take(reader.feed(self._text))
        if reader.is_done or (reader.has_failed and reader.has_begun):
            self._list_has_call = True
            self._state = self._scan_list if reader.is_done else self._scan_content
        elif reader.has_failed:
            self._give_up(reader.raw)
        return True

    def _give_up(self, raw: str) -> None:
        """What looked like an object of the list is content, and the list's beginning too if it has no call."""
        self._out.content(raw if self._list_has_call else f"{_TAG}[{raw}")
        self._state = self._scan_content

    def _cut_off(self) -> None:
        if self._state == self._scan_content:
            self._out.content(self._text)
        elif self._state == self._scan_form:
            self._out.content(_TAG + self._text)
        elif self._state == self._scan_marks:
            self._out.content(_TAG + self._raw + self._text)
        elif self._state == self._scan_list and not self._list_has_call:
            self._give_up("")
        elif self._state == self._scan_object and self._reader and not self._reader.has_begun:
            self._give_up(self._reader.raw)
