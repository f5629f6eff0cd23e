"""What must be known of a JSON schema before a grammar is made of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool

_KEYWORDS = {"object": {"properties", "required"}, "array": {"items", "prefixItems", "minItems"}}


def check_terminates(schema: Schema) -> None:
    """Raises `ValueError` when no finite document satisfies the schema, as with an object that requires itself.

    A schema *ends* when some finite document may satisfy it: the least fixed point of "a reference ends if its target
    does, an object if all of its required properties do, a choice if one of its options does …". Only recursion is
    followed; what else a schema may exclude is not looked at.
    """
    if not _Ends(schema).holds(schema):
        raise ValueError(
            "The JSON schema can't be satisfied by any finite document: it refers to itself without an end."
        )


_DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""

_FORMATS = frozenset(
    [
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    ]
)
"""Those that JSON Schema defines."""


def without_foreign_formats(schema: Any, by_name: bool = False) -> Any:
    """A copy without the formats that JSON Schema doesn't define ("path", "binary", "int64" …): they say what a value is
    for, and the compiler refuses what it doesn't know. `by_name`: these are schemas by name, not one."""
    if isinstance(schema, list):
        return [without_foreign_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if by_name:
        return {name: without_foreign_formats(value) for name, value in schema.items()}
    return {
        key: value if key in _DATA else without_foreign_formats(value, key in _NAMED)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _FORMATS)
    }


def without_additional_properties(schema: Any) -> Any:
    """A copy in which each object that names its properties allows no others, unless it says what they are."""
    if isinstance(schema, list):
        return [without_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {
        key: value if key in _DATA else without_additional_properties(value)
        for key, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and (
        "type" in schema or "properties" not in schema["properties"]
    ):
        copy.setdefault("additionalProperties", False)
    return copy


class _Ends:
    """Which of a schema's parts end. Each is looked at again only when one that it waits for turns out to end."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._ends: set[int] = set()
        self._waiting: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        todo = _dicts(root)
        while todo:
            part = todo.pop()
            if id(part) not in self._ends and self._looks_finite(part):
                self._ends.add(id(part))
                todo += self._waiting.pop(id(part), ())

    def holds(self, schema: Any, asking: dict[str, Any] | None = None) -> bool:
        """Whether a schema is known to end; if not, `asking` is told when it does."""
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) in self._ends:
            return True
        if asking is not None:
            self._waiting[id(schema)].append(asking)
        return False

    def _looks_finite(self, part: dict[str, Any]) -> bool:
        if "const" in part or "enum" in part:
            return True
        if "$ref" in part and not self.holds(_target(part["$ref"], self._root), part):
            return False
        for key in ("anyOf", "oneOf"):
            options = part.get(key)
            is_choice = isinstance(options, list) and options
            if is_choice and not any(self.holds(option, part) for option in options):
                return False
        every = part.get("allOf")
        if isinstance(every, list) and not all(self.holds(one, part) for one in every):
            return False
        types = part.get("type", [])
        types = types if isinstance(types, list) else [types]
        if not types:
            # Without a type, keywords bind only documents of their own type. The grammar compiler takes them as if it
            # were there.
            types = [kind for kind, keys in _KEYWORDS.items() if keys & part.keys()]
        return not types or any(self._type_ends(kind, part) for kind in types)

    def _type_ends(self, kind: Any, part: dict[str, Any]) -> bool:
        if kind == "object":
            properties, names = part.get("properties"), part.get("required")
            properties = properties if isinstance(properties, dict) else {}
            names = names if isinstance(names, list) else []
            rest = part.get("additionalProperties", True)
            return all(self.holds(properties.get(str(name), rest), part) for name in names)
        if kind == "array":
            least, first = part.get("minItems", 0), part.get("prefixItems")
            first = first if isinstance(first, list) else []
            least = least if isinstance(least, int) else 0
            items = first[: max(least, 0)]
            if least > len(first):
                items = [*items, part.get("items", True)]
            return all(self.holds(item, part) for item in items)
        return True


def _dicts(schema: Any) -> list[dict[str, Any]]:
    """Every dict in the schema, outer ones first. Those that are no schemas are never asked for."""
    found, todo = [], [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            found.append(value)
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return found


def _target(reference: Any, root: Schema) -> Any:
    """What a reference within the document points to; True (anything) where it can't be followed: the grammar compiler
    refuses those by name."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return True
    return found


def types_of(schema: Any, name: str) -> frozenset[str]:
    """The JSON types that an object's schema gives its property `name`, through references and choices; empty where it
    doesn't say."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    todo = [properties.get(name)] if isinstance(properties, dict) else []
    types: set[str] = set()
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        kinds = part.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        types.update(kind for kind in kinds if isinstance(kind, str))
        values = [part["const"]] if "const" in part else part.get("enum")
        types.update(json_type(value) for value in (values if isinstance(values, list) else []))
        for key in ("anyOf", "oneOf", "allOf"):
            options = part.get(key)
            todo += options if isinstance(options, list) else []
        if "$ref" in part:
            todo.append(_target(part["$ref"], schema))
    return frozenset(types)


def json_type(value: Any) -> str:
    """The name that JSON schemas have for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", dict: "object", list: "array", tuple: "array"}
    return kinds.get(type(value), "string")
