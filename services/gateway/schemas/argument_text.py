"""The rule for argument values whose text does not show their type, as between Qwen's XML tags.

kinds of the schema      text
strings alone            the string as it is
strings and others       a value of another kind as JSON; a string as it is, or in quotes where the
                         bare text would be read as another value
no strings               JSON; also Python's True, False and None, which chat templates write

The grammar of calls (`structured/tools/xml_arguments.py`), their parser
(`structured/tools/parsing/whole_bodies.py`) and the history (`text/history/argument_texts.py`)
follow it. `SchemaGraph.kinds` returns the kinds of a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Literal

from services.gateway.schemas.graph import ROOT, SchemaGraph
from services.gateway.schemas.shapes import ALL_KINDS, Kind, Node, kind_of, members
from shared.errors import InvalidRequest

Kinds = frozenset[Kind | Literal["integer"]]  # "integer" instead of "number" excludes fractions
EVERYTHING: Kinds = frozenset(ALL_KINDS)
TEXT: Kinds = frozenset(("string",))
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_SPACES = " \t\r\n"  # JSON's whitespace: `strip()` removes more than `\s` of a grammar
_INTEGER = re.compile(r"(-?[0-9]+)\.0+")
# Expressions, without `^` and `$`, that match at least the texts that `read` reads as each kind.
READ_AS: dict[Kind | Literal["integer"], str] = {
    "string": r'\s*"(?s:.*)',
    "number": r"\s*-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?\s*",
    "integer": r"\s*-?[0-9]+(\.0+)?\s*",
    "boolean": r"\s*((?i:true)|(?i:false))\s*",
    "null": r"\s*((?i:null)|(?i:none))\s*",
    "array": r"\s*\[(?s:.*)",
    "object": r"\s*\{(?s:.*)",
}


def read(text: str, kinds: Kinds) -> Any:
    """Returns the value that a text stands for, or the text itself if the value has none of the
    kinds.
    """
    if kinds == TEXT:
        return text
    bare = text.strip(_SPACES)
    value = _WORDS.get(bare.lower(), text)
    if value is text:
        try:
            value = json.loads(bare, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return text
    if isinstance(value, float):
        return _number(value, bare, text, kinds)
    is_integer = kind_of(value) == "number" and "integer" in kinds
    return value if is_integer or kind_of(value) in kinds else text


def _number(value: float, bare: str, text: str, kinds: Kinds) -> Any:
    """Returns the number for digits with a point or an exponent. Returns the text if the kinds
    allow no such number, or integers and strings: `3.10` may then be a version.
    """
    found = _INTEGER.fullmatch(bare)
    if "integer" in kinds and found is not None:
        return int(found[1])
    if "integer" in kinds and "string" not in kinds and value.is_integer():
        return int(value)
    return value if "number" in kinds and isfinite(value) else text


def kinds_of(graph: SchemaGraph, node: Node) -> Kinds:
    """Returns the kinds of the node's values."""
    kinds = graph.kinds(node)
    numbers = [each for each in graph.alternatives(node) if "number" in each.kinds]
    if numbers and all(each.is_integer for each in numbers):
        return (kinds - {"number"}) | {"integer"}
    return frozenset(kinds)


def written(value: Any, kinds: Kinds) -> str:
    """Returns a text that `read` reads as the value."""
    if isinstance(value, str) and (kinds == TEXT or read(value, kinds) == value):
        return value
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


class ArgumentKinds:
    """The kinds of each argument of a tool, by name. Every kind is allowed if the schema is
    unreadable.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._named: dict[str, Kinds] = {}
        self._others: Kinds = frozenset()
        try:
            self._add(SchemaGraph(dict(parameters)))
        except (InvalidRequest, TypeError, AttributeError, KeyError, RecursionError):
            self._named, self._others = {}, EVERYTHING

    def __getitem__(self, name: str) -> Kinds:
        return self._named.get(name, self._others)

    def _add(self, graph: SchemaGraph) -> None:
        found: list[tuple[dict[str, Kinds], Kinds]] = []
        for shape in graph.alternatives(ROOT):
            named, _, others = members(graph.document, shape)
            kinds = {name: kinds_of(graph, node) for name, node in named.items()}
            found.append((kinds, EVERYTHING if others is None else kinds_of(graph, others)))
        self._others = _union(others for _, others in found) or EVERYTHING
        for name in {name for named, _ in found for name in named}:
            self._named[name] = _union(named.get(name, others) for named, others in found)


def _union(kinds: Iterable[Kinds]) -> Kinds:
    found: Kinds = frozenset[Kind | Literal["integer"]]().union(*kinds)
    return found - {"integer"} if "number" in found else found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
