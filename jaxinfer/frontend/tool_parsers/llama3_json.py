"""Llama 3.1 to 3.3: an output that is `{"name": …, "parameters": {…}}`, or several of them with `;` between, each
perhaps after `<|python_tag|>`, which may also follow text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.frontend.tool_parsers.base import ScanningParser, first_tag
from jaxinfer.frontend.tool_parsers.json_calls import CallReader

_TAG = "<|python_tag|>"


class Llama3JsonParser(ScanningParser):
    """An object without arguments is an answer in JSON, not a call."""

    marks = (_TAG,)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reader: CallReader | None = None
        self._lead = ""
        """What came before an object that may be a call, and belongs to the content if it is none."""
        self._may_begin = True

    def _scan(self) -> bool:
        if self._reader is not None:
            return self._scan_call(self._reader)
        return self._scan_lead() if self._may_begin else self._scan_content()

    def _scan_lead(self) -> bool:
        """Where a call may begin: at the start, after the tag, and after another call."""
        rest = self._after_separators()
        if rest.startswith("{"):
            self._lead += self._take(len(self._text) - len(rest))
            self._reader = CallReader(self._out, self._new_id, needs_arguments=True)
            return True
        if rest.startswith(_TAG):
            self._lead += self._take(len(self._text) - len(rest) + len(_TAG))
            return True
        if _TAG.startswith(rest):
            return False
        self._give_up()
        return True

    def _after_separators(self) -> str:
        return self._text.lstrip(" \t\r\n;" if self._out.num_calls else None)

    def _give_up(self) -> None:
        self._out.content(self._lead)
        self._lead, self._may_begin = "", False

    def _scan_content(self) -> bool:
        at, tag = first_tag(self._text, (_TAG,))
        self._out.content(self._take(at))
        self._may_begin = tag is not None
        return self._may_begin

    def _scan_call(self, reader: CallReader) -> bool:
        self._take(reader.feed(self._text))
        if reader.is_done or reader.has_failed:
            self._reader = None
            if reader.has_begun:
                self._lead = ""
                self._may_begin = reader.is_done
            else:
                self._lead += reader.raw
                self._give_up()
        return True

    def _cut_off(self) -> None:
        if self._reader is None:
            says_nothing = self._may_begin and self._out.num_calls and not self._after_separators()
            self._out.content(self._lead + ("" if says_nothing else self._text))
        elif not self._reader.has_begun:
            self._out.content(self._lead + self._reader.raw)
