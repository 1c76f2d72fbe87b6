"""Writes right-recursive rules of Lark with a repetition, which means the same.

x: a x | b x | c      ──▶   x: (a | b)* (c)
x: a ("," x)?         ──▶   x: (a ",")* (a)

The parser retains all open repetitions of a right-recursive rule: each token takes longer than the
one before, and after 2,000 of them the output ends. A rule that this module does not read, or that
is recursive through other rules, stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_START = re.compile(r"(?m)^(?:%\w+|[?!]?[A-Za-z_]\w*(?:\.-?\d+)?\s*(?:\[[^\]\n]*\])?\s*:)")
_RULE = re.compile(r"(?P<name>[a-z_]\w*)\s*:(?P<body>.*)", re.DOTALL)
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|[A-Za-z_]\w*|<[^>\n]*>|[()|?*+]|\{\d+(?:,\d*)?\}
    """,
    re.VERBOSE,
)
Tokens = list[str]


def without_right_recursion(source: str) -> str:
    """The grammar, equal in its outputs."""
    starts = [found.start() for found in _START.finditer(source)]
    if not starts:
        return source
    ends = [*starts[1:], len(source)]
    rules = (source[start:end] for start, end in zip(starts, ends, strict=True))
    return source[: starts[0]] + "".join(map(_rewritten, rules))


def _rewritten(rule: str) -> str:
    found = _RULE.fullmatch(rule)
    tokens = None if found is None else _tokens(found["body"])
    if found is None or tokens is None:
        return rule
    name, repeated, last = found["name"], list[Tokens](), list[Tokens]()
    for alternative in _alternatives(tokens):
        before, stops = _before_recursion(alternative, name)
        if before is not None:
            repeated.append(before)
        last += stops
    if not repeated or not last or any(not each or each[0] == name for each in repeated):
        return rule
    end = "" if last == [[]] else _any_of(last) + ("?" if [] in last else "")
    return f"{name}: {_any_of(repeated)}* {end}\n"


def _before_recursion(alternative: Tokens, name: str) -> tuple[Tokens | None, list[Tokens]]:
    """What stands before the recursion at its end, if there is one, and the alternatives without
    the recursion.
    """
    match alternative:
        case [*before, last] if last == name:
            return before, []
        case [*before, last, "?"] if last == name:
            return before, [before]
    is_optional = alternative[-1:] == ["?"]
    closed = alternative[:-1] if is_optional else alternative
    opening = _opening(closed)
    if opening is None or closed[-2] != name:
        return None, [alternative]
    before, inner = closed[:opening], closed[opening + 1 : -2]
    if len(list(_alternatives(inner))) > 1:
        return None, [alternative]
    return [*before, *inner], [before] if is_optional else []


def _opening(tokens: Tokens) -> int | None:
    """Where the group begins that ends with the tokens."""
    if tokens[-1:] != [")"] or len(tokens) < 3:
        return None
    depth = 0
    for index in range(len(tokens) - 1, -1, -1):
        depth += (tokens[index] == ")") - (tokens[index] == "(")
        if not depth:
            return index
    return None


def _alternatives(tokens: Sequence[str]) -> Iterator[Tokens]:
    depth, found = 0, Tokens()
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            yield found
            found = []
        else:
            found.append(token)
    yield found


def _any_of(alternatives: Sequence[Tokens]) -> str:
    return f"({' | '.join(' '.join(each) for each in alternatives if each)})"


def _tokens(body: str) -> Tokens | None:
    """None for a body that has anything else."""
    found, place = Tokens(), 0
    while place < len(body):
        token = _TOKEN.match(body, place)
        if token is None:
            return None
        if token["space"] is None:
            found.append(token[0])
        place = token.end()
    return found
