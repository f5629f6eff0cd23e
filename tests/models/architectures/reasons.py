"""Why an entry of transformers' mapping is not supported, in a line."""

from __future__ import annotations

REASONS: dict[str, str] = {}
