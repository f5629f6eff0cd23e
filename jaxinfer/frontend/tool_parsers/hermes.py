"""Hermes 2 and Qwen 2.5 and 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.frontend.tool_parsers.base import ScanningParser, first_tag
from jaxinfer.frontend.tool_parsers.json_calls import CallReader

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ScanningParser):
    marks = (_OPEN, _CLOSE)
    call_tag = _OPEN

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reader: CallReader | None = None
        self._expects_close = False

    def _scan(self) -> bool:
        return self._scan_content() if self._reader is None else self._scan_call(self._reader)

    def _scan_content(self) -> bool:
        at, tag = first_tag(self._text, (_OPEN, _CLOSE) if self._expects_close else (_OPEN,))
        self._out.content(self._take(at))
        if tag is None:
            return False
        self._take(len(tag))
        self._expects_close = False
        if tag == _OPEN:
            self._reader = CallReader(self._out, self._new_id)
        return True

    def _scan_call(self, reader: CallReader) -> bool:
        if reader.has_begun and reader.has_failed:
            # What the call had stays; the rest of its text means nothing.
            at, tag = first_tag(self._text, (_CLOSE,))
            self._take(at)
            if tag is None:
                return False
            self._take(len(tag))
            self._reader = None
            return True
        self._take(reader.feed(self._text))
        if reader.is_done:
            self._reader, self._expects_close = None, True
        elif reader.has_failed and not reader.has_begun:
            self._reader = None
            self._out.content(_OPEN + reader.raw)
        return True

    def _cut_off(self) -> None:
        if self._reader is None:
            is_part_of_close = self._expects_close and _CLOSE.startswith(self._text)
            self._out.content("" if is_part_of_close else self._text)
        elif not self._reader.has_begun:
            self._out.content(_OPEN + self._reader.raw)
