"""Says where in a schema the keyword of a message of llguidance stands."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from services.gateway.grammars.grammar import Grammar
from services.gateway.grammars.json_pointers import pointers

_LIST = re.compile(r"Unimplemented keys: (?P<names>\[.*\])")
_VALUE = re.compile(r"(?:Unknown|Invalid) (?P<name>format|type)\b")
_FIRST = re.compile(r"(?:Unsatisfiable schema: )?(?P<name>\$?[a-z]+[A-Z]?[A-Za-z]*) ")


def located(message: str, grammar: Grammar) -> str:
    """The message with the JSON pointers of the keywords that it names."""
    if grammar.kind != "json_schema":
        return message
    schema = msgspec.json.decode(grammar.source)
    places = [place for name in _keywords(message) for place in pointers(schema, name)]
    return f"{message} at {', '.join(places)}" if places else message


def _keywords(message: str) -> Iterator[str]:
    listed = _LIST.search(message)
    if listed is not None:
        yield from msgspec.json.decode(listed["names"], type=list[str])
        return
    found = _VALUE.search(message) or _FIRST.match(message)
    if found is not None:
        yield found["name"]
