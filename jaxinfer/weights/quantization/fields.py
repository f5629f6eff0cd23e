"""Fields of a `quantization_config`, and the errors that name them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn


def refuse(field: str, value: Any, supported: str, method: str) -> NoReturn:
    raise ValueError(
        f"quantization_config: {field} {value!r} of {method} is not supported; supported: {supported}."
    )


def need(config: Mapping[str, Any], field: str, otherwise: Any = None) -> Any:
    """Raises `ValueError` where the field is missing."""
    value = config.get(field, otherwise)
    if value is None:
        raise ValueError(f"quantization_config lacks {field}.")
    return value


def group_size_of(value: Any, supported: Collection[int], method: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in supported:
        refuse("group_size", value, ", ".join(map(str, sorted(supported))), method)
    return value
