"""`--config FILE`: flags of a command in a YAML file, by their names. Flags that are typed win."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

FLAG = "--config"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG, metavar="FILE", help="flags in a YAML file, by their names; those typed here win"
    )


def read_config(commands: Mapping[str, argparse.ArgumentParser], argv: Sequence[str]) -> None:
    """Make the values in the file behind `--config`, if there is one, the defaults of the command in `argv`. They are
    read as if they had been typed.

    Raises `ValueError` for a file that is no YAML, a name that isn't one of the command's flags, and a value that its
    flag doesn't take, `OSError` for a file that can't be read.
    """
    parser = next((commands[word] for word in argv if word in commands), None)
    if parser is None or FLAG not in parser._option_string_actions:
        return
    path = _config_path(argv)
    if path is not None:
        _use(parser, path, _read(path))


def _config_path(argv: Sequence[str]) -> str | None:
    """What was typed behind `--config`, seen before anything is parsed."""
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scout.add_argument(FLAG)
    try:
        found: str | None = scout.parse_known_args(argv)[0].config
    except argparse.ArgumentError:  # which the real parser explains
        return None
    return found


def _use(parser: argparse.ArgumentParser, path: str, values: dict[str, Any]) -> None:
    arguments: list[str] = []
    positional = next((a for a in parser._actions if not a.option_strings), None)
    if positional is not None:
        model = values.pop(positional.dest, None)
        if model is not None:
            if not isinstance(model, str):
                raise ValueError(f"{path}: {positional.dest} must be a string, got {model!r}.")
            positional.nargs, positional.default, positional.required = "?", model, False
        arguments.append("-" if model is None else model)
    given: dict[str, None] = {}
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        action = parser._option_string_actions.get(flag)
        if action is None or action.dest in ("help", "config"):
            raise ValueError(f"{path}: there is no flag {flag}.")
        arguments += _typed(path, action, flag, value)
        given[action.dest] = None
    required = [a for a in parser._actions if a.required and a.option_strings]
    for action in required:  # to be typed, or in the file: that is seen in the end
        action.required = False
    parsed = _parse(parser, path, arguments)
    for action in required:
        action.required = action.dest not in given
    parser.set_defaults(**{dest: getattr(parsed, dest) for dest in given})


def _read(path: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError("a YAML file needs pyyaml; install 'jaxinfer[server]'.") from error
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{path} must map the names of flags to their values.")
    return values


def _typed(path: str, action: argparse.Action, flag: str, value: Any) -> list[str]:
    """The flag and its value as they would be typed."""
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {flag} must be true or false, got {value!r}.")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else flag.replace("--", "--no-", 1)]
        return [flag] if value else []
    if value is None or isinstance(value, bool):
        raise ValueError(f"{path}: {flag} needs a value, got {value!r}.")
    if isinstance(value, list) and (action.nargs == "+" or _appends(action)):
        items = [_text(item) for item in value]
        if _appends(action):
            return [f"{flag}={item}" for item in items]
        return [flag, *items]
    return [f"{flag}={_text(value)}"]


def _appends(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parse(parser: argparse.ArgumentParser, path: str, arguments: list[str]) -> argparse.Namespace:
    parser.exit_on_error = False
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{path}: {error}") from error
    finally:
        parser.exit_on_error = True
