"""Values of a schema in notations that are not JSON: Python's literals and Gemma's."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from services.gateway.tools.lark import TokenIdOf, any_of, in_slashes, literal, marker
from services.gateway.tools.schema_references import resolve

_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/"
_INTEGER = "/-?(0|[1-9][0-9]{0,15})/"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES = ("string", "number", "boolean", "null", "array", "object")


class Notation(msgspec.Struct, frozen=True, kw_only=True):
    """`quote`: the marker around strings, which hold any text; empty: Python's quoted strings.
    `assign`: between a call's argument and its value; `colon`: in an object.
    """

    words: tuple[str, str, str]  # true, false, null
    quote: str
    assign: str
    colon: str
    has_quoted_keys: bool


PYTHON = Notation(
    words=("True", "False", "None"), quote="", assign='"="', colon='":" " "?', has_quoted_keys=True
)
FUNCTION_GEMMA = Notation(
    words=("true", "false", "null"),
    quote="<escape>",
    assign='":"',
    colon='":"',
    has_quoted_keys=False,
)
GEMMA4 = msgspec.structs.replace(FUNCTION_GEMMA, quote='<|"|>')

_COMMA = '"," " "?'
_PYTHON_STRING = r"""/'([^'\\\x00-\x1f\x7f]|\\['\\n])*'|"([^"\\\x00-\x1f\x7f]|\\["\\n])*"/"""


class TypedValues:
    """Collects in `rules` those that its expressions refer to."""

    def __init__(
        self, prefix: str, notation: Notation, root: dict[str, Any], token_id_of: TokenIdOf
    ) -> None:
        self.rules: list[str] = []
        self._prefix = prefix
        self._notation = notation
        self._root = root
        self._references: dict[str, str] = {}  # rules, by $ref
        self._names: dict[str, str] = {}  # shared rules, by kind
        self._num_rules = 0
        self._quote = marker(notation.quote, token_id_of) if notation.quote else ""
        self._is_token = self._quote.startswith("<")

    @property
    def quotes(self) -> tuple[str, str]:
        """What opens and closes a string."""
        return (self._quote, self._quote) if self._quote else (r'"\""', r'"\""')

    def member(self, key: str, value: str, *, is_argument: bool) -> str:
        notation = self._notation
        if is_argument or not notation.has_quoted_keys:
            return f"{literal(key)} {notation.assign if is_argument else notation.colon} {value}"
        return f"{self._written(key)} {notation.colon} {value}"

    def members(self, schema: dict[str, Any], *, is_argument: bool = False) -> str:
        """The properties of an object in their order, with commas; optional ones may be absent."""
        required = schema.get("required", ())
        after = self._rule('""')  # the properties that follow another one
        first = ['""']  # alternatives: the first property that is present
        for key, value in reversed(schema.get("properties", {}).items()):
            member = self._rule(self.member(key, self.value(value), is_argument=is_argument))
            only = f"{member} {after}"
            first = [only] if key in required else [only, *first]
            follows = f"({_COMMA} {member})" + ("" if key in required else "?")
            after = self._rule(f"{follows} {after}")
        return any_of(first)

    def value(self, schema: Any) -> str:
        """What the schema allows; keywords that are not known here are ignored."""
        if not isinstance(schema, dict):
            return self._any()
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return any_of(map(self._written, values))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return any_of(map(self.value, schema[keyword]))
        types = schema.get("type", "object" if "properties" in schema else None)
        if types is None:
            return self._any()
        listed = types if isinstance(types, list) else [types]
        return any_of(self._typed(each, schema) for each in listed)

    def _typed(self, name: str, schema: dict[str, Any]) -> str:
        match name:
            case "string":
                return self._string()
            case "integer" | "number":
                bounds = {key: schema[key] for key in _BOUNDS if key in schema}
                if bounds:
                    return f"%json {msgspec.json.encode({'type': name, **bounds}).decode()}"
                return _INTEGER if name == "integer" else _NUMBER
            case "boolean":
                return any_of(map(literal, self._notation.words[:2]))
            case "null":
                return literal(self._notation.words[2])
            case "array":
                return self._array(schema)
            case "object" if "properties" in schema:
                return f'"{{" {self.members(schema)} "}}"'
            case "object":
                return self._any_object(schema.get("additionalProperties"))
            case _:
                return self._any()

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if most < 1:
            return '"[]"'
        item = self._rule(self.value(schema.get("items")))
        bound = "" if most == math.inf else str(int(most) - 1)
        items = f"{item} ({_COMMA} {item}){{{max(0, least - 1)},{bound}}}"
        return f'"[" ({items}) "]"' if least else f'"[" ({items})? "]"'

    def _any_object(self, values: Any) -> str:
        value = self._any() if values in (None, True, False) else self._rule(self.value(values))
        key = self._string() if self._notation.has_quoted_keys else "/[A-Za-z_][A-Za-z0-9_]*/"
        member = self._rule(f"{key} {self._notation.colon} {value}")
        return f'"{{" ({member} ({_COMMA} {member})*)? "}}"'

    def _any(self) -> str:
        """Any value; one rule, which refers to itself."""
        if "any" not in self._names:
            name = self._names["any"] = self._new_name()
            self.rules.append(f"{name}: {any_of(self._typed(each, {}) for each in _TYPES)}")
        return self._names["any"]

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = self._references[reference] = self._new_name()
            self.rules.append(f"{name}: {self.value(resolve(self._root, reference))}")
        return self._references[reference]

    def _string(self) -> str:
        if not self._quote:
            return _PYTHON_STRING
        if self._is_token:
            return f"({self._quote} /(?s:.+)/? {self._quote})"
        if "text" not in self._names:
            name = self._names["text"] = self._new_name()
            # Of a marker, only bars have a meaning in expressions.
            end = in_slashes(f"(?s:.*){self._notation.quote.replace('|', '[|]')}")
            self.rules.append(f"{name}[lazy]: {end}")
        return f"({self._quote} {self._names['text']})"

    def _written(self, value: Any) -> str:
        """One value. Texts that need escapes are written with those of Python."""
        match value:
            case bool() | None:
                true, false, null = self._notation.words
                return literal(null if value is None else true if value else false)
            case str() if self._quote:
                return f"({self._quote} {literal(value)} {self._quote})"
            case str():
                return literal(repr(value))
            case int() | float():
                return literal(msgspec.json.encode(value).decode())
            case list():
                items = f" {_COMMA} ".join(map(self._written, value))
                return f'("[" {items} "]")'
            case dict():
                pairs = (
                    self.member(key, self._written(each), is_argument=False)
                    for key, each in value.items()
                )
                return f'("{{" {f" {_COMMA} ".join(pairs)} "}}")'
        raise TypeError(f"no JSON value: {value!r}")

    def _rule(self, expression: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {expression}")
        return name

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"
