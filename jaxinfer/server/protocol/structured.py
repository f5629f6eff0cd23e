"""The ways in which clients say what an output has to look like: OpenAI's `response_format`, vLLM's
`structured_outputs`, and its older `guided_*` fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxinfer.server.errors import BadRequest

_OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}


class StructuredFields(BaseModel):
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

    def structured(self) -> dict[str, Any] | None:
        """The fields of `StructuredOutputsParams`, None for free text. Raises `BadRequest` where they contradict."""
        found = self._structured_by_name()
        if len(found) > 1:
            raise BadRequest(f"{' and '.join(found)} exclude each other.", param=next(iter(found)))
        wanted = next(iter(found.values()), None)
        if wanted is not None and self.guided_whitespace_pattern is not None:
            wanted = {"whitespace_pattern": self.guided_whitespace_pattern} | wanted
        return wanted

    @property
    def structured_field(self) -> str | None:
        """The name of the field that the client used."""
        return next(iter(self._structured_by_name()), None)

    def _structured_by_name(self) -> dict[str, dict[str, Any]]:
        given = {
            "response_format": _from_response_format(self.response_format),
            "structured_outputs": _without_nulls(self.structured_outputs),
        }
        for name, field in _OLDER.items():
            value = getattr(self, name)
            given[name] = None if value is None or value is False else {field: value}
        return {name: value for name, value in given.items() if value is not None}


def _without_nulls(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    if fields is None:
        return None
    kept = {k: v for k, v in fields.items() if v is not None and not k.startswith("_")}
    return kept or None


def _from_response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = wanted.get("json_schema")
        # OpenAI's name, and the one that pydantic models of other servers write.
        schema = (
            described.get("schema", described.get("json_schema"))
            if isinstance(described, dict)
            else None
        )
        if not isinstance(schema, dict | bool):
            raise BadRequest(
                "response_format: json_schema must hold a schema, as in "
                '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}.',
                param="response_format",
            )
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": {key: value for key, value in wanted.items() if key != "type"}}
    raise BadRequest(
        f"response_format: type must be text, json_object, json_schema or structural_tag, got {kind!r:.100}.",
        param="response_format",
    )
