"""Writes grammars for values of a schema in other notations: Python's literals, Gemma's, and JSON
in a text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from keyword import kwlist
from typing import Any

import msgspec

from services.gateway.schemas.document import Pointer
from services.gateway.schemas.graph import SchemaGraph
from services.gateway.schemas.patterns import whole
from services.gateway.schemas.shapes import KINDS, Kind, Node, Shape, items, members
from services.gateway.structured.tools.lark import TokenIdOf, any_of, in_slashes, literal, marker
from shared.errors import InvalidRequest

_NUMBER = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?/"
_INTEGER = "/-?(0|[1-9][0-9]{0,15})/"


class Notation(msgspec.Struct, frozen=True, kw_only=True):
    """A notation of values. `quote` is the marker around strings, which contain any text; if it is
    empty, strings are quoted and escaped, and `string` matches them. `refused` is an expression
    that no string may contain. `assign` is between an argument and its value, `colon` between a key
    and its value.
    """

    words: tuple[str, str, str]  # true, false, null
    quote: str = ""
    string: str = ""
    refused: str = ""
    assign: str = '":"'
    colon: str = '":"'
    has_quoted_keys: bool = True


PYTHON = Notation(
    words=("True", "False", "None"),
    string=r"""/'([^'\\\x00-\x1f\x7f]|\\['\\n])*'|"([^"\\\x00-\x1f\x7f]|\\["\\n])*"/""",
    assign='"="',
    colon='":" " "?',
)
FUNCTION_GEMMA = Notation(
    words=("true", "false", "null"), quote="<escape>", refused=r"\x00", has_quoted_keys=False
)
GEMMA4 = msgspec.structs.replace(FUNCTION_GEMMA, quote='<|"|>')
JSON_IN_XML = Notation(
    words=("true", "false", "null"),
    string=r'/"([^"\\\x00-\x1f\x7f]|\\["\\\/bfnrt])*"/',
    refused="<\\/(parameter|function|tool_call)>",  # JSON can write `<\/`
    colon='":" " "?',
)
JSON_IN_GLM = msgspec.structs.replace(JSON_IN_XML, refused="<\\/(arg_key|arg_value|tool_call)>")

_COMMA = '"," " "?'
_UNESCAPED = r"""/[^"'\\\x00-\x1f\x7f]*/"""
_BARE_KEY = re.compile(r"[\w$-]+")
_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"


class TypedValues:
    """Writes expressions of values. `rules` are those that the expressions refer to, `unenforced`
    are pointers to keywords that no expression enforces.
    """

    def __init__(
        self,
        prefix: str,
        notation: Notation,
        graph: SchemaGraph,
        token_id_of: TokenIdOf,
        *,
        param: str,
    ) -> None:
        self.rules: list[str] = []
        self.unenforced: dict[Pointer, None] = {}
        self._prefix = prefix
        self._notation = notation
        self._graph = graph
        self._param = param
        self._values: dict[Node, str] = {}
        self._terminals: dict[str, str] = {}
        self._num_rules = 0
        self._quote = marker(notation.quote, token_id_of) if notation.quote else ""
        self._is_token = self._quote.startswith("<")

    @property
    def quotes(self) -> tuple[str, str]:
        """The expressions that open and close a string."""
        return (self._quote, self._quote) if self._quote else (r'"\""', r'"\""')

    def member(self, key: str, value: str, *, is_argument: bool) -> str:
        notation = self._notation
        if not is_argument and notation.has_quoted_keys:
            return f"{self._written(key)} {notation.colon} {value}"
        if not is_argument and not _BARE_KEY.fullmatch(key):
            raise InvalidRequest(
                f"{self._param}: this model's calls cannot hold the name {key[:64]!r}",
                param=self._param,
            )
        return f"{literal(key)} {notation.assign if is_argument else notation.colon} {value}"

    def members(self, shape: Shape, *, is_argument: bool = False) -> str:
        """Returns an expression of an object's properties, in order and with commas; optional ones
        may be absent. Other properties follow if the schema allows them explicitly or names none.
        """
        named, required, others = members(self._graph.document, shape)
        extra = self._extra(named, others, is_argument=is_argument)
        after = self.rule('""' if extra is None else f"({_COMMA} {extra})*")
        first = ['""' if extra is None else f"({extra} ({_COMMA} {extra})*)?"]
        for key, node in reversed(named.items()):
            if not self._graph.is_finite(node):
                continue
            member = self.rule(self.member(key, self.value(node), is_argument=is_argument))
            only = f"{member} {after}"
            first = [only] if key in required else [only, *first]
            follows = f"({_COMMA} {member})" + ("" if key in required else "?")
            after = self.rule(f"{follows} {after}")
        return any_of(first)

    def value(self, node: Node) -> str:
        """Returns a rule that matches the node's values; the node must be finite."""
        if node not in self._values:
            name = self._values[node] = self._new_name()
            self.rules.append(f"{name}: {any_of(map(self._shape, self.shapes(node)))}")
        return self._values[node]

    def shapes(self, node: Node) -> list[Shape]:
        """Returns the alternatives of the node that have a finite value."""
        return [each for each in self._graph.alternatives(node) if self._has_value(each)]

    def closed(self, shape: Shape, close: str, *, is_token: bool) -> Iterator[str]:
        """Yields expressions of the shape's values followed by `close`. A scalar and a textual
        `close` are one terminal: the lexer takes the longest match, and bare text may continue
        after the scalar.
        """
        for value in shape.literals or ():
            is_scalar = not is_token and (value is None or isinstance(value, bool | int | float))
            closed = f"{self._written(value)} {close}"
            yield self.terminal(closed) if is_scalar else f"({closed})"
        if shape.literals is not None:
            return
        for kind in KINDS:
            if kind in shape.written:
                closed = f"{self._typed(kind, shape)} {close}"
                is_terminal = kind in ("boolean", "null") or (kind == "number" and not shape.bounds)
                yield self.terminal(closed) if is_terminal and not is_token else f"({closed})"

    def text(
        self, shape: Shape, close: str, *, is_token: bool, other_parts: Iterable[str] = ()
    ) -> str:
        """Returns an expression of bare text that the shape and all of `other_parts` allow,
        followed by `close`. With a textual `close`, it is one terminal.
        """
        inside = self._inside(shape, "/(?s:.*)/", (self._notation.refused,))
        inside = " & ".join((inside, *other_parts))
        closed = f"{self.terminal(inside)} {close}"
        return f"({closed})" if is_token else self.terminal(closed)

    def rule(self, expression: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """Returns the terminal's name. Equal expressions share a name, since the lexer cannot
        distinguish them.
        """
        if expression not in self._terminals:
            name = self._terminals[expression] = self._new_name().upper()
            self.rules.append(f"{name}: {expression}")
        return self._terminals[expression]

    def _has_value(self, shape: Shape) -> bool:
        for node in self._graph.children(shape):
            self._graph.is_finite(node)  # `has_value` looks it up
        return self._graph.has_value(shape)

    def _shape(self, shape: Shape) -> str:
        if shape.literals is not None:
            return any_of(map(self._written, shape.literals))
        return any_of(self._typed(each, shape) for each in KINDS if each in shape.written)

    def _typed(self, kind: Kind, shape: Shape) -> str:
        match kind:
            case "string":
                return self._string(shape)
            case "number":
                if shape.bounds:
                    name = "integer" if shape.is_integer else "number"
                    schema = {"type": name, **shape.bounds}
                    return f"%json {msgspec.json.encode(schema).decode()}"
                return _INTEGER if shape.is_integer else _NUMBER
            case "boolean":
                return any_of(map(literal, self._notation.words[:2]))
            case "null":
                return literal(self._notation.words[2])
            case "array":
                return self._array(shape)
        return f'"{{" {self.members(shape)} "}}"'

    def _array(self, shape: Shape) -> str:
        heads, rest = items(self._graph.document, shape)
        heads = heads if shape.most_items == math.inf else heads[: int(shape.most_items)]
        finite = [self._graph.is_finite(each) for each in heads]
        if not all(finite):
            heads = heads[: finite.index(False)]
            tail = None
        else:
            tail = self._rest(len(heads), rest, shape)
        for index in reversed(range(len(heads))):
            separator = f"{_COMMA} " if index else ""
            item = f"{separator}{self.value(heads[index])} {tail or ''}"
            tail = self.rule(f"{item} | {literal('')}" if index >= shape.least_items else item)
        return f'"[" {tail or literal("")} "]"'

    def _rest(self, index: int, node: Node, shape: Shape) -> str | None:
        """Returns an expression of the items from an index on, or None if there are none."""
        if shape.most_items <= index or not self._graph.is_finite(node):
            return None
        item = self.value(node)
        least = max(0, shape.least_items - index)
        most = shape.most_items - index
        if index:
            return f"({_COMMA} {item}){_times(least, most)}"
        repeated = f"({item} ({_COMMA} {item}){_times(max(0, least - 1), most - 1)})"
        return repeated if least else f"{repeated}?"

    def _extra(
        self, named: dict[str, Node], others: Node | None, *, is_argument: bool
    ) -> str | None:
        """Returns a rule for a property that the schema does not name, or None if there is none."""
        node = others
        if node is None and not named:
            node = ()
        if node is None or not self._graph.is_finite(node):
            return None
        refused = [*named, *(kwlist if is_argument else ())]
        key = f"/{_KEY}/" + (f" & ~/({'|'.join(map(re.escape, refused))})/" if refused else "")
        if not is_argument and self._notation.has_quoted_keys:
            key = rf'"\"" {self.terminal(key)} "\""'
        key = self.terminal(key)
        separator = self._notation.assign if is_argument else self._notation.colon
        return self.rule(f"{key} {separator} {self.value(node)}")

    # ── strings ──────────────────────────────────────────────────────────────────────────────────

    def _string(self, shape: Shape) -> str:
        is_free = not shape.patterns and shape.least_chars == 0 and shape.most_chars == math.inf
        refused = (self._notation.refused,)
        if self._quote and self._is_token:
            inside = self.terminal(self._inside(shape, "/(?s:.*)/", refused))
            return f"({self._quote} {inside} {self._quote})"
        if self._quote:
            inside = self._inside(shape, "/(?s:.*)/", (*refused, re.escape(self._notation.quote)))
            return f"({self._quote} {self.terminal(f'{self.terminal(inside)} {self._quote}')})"
        if is_free:
            return self.terminal(_without(self._notation.string, refused))
        inside = self.terminal(self._inside(shape, _UNESCAPED, refused))
        return self.terminal(rf'"\"" {inside} "\""')

    def _inside(self, shape: Shape, any_text: str, refused: Iterable[str]) -> str:
        parts = [any_text]
        if shape.least_chars or shape.most_chars < math.inf:
            parts.append(f"/(?s:.){_times(shape.least_chars, shape.most_chars)}/")
        for place, pattern in shape.patterns:
            expression = whole(pattern)
            if expression is None:
                self.unenforced[place] = None
            else:
                parts.append(in_slashes(expression))
        return _without(" & ".join(parts), refused)

    def _written(self, value: Any) -> str:
        """Returns an expression of one value. Texts are escaped as the notation requires."""
        match value:
            case bool() | None:
                true, false, null = self._notation.words
                return literal(null if value is None else true if value else false)
            case str() if self._quote:
                if "\x00" in value or (not self._is_token and self._notation.quote in value):
                    raise InvalidRequest(
                        f"{self._param}: this model's calls cannot hold the text {value[:64]!r}",
                        param=self._param,
                    )
                return f"({self._quote} {literal(value)} {self._quote})"
            case str():
                is_python = self._notation.words[0] == "True"
                json_text = json.dumps(value, ensure_ascii=False).replace("</", "<\\/")
                return literal(repr(value) if is_python else json_text)
            case int() | float():
                return literal(msgspec.json.encode(value).decode())
            case list():
                return f'("[" {f" {_COMMA} ".join(map(self._written, value)) or literal("")} "]")'
            case dict():
                pairs = (
                    self.member(key, self._written(each), is_argument=False)
                    for key, each in value.items()
                )
                return f'("{{" {f" {_COMMA} ".join(pairs) or literal("")} "}}")'
        raise TypeError(f"no JSON value: {value!r}")

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"


def _times(least: int, most: float) -> str:
    return f"{{{least},{'' if most == math.inf else int(most)}}}"


def _without(expression: str, refused: Iterable[str]) -> str:
    """Returns an expression without texts that contain a match of `refused`."""
    parts = [f"~/(?s:.*)({each})(?s:.*)/" for each in refused if each]
    return " & ".join((expression, *parts))
