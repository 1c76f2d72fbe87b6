"""Request fields that offer tools, in the forms of all dialects.

function   {"type": "function", "function": {"name", "description", "parameters", "strict"}}
custom     {"type": "custom", "custom": {"name", "description", "format"}}
flat       either form without the inner object; `type` may be missing
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.structured.tools.tool import MAX_TOOLS, CustomFormat, Tool
from services.gateway.structured.tools.value_bounds import check_values
from shared.errors import InvalidRequest

TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # clients prefix the name of a server

Syntax = Literal["lark", "regex"]


MAX_DEFINITION_CHARS = 16 * 1024
Definition = Annotated[str, Meta(max_length=MAX_DEFINITION_CHARS)]


class GrammarField(msgspec.Struct, frozen=True, kw_only=True):
    syntax: Syntax
    """The language of the grammar."""
    definition: Definition
    """The grammar."""


class FormatField(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar in an object of its own, or flat."""

    type: Literal["text", "grammar"] = "text"
    """`text`: any input; `grammar`: an input that matches the grammar."""
    grammar: GrammarField | None = None
    """The grammar in an object of its own."""
    syntax: Syntax | None = None
    """The language of the grammar, flat."""
    definition: Definition | None = None
    """The grammar, flat."""


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None
    """The name by which the model calls the tool."""
    description: str | None = None
    """What the tool does, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON Schema of a function's arguments, which every call matches."""
    strict: bool | None = None
    """Refuses a schema with keywords that cannot be enforced, instead of a warning."""
    format: FormatField | None = None
    """The format of a custom tool's input."""


class ToolField(ToolBody, frozen=True, kw_only=True):
    """One tool. Its body is `function`, `custom`, or the object itself."""

    type: Literal["function", "custom"] = "function"
    """The kind of the tool."""
    function: ToolBody | None = None
    """The function, nested."""
    custom: ToolBody | None = None
    """The custom tool, nested."""


ToolFields = Annotated[list[ToolField], Meta(max_length=MAX_TOOLS)]


def tools_of(fields: Sequence[ToolField]) -> tuple[Tool, ...]:
    """Returns the tools. Raises InvalidRequest for an invalid tool or two of one name, and
    PayloadTooLarge.
    """
    bodies = [_body_of(index, field) for index, field in enumerate(fields)]
    check_values([body.parameters for body, _ in bodies if body.parameters], "tools")
    tools: dict[str, Tool] = {}
    for index, (body, param) in enumerate(bodies):
        make = _custom if fields[index].type == "custom" else _function
        tool = msgspec.structs.replace(make(body, param), param=f"tools[{index}]")
        if tool.name in tools:
            place = f"{param}.name"
            raise InvalidRequest(f"{place}: two tools are named {tool.name!r}", param=place)
        tools[tool.name] = tool
    return tuple(tools.values())


def _body_of(index: int, field: ToolField) -> tuple[ToolBody, str]:
    """Returns the object that has the name, and its place in the request."""
    inner = field.custom if field.type == "custom" else field.function
    if inner is not None:
        return inner, f"tools[{index}].{field.type}"
    if field.name is None:
        param = f"tools[{index}].{field.type}"
        raise InvalidRequest(f"{param}: a tool needs a {field.type} with a name", param=param)
    return field, f"tools[{index}]"


def _function(body: ToolBody, param: str) -> Tool:
    parameters = body.parameters or {}
    kind = parameters.get("type", "object")
    if kind != "object":
        place = f"{param}.parameters"
        raise InvalidRequest(f"{place}: the schema must be of an object, not {kind!r}", param=place)
    return Tool(
        name=_name(body, param),
        description=body.description or "",
        parameters=parameters,
        is_strict=bool(body.strict),
        schema_param=f"{param}.parameters",
    )


def _custom(body: ToolBody, param: str) -> Tool:
    return Tool(
        name=_name(body, param),
        description=body.description or "",
        parameters={
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        },
        custom=_format(body.format, f"{param}.format"),
        schema_param=_definition_param(body.format, f"{param}.format"),
    )


def _format(field: FormatField | None, param: str) -> CustomFormat:
    if field is None or field.type == "text":
        return CustomFormat()
    if field.grammar is not None:
        return CustomFormat(syntax=field.grammar.syntax, definition=field.grammar.definition)
    if field.syntax is None or field.definition is None:
        raise InvalidRequest(f"{param}: a grammar needs syntax and definition", param=param)
    return CustomFormat(syntax=field.syntax, definition=field.definition)


def _definition_param(field: FormatField | None, param: str) -> str:
    is_nested = field is not None and field.grammar is not None
    return f"{param}.grammar.definition" if is_nested else f"{param}.definition"


def _name(body: ToolBody, param: str) -> str:
    place = f"{param}.name"
    if body.name is None:
        raise InvalidRequest(f"{place}: a tool needs a name", param=place)
    if TOOL_NAME.fullmatch(body.name) is None:
        reason = "must be 1 to 128 letters, digits, and characters of `_.-`"
        raise InvalidRequest(f"{place}: a name {reason}", param=place)
    return body.name
