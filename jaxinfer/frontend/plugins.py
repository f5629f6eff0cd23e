"""What is chosen by name and may come from a file of the user's: parsers of tool calls and of reasoning."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


class Registry[T]:
    """`kind`: what it holds, in messages. Those of `own` are imported when they are first asked for: "module:name"."""

    def __init__(self, kind: str, own: Mapping[str, str]) -> None:
        self._kind = kind
        self._own = dict(own)
        self._found: dict[str, type[T]] = {}

    @property
    def names(self) -> list[str]:
        return sorted({*self._own, *self._found})

    def register(self, *names: str) -> Callable[[type[T]], type[T]]:
        """A class decorator. Raises `ValueError` for no name at all."""
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"A {self._kind} needs a name, got {names!r}.")

        def keep(found: type[T]) -> type[T]:
            self._found.update(dict.fromkeys(names, found))
            return found

        return keep

    def get(self, name: str) -> type[T]:
        """Raises `ValueError`, with the list, for an unknown name."""
        if name not in self._found:
            if name not in self._own:
                raise ValueError(
                    f"There is no {self._kind} {name!r}; there are {', '.join(self.names)}."
                )
            module, _, attribute = self._own[name].partition(":")
            self._found[name] = getattr(importlib.import_module(module), attribute)
        return self._found[name]


def load_plugin(path: str) -> None:
    """Run a Python file, once. Raises `ValueError` where there is none, and for whatever it raises."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"There is no file {path}.")
    name = f"jaxinfer_plugin_{abs(hash(file)):x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} can't be imported: {error!r}") from error
