"""Rules of a Lark grammar as trees, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder

_START = re.compile(r"(?m)^(?:%\w+|[?!]?[A-Za-z_]\w*\s*(?:\[[^\]\n]*\])?\s*:)")
_RULE = re.compile(
    r"(?P<head>[?!]?(?P<name>[a-z_]\w*)\s*(?P<attributes>\[[^\]\n]*\])?\s*:)"
    r"(?P<body>.*)",
    re.DOTALL,
)
_TOKEN = re.compile(
    r"""(?P<space>\s+|(?://|\#)[^\n]*)
    |(?P<atom>"(?:\\.|[^"\\\n])*"i?(?:\s*\.\.\s*"(?:\\.|[^"\\\n])*")?
        |/(?:\\.|[^/\\\n])+/[a-z]*|@?[A-Za-z_][\w-]*|<[^>\n]*>)
    |(?P<json>%(?:json|regex)\s*(?={))
    |(?P<operator>[?*+]|\{\d*,?\d*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<bracket>[()|])
    """,
    re.VERBOSE,
)
_JSON = JSONDecoder()


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a rule. `operator` is the repetition, or empty. `atom` is a text, or the
    alternatives of a group. `size` is the most characters that it is written with, many of few
    objects where groups are shared. `depth` counts groups within each other.
    """

    atom: str | Alternatives
    operator: str = ""
    size: int = field(init=False, compare=False)
    depth: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        inner = () if isinstance(self.atom, str) else self.atom
        object.__setattr__(self, "size", _size(self.atom, self.operator))
        object.__setattr__(self, "depth", 1 + depth_of(inner) if inner else 0)


Items = tuple[Item, ...]
Alternatives = tuple[Items, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of a grammar.

    `name` is None if it is no rule; `alternatives` is None for a rule that this module cannot read.
    If it `has_attributes`, it has for example a name to capture the rule's text under.
    """

    text: str
    name: str | None = None
    head: str = ""
    has_attributes: bool = False
    alternatives: Alternatives | None = None

    def with_body(self, alternatives: Alternatives) -> Rule:
        text = f"{self.head} {_of_alternatives(alternatives)}\n"
        return Rule(text, self.name, self.head, self.has_attributes, alternatives)


def size_of(items: Items) -> int:
    return sum(each.size for each in items)


def _size(atom: str | Alternatives, operator: str) -> int:
    inner = len(atom) if isinstance(atom, str) else 3 + sum(size_of(each) + 3 for each in atom)
    return inner + len(operator) + 1


def depth_of(alternatives: Alternatives) -> int:
    return max((each.depth for items in alternatives for each in items), default=0)


def rules_of(source: str) -> list[Rule]:
    """Returns all of the source, in its order."""
    starts = [found.start() for found in _START.finditer(source)]
    ends = [*starts, len(source)]
    return [_rule(source[start:end]) for start, end in zip([0, *starts], ends, strict=True)]


def _rule(text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None:
        return Rule(text)
    has_attributes = found["attributes"] is not None
    return Rule(text, found["name"], found["head"], has_attributes, _parsed(found["body"]))


def _parsed(body: str) -> Alternatives | None:
    """Parses a body. Returns None for one with anything that is not known here."""
    groups: list[list[list[Item]]] = [[[]]]  # open ones, the innermost last
    for kind, token in _tokens(body):
        items = groups[-1][-1]
        if kind in ("atom", "json"):
            items.append(Item(token))
        elif kind == "operator" and items and not items[-1].operator:
            items[-1] = Item(items[-1].atom, token)
        elif token == "|":
            groups[-1].append([])
        elif token == "(":
            groups.append([[]])
        elif token == ")" and len(groups) > 1:
            closed = _frozen(groups.pop())
            groups[-1][-1].append(Item(closed))
        else:
            return None
    return _frozen(groups[0]) if len(groups) == 1 else None


def _tokens(body: str) -> Iterator[tuple[str, str]]:
    """Returns the kinds and texts of tokens; the kind is empty for what is none, which is the
    last.
    """
    place = 0
    while place < len(body):
        token = _TOKEN.match(body, place)
        if token is None or token.lastgroup is None:
            yield "", ""
            return
        begin, place = place, token.end()
        if token.lastgroup == "json":
            try:
                _, place = _JSON.raw_decode(body, place)
            except JSONDecodeError:
                yield "", ""
                return
        if token.lastgroup != "space":
            yield token.lastgroup, body[begin:place]


def _frozen(group: Sequence[Sequence[Item]]) -> Alternatives:
    return tuple(map(tuple, group))


def _of_alternatives(alternatives: Alternatives) -> str:
    """Formats alternatives in Lark, where an empty alternative stands at the end alone."""
    texts = [" ".join(map(_of_item, each)) for each in alternatives]
    full = [each for each in dict.fromkeys(texts) if each]
    return " | ".join(full) if len(full) == len(set(texts)) else _optional(full)


def _optional(texts: list[str]) -> str:
    return f"({' | '.join(texts)})?" if texts else '""'


def _of_item(item: Item) -> str:
    if isinstance(item.atom, str):
        return item.atom + item.operator
    inner = _of_alternatives(item.atom)
    is_plain = len(item.atom) == 1 and not item.operator
    return inner if is_plain else f"({inner}){item.operator}"
