"""Tools that a request offers to the model, and what it asks of their use."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, model_validator

from jaxinfer.frontend.tool_grammar import arguments_schema, required_calls
from jaxinfer.server.errors import BadRequest


class ToolChoice(NamedTuple):
    """`name` of the function that has to be called, where one is named."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None


class ToolFields(BaseModel):
    """OpenAI's. Without `tools`, nothing else of it has an effect."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True

    @model_validator(mode="after")
    def _keep_allowed_tools(self) -> ToolFields:
        """Of the tools, where a choice says which may be called: the others are as if they weren't there."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return self
        allowed = choice.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        if not isinstance(listed, list) or not listed or mode not in ("auto", "required"):
            raise _bad_choice(
                "of type allowed_tools must hold allowed_tools with the mode auto or required, and tools."
            )
        names = [_named(tool) if isinstance(tool, dict) else tool for tool in listed]
        known = tool_names(self.tools or [])
        if unknown := [name for name in names if name not in known]:
            raise _bad_choice(
                f"allows the function {unknown[0]!r:.100}, which is not among the tools."
            )
        self.tools = [t for t, name in zip(self.tools or [], known, strict=True) if name in names]
        self.tool_choice = mode
        return self

    @cached_property
    def chosen(self) -> ToolChoice:
        """Raises `BadRequest` for tools and choices that mean nothing."""
        choice = self.tool_choice
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise _bad_choice(f"must be none, auto, required or a function, got {choice!r:.100}.")
        if not self.tools:
            if choice in (None, "none", "auto"):
                return ToolChoice("none")
            raise _bad_choice("needs tools.")
        names = tool_names(self.tools)
        if isinstance(choice, dict):
            name = _named(choice)
            if name not in names:
                raise _bad_choice(
                    f"names the function {name!r:.100}, which is not among the tools."
                )
            return ToolChoice("named", name)
        return ToolChoice(choice or "auto")  # type: ignore[arg-type]

    def enforced(self) -> dict[str, Any] | None:
        """The fields of `StructuredOutputsParams` that hold the output to calls, where calls are demanded. Raises
        `BadRequest` for schemas that can't be enforced."""
        if self.chosen.mode not in ("required", "named"):
            return None
        assert self.tools is not None
        try:
            if self.chosen.mode == "required":
                return {
                    "grammar": required_calls(self.tools, self.parallel_tool_calls is not False)
                }
            names = tool_names(self.tools)
            return {"json": arguments_schema(self.tools, names.index(str(self.chosen.name)))}
        except ValueError as error:
            raise BadRequest(str(error), param="tools") from error


def tool_names(tools: list[dict[str, Any]]) -> list[str]:
    """The functions' names, in order. Raises `BadRequest` for what is no function."""
    names: list[str] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise _bad_tool(
                f"{where}.type: only 'function' is supported, got {tool['type']!r:.100}."
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _bad_tool(f"{where}.function must be an object.")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise _bad_tool(f"{where}.function.name must be a non-empty string.")
        if name in names:
            raise _bad_tool(
                f"{where}.function.name: {name!r:.100} is the name of another tool too."
            )
        names.append(name)
        _check_parameters(f"{where}.function.parameters", function.get("parameters"))
    return names


def _check_parameters(where: str, schema: Any) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise _bad_tool(f"{where} must be a JSON schema, got {schema!r:.100}.")
    if schema.get("type", "object") != "object":
        raise _bad_tool(f"{where}.type must be 'object', got {schema['type']!r:.100}.")
    for key, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(key, kind()), kind):
            raise _bad_tool(
                f"{where}.{key} must be a JSON {kind.__name__}, got {schema[key]!r:.100}."
            )


def _named(choice: dict[str, Any]) -> Any:
    function = choice.get("function")
    if choice.get("type", "function") != "function" or not isinstance(function, dict):
        raise _bad_choice(
            f'must have the form {{"type": "function", "function": {{"name": …}}}}, got {choice!r:.100}.'
        )
    return function.get("name")


def _bad_tool(message: str) -> BadRequest:
    return BadRequest(message, param="tools")


def _bad_choice(message: str) -> BadRequest:
    return BadRequest(f"tool_choice {message}", param="tool_choice")
