"""What an output has to look like: vLLM's names for guided decoding."""

from __future__ import annotations

from typing import Any

import msgspec

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """Exactly one of the first six says what the output must be. `ValueError` on construction otherwise.

    Args:
        json: A JSON schema, as a dict or as text: the output is a document that it accepts.
        regex: The whole output matches this regular expression (Rust's syntax: no look-around, no backreferences;
            digits, word characters and spaces are those of ASCII).
        choice: The output is one of these strings.
        grammar: A context-free grammar in Lark's notation (llguidance's dialect, with a rule `start`) or in GBNF
            (with a rule `root ::=`).
        json_object: True: the output is any JSON object.
        structural_tag: Free text in which a trigger begins a part that follows a schema. As JSON or a dict:
            {"structures": [{"begin", "schema", "end"} …], "triggers": [text …]}.
        disable_any_whitespace: Generate JSON without whitespace between tokens. By default a space may stand there, or
            a line break and an indentation.
        disable_additional_properties: Objects of the schema hold no properties but those it names, also where it
            doesn't say so.
        whitespace_pattern: The regular expression of what may stand between JSON's tokens.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = "none of them" if not given else f"{', '.join(given)} together"
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; got {found}."
            )
        self._check_types()
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError(
                "structured_outputs: whitespace_pattern and disable_any_whitespace exclude each other."
            )

    def _check_types(self) -> None:
        if self.choice is not None:
            if isinstance(self.choice, str | bytes | dict):
                raise ValueError(
                    f"structured_outputs: choice must be a list of strings, got {self.choice!r}."
                )
            self.choice = list(self.choice)
            if not self.choice or not all(isinstance(c, str) and c for c in self.choice):
                raise ValueError(
                    "structured_outputs: choice must hold at least one string, and no empty ones."
                )
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(
                f"structured_outputs: json_object must be True, got {self.json_object!r}."
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"structured_outputs: {name} must be a string, got {value!r}.")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | dict | bool):
                raise ValueError(
                    f"structured_outputs: {name} must be a dict or JSON text, got {value!r}."
                )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"structured_outputs: {name} must be True or False, got {getattr(self, name)!r}."
                )
