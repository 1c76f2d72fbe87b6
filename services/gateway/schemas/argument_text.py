"""The one rule for values whose text does not show their type, as between Qwen's XML tags.

kinds of the schema      text
strings alone            the string as it is
strings and others       a value of another kind as JSON; a string as it is, or in quotes where the
                         bare text would be read as another value
no strings               JSON; also Python's True, False and None, which chat templates write

The grammar of calls (`tools/xml_arguments.py`), their parser (`tools/parsing/whole_bodies.py`) and
the history (`text/history/argument_texts.py`) follow it. A schema's kinds: `SchemaGraph.kinds`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.schemas.graph import ROOT, SchemaGraph
from services.gateway.schemas.shapes import ALL_KINDS, Kind, kind_of, members
from shared.errors import InvalidRequest

Kinds = frozenset[Kind]
TEXT: Kinds = frozenset(("string",))
_WORDS = {"true": True, "false": False, "none": None, "null": None}
# Bare texts that may be read as a value of a kind: a superset, as expressions without `^` and `$`.
READ_AS: dict[Kind, str] = {
    "string": r'\s*"(?s:.*)',
    "number": r"\s*[-0-9.eE+]+\s*",
    "boolean": r"\s*((?i:true)|(?i:false))\s*",
    "null": r"\s*((?i:null)|(?i:none))\s*",
    "array": r"\s*\[(?s:.*)",
    "object": r"\s*\{(?s:.*)",
}


def read(text: str, kinds: Kinds) -> Any:
    """The value of a text; the text where it has none of the kinds."""
    if kinds == TEXT:
        return text
    bare = text.strip()
    value = _WORDS.get(bare.lower(), text)
    if value is text:
        try:
            value = json.loads(bare, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return text
    return value if kind_of(value) in kinds else text


def written(value: Any, kinds: Kinds) -> str:
    """A text that `read` reads as the value."""
    if isinstance(value, str) and (kinds == TEXT or read(value, kinds) == value):
        return value
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


class ArgumentKinds:
    """The kinds of each argument of a tool. Without a schema that can be read: all."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._named: dict[str, Kinds] = {}
        self._others: Kinds = frozenset()
        try:
            self._add(SchemaGraph(dict(parameters)))
        except (InvalidRequest, TypeError, AttributeError, KeyError):
            self._named, self._others = {}, ALL_KINDS

    def __getitem__(self, name: str) -> Kinds:
        return self._named.get(name, self._others)

    def _add(self, graph: SchemaGraph) -> None:
        found: list[tuple[dict[str, Kinds], Kinds]] = []
        for shape in graph.alternatives(ROOT):
            named, _, others = members(graph.document, shape)
            kinds = {name: graph.kinds(node) for name, node in named.items()}
            found.append((kinds, ALL_KINDS if others is None else graph.kinds(others)))
        self._others = _union(others for _, others in found) or ALL_KINDS
        for name in {name for named, _ in found for name in named}:
            self._named[name] = _union(named.get(name, others) for named, others in found)


def _union(kinds: Iterable[Kinds]) -> Kinds:
    return frozenset().union(*kinds)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
