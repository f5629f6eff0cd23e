"""What running entries found, kept in a file so that a run that was broken off goes on where it stood."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """`difference`: the largest of a logit, where the entry is proven; `error`: why it isn't."""

    difference: float | None = None
    error: str | None = None

    @property
    def proven(self) -> bool:
        return self.error is None

    def __str__(self) -> str:
        return self.error or f"proven, logits within {self.difference:.1e}"


class Results:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = json.loads(path.read_text()) if path.exists() else {}

    def get(self, name: str, key: str) -> Result | None:
        """What was found of the entry when its checksum was `key`."""
        found = self._found.get(name)
        return Result(**found["result"]) if found and found["key"] == key else None

    def put(self, name: str, key: str, result: Result) -> None:
        self._found[name] = {"key": key, "result": asdict(result)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1, sort_keys=True))
