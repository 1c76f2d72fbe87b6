"""The grammar of one call's arguments, in the style of the call's format.

For JSON, llguidance takes the tool's schema. The other styles write each parameter by its type, in
the schema's order, from the alternatives of `schemas/graph.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.gateway.schemas.graph import (
    NO_FINITE_VALUE,
    ROOT,
    SchemaGraph,
    has_no_finite_value,
    has_references,
)
from services.gateway.schemas.written_schema import written_schema
from services.gateway.structured.tools.lark import (
    UNESCAPED,
    TokenIdOf,
    any_of,
    in_slashes,
    in_string,
    literal,
)
from services.gateway.structured.tools.tool import CustomFormat, Tool
from services.gateway.structured.tools.typed_values import (
    FUNCTION_GEMMA,
    GEMMA4,
    JSON_IN_GLM,
    JSON_IN_XML,
    PYTHON,
    Notation,
    TypedValues,
)
from services.gateway.structured.tools.xml_arguments import argument_tags, xml_arguments
from shared.errors import InvalidRequest
from shared.grammar.right_recursion import without_right_recursion

ArgumentStyle = Literal["json", "xml", "glm", "python", "function_gemma", "gemma4"]

WHITESPACE = r"[ \t\n\r]{0,4}"  # if unbounded, models write whitespace until max_tokens
INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_NOTATIONS: dict[ArgumentStyle, Notation] = {
    "xml": JSON_IN_XML,
    "glm": JSON_IN_GLM,
    "python": PYTHON,
    "function_gemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
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


class ArgumentRules(msgspec.Struct, frozen=True):
    """The rules of a call's arguments. `lines` are the rule and those that it refers to.
    `unenforced` are pointers to keywords that they do not enforce, in styles other than JSON.
    """

    lines: list[str]
    unenforced: tuple[str, ...] = ()


def argument_rules(
    name: str, tool: Tool, style: ArgumentStyle, token_id_of: TokenIdOf
) -> ArgumentRules:
    """Returns the rule `name` and its helpers, whose names begin with it in lower or upper case.
    Raises InvalidRequest for a custom tool whose grammar cannot be inside a string, for a schema
    that no finite arguments match, for a strict schema that cannot be enforced and, in styles other
    than JSON, for an invalid schema.
    """
    custom = tool.custom if tool.custom is not None and tool.custom.syntax != "text" else None
    schema = arguments_schema(tool)
    try:
        if custom is not None:
            return _custom_rules(name, tool, custom, style, token_id_of)
        if style == "json":
            return _json_rules(name, tool, schema)
        return _typed_rules(name, tool, schema, style, token_id_of)
    except InvalidRequest as error:
        if error.param is not None:
            raise
        message = f"{tool.schema_param}: {error.message}"
        raise type(error)(message, param=tool.schema_param) from error


def _json_rules(name: str, tool: Tool, schema: dict[str, Any]) -> ArgumentRules:
    if has_references(schema) and has_no_finite_value(schema):
        raise _unsatisfiable(tool)
    written, _ = written_schema(schema, is_strict=tool.is_strict)
    options = {"lenient": not tool.is_strict, "whitespace_pattern": WHITESPACE}
    value = msgspec.json.encode({**written, "x-guidance": options}).decode()
    return ArgumentRules([f"{name}: %json {value}"])


def _typed_rules(
    name: str, tool: Tool, schema: dict[str, Any], style: ArgumentStyle, token_id_of: TokenIdOf
) -> ArgumentRules:
    graph = SchemaGraph(schema)
    if not graph.is_finite(ROOT):
        raise _unsatisfiable(tool)
    unenforced = dict.fromkeys(graph.unenforced())
    param = tool.schema_param
    values = TypedValues(name, _NOTATIONS[style], graph, token_id_of, param=param)
    tags = argument_tags(style, token_id_of)
    if tags is not None:
        arguments = xml_arguments(graph, values, tags, param)
    else:
        shapes = [each for each in graph.alternatives(ROOT) if graph.has_value(each)]
        arguments = any_of(values.members(each, is_argument=True) for each in shapes)
    unenforced |= values.unenforced
    if unenforced and tool.is_strict:
        place = next(iter(unenforced))
        keyword = place.rpartition("/")[2]
        raise InvalidRequest(
            f"{param}: the keyword {keyword!r} at {place} cannot be enforced",
            param=param,
        )
    return ArgumentRules([f"{name}: {arguments}", *values.rules], tuple(unenforced))


def _custom_rules(
    name: str, tool: Tool, custom: CustomFormat, style: ArgumentStyle, token_id_of: TokenIdOf
) -> ArgumentRules:
    tags = argument_tags(style, token_id_of)
    lines = [f"{name}_input: {_input(custom, style, tool.schema_param)}"]
    if style == "json":
        lines.append(rf'{name}: "{{\"input\":" " "? "\"" {name}_input "\"" " "? "}}"')
    elif tags is not None:
        lines.append(f"{name}: {tags.opening(literal('input'))} {name}_input {tags.close}")
    else:
        graph = SchemaGraph(INPUT_SCHEMA)
        values = TypedValues(name, _NOTATIONS[style], graph, token_id_of, param=tool.param)
        opening, closing = values.quotes
        value = f"{opening} {name}_input {closing}"
        lines.append(f"{name}: {values.member('input', value, is_argument=True)}")
    return ArgumentRules(lines)


def _unsatisfiable(tool: Tool) -> InvalidRequest:
    return InvalidRequest(f"{tool.schema_param}: {NO_FINITE_VALUE}", param=tool.schema_param)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Returns the schema of an object. Without parameters, it has no properties. Unlisted
    properties are forbidden unless the schema says otherwise: models would write nonsense in them.
    """
    if tool.custom is not None:
        return INPUT_SCHEMA
    schema = tool.parameters
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" in schema and not _OPEN_KEYWORDS & schema.keys():
        schema = {**schema, "additionalProperties": False}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _input(custom: CustomFormat, style: ArgumentStyle, param: str) -> str:
    """Returns the rule of a custom tool's input. In JSON and Python it is inside a string, in which
    expressions match only text that needs no escape.
    """
    is_quoted = style in ("json", "python")
    match custom.syntax:
        case "regex":
            terminal = in_slashes(custom.definition) + (f" & {UNESCAPED}" if is_quoted else "")
            return f"%lark {{\nstart: INPUT\nINPUT: {terminal}\n}}"
        case "lark":
            definition = without_right_recursion(custom.definition)
            rules = in_string(definition, param) if is_quoted else definition
            return f"%lark {{\n{rules}\n}}"
    raise ValueError(f"no grammar of {custom.syntax}")
