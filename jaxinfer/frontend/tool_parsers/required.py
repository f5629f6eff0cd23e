"""Outputs that a grammar holds to calls (`jaxinfer.frontend.tool_grammar`): a JSON list of them, or the arguments of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.frontend.tool_parsers.base import ScanningParser
from jaxinfer.frontend.tool_parsers.json_calls import CallReader


class RequiredCallsParser(ScanningParser):
    """`[{"name": …, "parameters": {…}}, …]`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reader: CallReader | None = None
        self._has_failed = False

    def _scan(self) -> bool:
        if self._has_failed:
            self._out.content(self._take(len(self._text)))
            return False
        if self._reader is None:
            self._text = self._text.lstrip(" \t\r\n[],")
            if not self._text:
                return False
            self._reader = CallReader(self._out, self._new_id)
        self._take(self._reader.feed(self._text))
        if self._reader.is_done:
            self._reader = None
        elif self._reader.has_failed:
            self._out.content("" if self._reader.has_begun else self._reader.raw)
            self._reader, self._has_failed = None, True
        return True

    def _cut_off(self) -> None:
        """A call that breaks off before its arguments is none."""


class NamedCallParser(ScanningParser):
    """The arguments of the one function that may be called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _scan(self) -> bool:
        if not self._out.num_calls:
            self._out.begin(self._name, self._new_id())
        self._out.arguments(self._take(len(self._text)))
        return False

    def _cut_off(self) -> None:
        """Arguments that break off stay as they are."""
