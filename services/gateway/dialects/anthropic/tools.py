"""Tools, and which of them an answer may or must call.

custom   {"name", "description", "input_schema", "strict"}; `type` is "custom" or missing
server   {"type": "web_search_20250305", "name": "web_search", …}: Anthropic runs it or knows its
         schema. Left out with a warning, unless `tool_choice` names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.structured.tools.tool import (
    MAX_TOOLS,
    NamedTool,
    Tool,
    ToolChoice,
    ToolOptions,
)
from services.gateway.structured.tools.value_bounds import check_values
from shared.errors import InvalidRequest

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
CUSTOM = (None, "custom")


class AnthropicToolField(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = None
    """`custom` or nothing for a tool of the client; other types are tools of Anthropic's servers,
    which are left out.
    """
    name: str | None = None
    """The name by which the model calls the tool."""
    description: str | None = None
    """What the tool does, for the model."""
    input_schema: dict[str, Any] | None = None
    """The JSON Schema of the arguments, which every call matches."""
    strict: bool | None = None
    """Refuses a schema with keywords that cannot be enforced, instead of a warning."""


class AnthropicChoiceField(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    """`auto`: may call; `any`: must call; `tool`: must call `name`; `none`: must not call."""
    name: str | None = None
    """The tool to call, with the type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """Whether an answer has one call at most."""


Tools = Annotated[list[AnthropicToolField], Meta(max_length=MAX_TOOLS)]


def tool_options(
    fields: Sequence[AnthropicToolField] | None, choice: AnthropicChoiceField | None
) -> ToolOptions | None:
    """Returns None if there are no tools. Raises InvalidRequest for an invalid tool and for the
    choice of an unknown tool, and PayloadTooLarge.
    """
    tools = _tools(fields or ())
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidRequest(
                f"tool_choice: {choice.type!r} needs tools that the model can call",
                param="tool_choice",
            )
        return None
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    return ToolOptions(tools=tools, choice=_choice(choice, tools), is_parallel=is_parallel)


def warnings_of(fields: Sequence[AnthropicToolField] | None) -> tuple[str, ...]:
    """Returns a warning for each tool that the model is not offered."""
    return tuple(
        f"tools[{index}]: {each.type!r} is run by Anthropic's servers alone and is left out"
        for index, each in enumerate(fields or ())
        if each.type not in CUSTOM
    )


def _tools(fields: Sequence[AnthropicToolField]) -> tuple[Tool, ...]:
    custom = [(index, each) for index, each in enumerate(fields) if each.type in CUSTOM]
    check_values([each.input_schema for _, each in custom if each.input_schema], "tools")
    tools: dict[str, Tool] = {}
    for index, field in custom:
        tool = _tool(field, f"tools[{index}]")
        if tool.name in tools:
            place = f"tools[{index}].name"
            raise InvalidRequest(f"{place}: two tools are named {tool.name!r}", param=place)
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(field: AnthropicToolField, param: str) -> Tool:
    if field.name is None or TOOL_NAME.fullmatch(field.name) is None:
        place = f"{param}.name"
        reason = "a tool needs a name of 1 to 128 letters, digits, and characters of `_-`"
        raise InvalidRequest(f"{place}: {reason}", param=place)
    place = f"{param}.input_schema"
    if field.input_schema is None:
        raise InvalidRequest(f"{place}: a tool needs the schema of its input", param=place)
    kind = field.input_schema.get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{place}: the schema must be of an object, not {kind!r}", param=place)
    return Tool(
        name=field.name,
        description=field.description or "",
        parameters=field.input_schema,
        is_strict=bool(field.strict),
        param=param,
        schema_param=place,
    )


def _choice(choice: AnthropicChoiceField | None, tools: Sequence[Tool]) -> ToolChoice:
    match choice:
        case None | AnthropicChoiceField(type="auto"):
            return "auto"
        case AnthropicChoiceField(type="none"):
            return "none"
        case AnthropicChoiceField(type="any"):
            return "required"
    name, param = choice.name, "tool_choice.name"
    if name is None or all(each.name != name for each in tools):
        shown = "" if name is None else f" {name[:64]!r}"
        raise InvalidRequest(f"{param}: no tool that can be called is named{shown}", param=param)
    return NamedTool(name)
