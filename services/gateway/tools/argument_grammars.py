"""The grammar of one call's arguments, in the style of its format.

Where a style writes JSON, llguidance takes the tool's schema. The other styles write each parameter
by its type, in the order of the schema, from `properties` and `required`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from services.gateway.tools.lark import UNESCAPED, TokenIdOf, in_slashes, in_string, literal
from services.gateway.tools.tool import CustomFormat, Tool
from services.gateway.tools.typed_values import FUNCTION_GEMMA, GEMMA4, PYTHON, TypedValues
from shared.errors import InvalidRequest
from shared.grammar.spec import MAX_SOURCE_BYTES

ArgumentStyle = Literal["json", "xml", "python", "function_gemma", "gemma4"]

WHITESPACE = r"[ \t\n\r]{0,4}"  # without a bound, models write whitespace until max_tokens
INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_OPEN_KEYWORDS = frozenset(
    (
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "propertyNames",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "dependentSchemas",
    )
)


def argument_rules(
    name: str, tool: Tool, style: ArgumentStyle, token_id_of: TokenIdOf
) -> Iterator[str]:
    """The rule `name` and those that it needs; their names begin with it, or with its upper case.

    Raises InvalidRequest for a custom tool whose grammar cannot stand in a string.
    """
    schema = arguments_schema(tool)
    custom = tool.custom if tool.custom is not None and tool.custom.syntax != "text" else None
    if custom is not None:
        yield f"{name}_input: {_input(custom, style, tool.param)}"
    match style:
        case "json":
            if custom is not None:
                yield rf'{name}: "{{\"input\":" " "? "\"" {name}_input "\"" " "? "}}"'
            else:
                yield f"{name}: {json_value(schema, is_strict=tool.is_strict)}"
        case "xml":
            yield from _xml_rules(name, schema, tool.is_strict, has_input=custom is not None)
        case "python" | "function_gemma" | "gemma4":
            notation = {"python": PYTHON, "function_gemma": FUNCTION_GEMMA, "gemma4": GEMMA4}[style]
            values = TypedValues(name, notation, schema, token_id_of)
            if custom is not None:
                opening, closing = values.quotes
                value = f"{opening} {name}_input {closing}"
                yield f"{name}: {values.member('input', value, is_argument=True)}"
            else:
                yield f"{name}: {values.members(schema, is_argument=True)}"
            yield from values.rules


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Of an object. Parameters without a schema are none; listed parameters are all, unless the
    schema says otherwise, as models would fill the space for others with nonsense.
    """
    if tool.custom is not None:
        return INPUT_SCHEMA
    schema = tool.parameters
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" in schema and not _OPEN_KEYWORDS & schema.keys():
        schema = {**schema, "additionalProperties": False}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def json_value(schema: Any, *, is_strict: bool) -> str:
    """What the schema allows, as JSON in Lark."""
    if schema is True:
        schema = {}
    options = {"lenient": not is_strict, "whitespace_pattern": WHITESPACE}
    return f"%json {msgspec.json.encode({**schema, 'x-guidance': options}).decode()}"


def _input(custom: CustomFormat, style: ArgumentStyle, param: str) -> str:
    """A custom tool's input. In JSON and Python it stands in a string: expressions match there what
    needs no escape.
    """
    is_quoted = style in ("json", "python")
    match custom.syntax:
        case "regex":
            terminal = in_slashes(custom.definition) + (f" & {UNESCAPED}" if is_quoted else "")
            return f"%lark {{\nstart: INPUT\nINPUT: {terminal}\n}}"
        case "lark":
            place = f"{param}.custom.format.definition"
            rules = in_string(custom.definition, place) if is_quoted else custom.definition
            return f"%lark {{\n{rules}\n}}"
    raise ValueError(f"no grammar of {custom.syntax}")


def _xml_rules(
    name: str, schema: dict[str, Any], is_strict: bool, *, has_input: bool
) -> Iterator[str]:
    """Parameters as elements: strings as they are until the closing tag, other values as JSON."""
    required = schema.get("required", ())
    elements, text, num_bytes = [], f"{name}_TEXT".upper(), 0
    yield rf'{text}: {text}_INSIDE "\n</parameter>\n"'  # one terminal: it is longest-match
    yield rf"{text}_INSIDE: /(?s:.*)/ & ~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/"
    for index, (key, value) in enumerate(schema.get("properties", {}).items()):
        rule = f"{name}_{index}"
        elements.append(rule if key in required else f"{rule}?")
        opening = literal(f"<parameter={key}>\n")
        if has_input:
            yield rf'{rule}: {opening} {name}_input "\n</parameter>\n"'
        elif _is_text(value):
            yield rf"{rule}: {opening} {rule}_text"
            if "enum" in value or "const" in value:
                texts = value["enum"] if "enum" in value else [value["const"]]
                yield f"{rule}_text: {' | '.join(_closed(each) for each in texts)}"
            else:
                yield f"{rule}_text: {text}"
        else:
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            fields = {} if value is True else value
            json = json_value({**fields, **shared}, is_strict=is_strict)
            num_bytes += len(json)
            if num_bytes > MAX_SOURCE_BYTES:  # each value repeats the definitions
                raise InvalidRequest("tools: the schemas of a tool are too long", param="tools")
            yield rf'{rule}: {opening} {rule}_json "\n</parameter>\n"'
            yield f"{rule}_json: {json}"
    yield f"{name}: {' '.join(elements) or literal('')}"


def _closed(text: str) -> str:
    return literal(f"{text}\n</parameter>\n")


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    if values:
        return all(isinstance(each, str) for each in values)
    return schema.get("type") == "string"
