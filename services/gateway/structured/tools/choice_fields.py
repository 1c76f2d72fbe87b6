"""The request field `tool_choice`, in the forms of all dialects, and the tools that it selects.

"auto" | "none" | "required"
{"type": "function", "function": {"name"}}         a tool, also flat; so are custom tools
{"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [a tool, …]}}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.structured.tools.tool import MAX_TOOLS, NamedTool, Tool, ToolOptions
from services.gateway.structured.tools.tool_fields import ToolField, tools_of
from shared.errors import InvalidRequest

MODES = ("auto", "none", "required")


class NameField(msgspec.Struct, frozen=True):
    name: str
    """The name of the tool."""


class NamedField(msgspec.Struct, frozen=True, kw_only=True):
    """A tool by its name, nested or flat."""

    type: Literal["function", "custom"] = "function"
    """The kind of the tool."""
    function: NameField | None = None
    """The function, nested."""
    custom: NameField | None = None
    """The custom tool, nested."""
    name: str | None = None
    """The name of the tool, flat."""


class AllowedField(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    """Whether one of the tools may or must be called."""
    tools: Annotated[list[NamedField], Meta(min_length=1, max_length=MAX_TOOLS)]
    """The tools that may be called."""


class ChoiceField(msgspec.Struct, frozen=True, kw_only=True):
    """The tool or tools to call."""

    type: Literal["function", "custom", "allowed_tools"]
    """A kind of tool, which must be called, or `allowed_tools`."""
    function: NameField | None = None
    """The function to call, nested."""
    custom: NameField | None = None
    """The custom tool to call, nested."""
    name: str | None = None
    """The tool to call, flat."""
    allowed_tools: AllowedField | None = None
    """The tools that may be called, nested."""
    mode: Literal["auto", "required"] = "auto"
    """Of flat `allowed_tools`: whether one of them may or must be called."""
    tools: Annotated[list[NamedField], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    """Of flat `allowed_tools`: the tools."""


ToolChoiceField = str | ChoiceField


def tool_options(
    fields: Sequence[ToolField] | None,
    choice: ToolChoiceField | None,
    is_parallel: bool | None,
) -> ToolOptions | None:
    """Returns the options, or None without tools. Raises InvalidRequest for an invalid tool and for
    the choice of an unknown one, and PayloadTooLarge.
    """
    if isinstance(choice, str) and choice not in MODES:
        raise InvalidRequest(
            f"tool_choice: {choice[:64]!r} is none of auto, none and required", param="tool_choice"
        )
    tools = tools_of(fields or ())
    if not tools:
        if choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice is only allowed with tools", param="tool_choice")
        return None
    options = ToolOptions(tools=tools, is_parallel=is_parallel is not False)
    return _chosen(options, "auto" if choice is None else choice)


def _chosen(options: ToolOptions, choice: ToolChoiceField) -> ToolOptions:
    replace = msgspec.structs.replace
    match choice:
        case "auto" | "none" | "required":
            return replace(options, choice=choice)
        case ChoiceField(type="allowed_tools"):
            mode, allowed = _allowed(choice, options.tools)
            return replace(options, tools=allowed, offered=options.tools, choice=mode)
        case ChoiceField():
            place = f"tool_choice.{choice.type}.name" if choice.name is None else "tool_choice.name"
            name = _name_in(choice, options.tools, place)
            return replace(options, choice=NamedTool(name))
    raise AssertionError("checked before")


def _allowed(
    choice: ChoiceField, tools: Sequence[Tool]
) -> tuple[Literal["auto", "required"], tuple[Tool, ...]]:
    field = choice.allowed_tools
    place = "tool_choice.tools" if field is None else "tool_choice.allowed_tools.tools"
    mode, named = (choice.mode, choice.tools) if field is None else (field.mode, field.tools)
    if named is None:
        raise InvalidRequest(f"{place}: name the tools that are allowed", param=place)
    names = {_name_in(each, tools, f"{place}[{index}]") for index, each in enumerate(named)}
    return mode, tuple(each for each in tools if each.name in names)


def _name_in(field: NamedField | ChoiceField, tools: Sequence[Tool], place: str) -> str:
    """Returns the name that a choice contains. Raises InvalidRequest if no such tool exists."""
    inner = field.custom if field.type == "custom" else field.function
    name = field.name if inner is None else inner.name
    if name is None:
        raise InvalidRequest(f"{place}: the choice needs a name", param=place)
    is_custom = field.type == "custom"
    if all(each.name != name or (each.custom is not None) != is_custom for each in tools):
        raise InvalidRequest(
            f"{place}: no {field.type} of tools is named {name[:64]!r}", param=place
        )
    return name
