"""Writes grammars for arguments between the tags of Qwen and of GLM, by the rule of
`schemas/argument_text.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from services.gateway.schemas.argument_text import READ_AS, TEXT, Kinds, kinds_of, read
from services.gateway.schemas.graph import ROOT, SchemaGraph
from services.gateway.schemas.shapes import Node, Shape, members
from services.gateway.structured.tools.lark import TokenIdOf, any_of, literal, marker
from services.gateway.structured.tools.typed_values import TypedValues
from shared.errors import InvalidRequest

_NUMBER_START = r"\s*[-0-9](?s:.*)"  # a bounded number is no terminal: text may extend it
_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_TAGS = re.compile("</(parameter|function|tool_call|arg_key|arg_value)>")


class Tags(NamedTuple):
    """Expressions of the text before and after a key, and after a value. `is_token` means that the
    last one begins with a token, which no text contains.
    """

    before_key: str
    after_key: str
    close: str
    is_token: bool = False

    def opening(self, key: str) -> str:
        """Returns the expression before the value of `key`, which is an expression."""
        return f"{self.before_key} {key} {self.after_key}"


def argument_tags(style: str, token_id_of: TokenIdOf) -> Tags | None:
    """Returns the tags of a style, or None if it has none."""
    match style:
        case "xml":
            return Tags('"<parameter="', literal(">\n"), literal("\n</parameter>\n"))
        case "glm":
            key, after, value, close = (
                marker(f"<{each}>", token_id_of)
                for each in ("arg_key", "/arg_key", "arg_value", "/arg_value")
            )
            is_token = token_id_of("</arg_value>") is not None
            end = f'{close} "\\n"' if is_token else literal("</arg_value>\n")
            return Tags(key, f'{after} "\\n" {value}', end, is_token)
    return None


def xml_arguments(graph: SchemaGraph, values: TypedValues, tags: Tags, param: str) -> str:
    """Returns an expression of the parameters in the schema's order. `param` is the tool's field,
    for errors.
    """
    shapes = [each for each in graph.alternatives(ROOT) if graph.has_value(each)]
    return any_of(_Elements(graph, values, tags, param).of(each) for each in shapes)


class _Elements:
    def __init__(self, graph: SchemaGraph, values: TypedValues, tags: Tags, param: str) -> None:
        self._graph = graph
        self._tags = tags
        self._values = values
        self._param = param

    def of(self, shape: Shape) -> str:
        named, required, others = members(self._graph.document, shape)
        elements = []
        for key, node in named.items():
            if self._graph.is_finite(node):
                kinds = kinds_of(self._graph, node)
                opening = self._tags.opening(literal(key))
                rule = self._values.rule(f"{opening} {self._value(node, kinds)}")
                elements.append(rule if key in required else f"{rule}?")
        extra: Node | None = () if others is None and not named else others
        if extra is not None and self._graph.is_finite(extra):
            refused = f" & ~/({'|'.join(map(re.escape, named))})/" if named else ""
            key = self._values.terminal(f"{_KEY}{refused}")
            value = self._value(extra, kinds_of(self._graph, extra))
            rule = self._values.rule(f"{self._tags.opening(key)} {value}")
            elements.append(f"{rule}*")
        return " ".join(elements) or literal("")

    def _value(self, node: Node, kinds: Kinds) -> str:
        texts = list(self._texts(node, kinds))
        if kinds != TEXT:
            for shape in self._values.shapes(node):
                close, is_token = self._tags.close, self._tags.is_token
                texts += self._values.closed(shape, close, is_token=is_token)
        return any_of(texts)

    def _texts(self, node: Node, kinds: Kinds) -> Iterator[str]:
        """Yields expressions of strings as they are, if they are not read as another value."""
        expressions = [READ_AS[kind] for kind in sorted(kinds)]
        shapes = self._graph.alternatives(node)
        if any("number" in each.written and each.bounds for each in shapes):
            expressions.append(_NUMBER_START)
        refused = "|".join(expressions)
        for shape in shapes:
            if shape.literals is not None:
                strings = (each for each in shape.literals if isinstance(each, str))
                yield from (
                    f"({literal(each)} {self._tags.close})"
                    for each in strings
                    if self._is_bare(each, kinds)
                )
            elif "string" in shape.written and self._graph.has_value(shape):
                others = [] if kinds == TEXT else [f"~/{refused}/"]
                close, is_token = self._tags.close, self._tags.is_token
                yield self._values.text(shape, close, is_token=is_token, other_parts=others)

    def _is_bare(self, text: str, kinds: Kinds) -> bool:
        if not _TAGS.search(text):
            return read(text, kinds) == text
        if kinds == TEXT:
            raise InvalidRequest(
                f"{self._param}: this model's calls cannot hold the text {text[:64]!r}",
                param=self._param,
            )
        return False
