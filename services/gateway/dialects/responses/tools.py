"""The tools of a request: functions and custom tools, those of namespaces, and hosted ones, which
no worker can run: they are left out, and the response says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from services.gateway.dialects.responses.fields import (
    NamedChoice,
    PlacedTool,
    ResponseTool,
    ToolChoice,
)
from services.gateway.dialects.responses.tool_names import flat_name
from services.gateway.structured.tools.choice_fields import (
    ChoiceField,
    NamedField,
    ToolChoiceField,
    tool_options,
)
from services.gateway.structured.tools.tool import MAX_TOOLS, Tool, ToolOptions
from services.gateway.structured.tools.tool_fields import ToolBody, ToolField
from shared.errors import HearthError, InvalidRequest, PayloadTooLarge

OWN_TYPES = ("function", "custom")
HOSTED = re.compile(
    r"(web_search|image_generation|tool_search|mcp|computer|local_shell|shell|apply_patch"
    r"|code_interpreter|file_search|programmatic_tool_calling)[a-z0-9_-]*"
)
_INDEX = re.compile(r"tools\[(\d+)\]")


def options_of(
    tools: Sequence[PlacedTool],
    choice: str | ToolChoice | None,
    is_parallel: bool | None,
) -> ToolOptions | None:
    """Returns None if there are no tools. `tools`: the tools with their places. Raises
    InvalidRequest for an invalid tool and for the choice of an unknown tool, and PayloadTooLarge.
    """
    placed = _without_repeated([each for place, tool in tools for each in _fields(place, tool)])
    places, fields = [place for place, _ in placed], [field for _, field in placed]
    if len(fields) > MAX_TOOLS:
        raise PayloadTooLarge(f"tools: more than {MAX_TOOLS}", param="tools")
    try:
        options = tool_options(fields, _choice(choice), is_parallel)
    except InvalidRequest as error:
        raise _placed_error(error, places) from error
    return None if options is None else _placed(options, places)


def left_out(tools: Sequence[PlacedTool]) -> tuple[str, ...]:
    """Returns a warning for each tool that the model is not offered."""
    return tuple(
        f"{place}: {each.type[:64]} is not hosted here and is left out"
        for place, each in tools
        if _is_left_out(place, each)
    )


def namespaces_of(tools: Sequence[PlacedTool]) -> Mapping[str, tuple[str, str]]:
    """Returns the namespace and name of tools in namespaces, by the name for the model."""
    return {
        flat_name(each.name, name): (each.name, name)
        for _, each in tools
        if each.type == "namespace" and each.name
        for name in filter(None, map(_name, each.tools or ()))
    }


def _fields(place: str, tool: ResponseTool) -> list[tuple[str, ToolField]]:
    match tool.type:
        case "function" | "custom":
            return [(place, msgspec.convert(tool, ToolField, from_attributes=True))]
        case "namespace":
            if not tool.name:
                param = f"{place}.name"
                raise InvalidRequest(f"{param}: a namespace needs a name", param=param)
            return [
                (f"{place}.tools[{index}]", _in_namespace(tool.name, each))
                for index, each in enumerate(tool.tools or ())
            ]
    if not _is_left_out(place, tool):
        param = f"{place}.type"
        raise InvalidRequest(f"{param}: {tool.type[:64]!r} is not supported", param=param)
    return []


def _is_left_out(place: str, tool: ResponseTool) -> bool:
    """Whether the model is not offered the tool. Clients choose the tools of the body, but those of
    items come with a conversation, also of newer kinds.
    """
    if tool.type in (*OWN_TYPES, "namespace"):
        return False
    return HOSTED.fullmatch(tool.type) is not None or not place.startswith("tools[")


def _without_repeated(placed: list[tuple[str, ToolField]]) -> list[tuple[str, ToolField]]:
    """Returns the last tool of each name: clients send the tools of items with each turn."""
    last = {_name(field): place for place, field in placed if not place.startswith("tools[")}
    return [(place, field) for place, field in placed if last.get(_name(field), place) == place]


def _in_namespace(namespace: str, field: ToolField) -> ToolField:
    """Returns the tool with its flat name, wherever its fields are."""
    name = _name(field)
    if name is None:
        return field
    flat = flat_name(namespace, name)
    inner = field.custom if field.type == "custom" else field.function
    if inner is None:
        return msgspec.structs.replace(field, name=flat)
    return msgspec.structs.replace(field, **{field.type: _renamed(inner, flat)})


def _renamed(body: ToolBody, name: str) -> ToolBody:
    return msgspec.structs.replace(body, name=name)


def _name(field: ToolField) -> str | None:
    inner = field.custom if field.type == "custom" else field.function
    return field.name if inner is None else inner.name


def _choice(choice: str | ToolChoice | None) -> ToolChoiceField | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        named = [_named(each) for each in choice.tools or () if each.type in OWN_TYPES]
        return ChoiceField(type="allowed_tools", mode=choice.mode, tools=named or None)
    if choice.type not in OWN_TYPES:
        raise InvalidRequest(
            f"tool_choice: {choice.type[:64]!r} is not hosted here", param="tool_choice"
        )
    return ChoiceField(**msgspec.structs.asdict(_named(choice)))


def _named(choice: NamedChoice) -> NamedField:
    name = None if choice.name is None else flat_name(choice.namespace, choice.name)
    return msgspec.convert({"type": choice.type, "name": name}, NamedField)


def _placed(options: ToolOptions, places: Sequence[str]) -> ToolOptions:
    """Returns the tools with their places in the request, which has other tools between them."""

    def placed(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        return tuple(
            msgspec.structs.replace(
                each,
                param=_moved(each.param, places),
                schema_param=_moved(each.schema_param, places),
            )
            for each in tools
        )

    return msgspec.structs.replace(
        options, tools=placed(options.tools), offered=placed(options.offered)
    )


def _placed_error(error: InvalidRequest, places: Sequence[str]) -> HearthError:
    param = error.param
    if param is None or not param.startswith("tools["):
        return error
    moved = _moved(param, places)
    return type(error)(error.message.replace(param, moved), param=moved)


def _moved(param: str, places: Sequence[str]) -> str:
    return _INDEX.sub(lambda found: places[int(found[1])], param, count=1)
