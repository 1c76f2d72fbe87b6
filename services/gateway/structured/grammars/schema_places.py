"""Rewrites llguidance's messages about a schema in JSON Schema's terms, with the
keywords' places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from services.gateway.structured.grammars.grammar import Grammar
from services.gateway.structured.grammars.json_pointers import pointers

_INVALID = "invalid grammar: "  # the prefix of an error's message
_LIST = re.compile(r"Unimplemented keys: (?P<names>\[.*\])")
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(message, re.DOTALL), words)
    for message, words in (
        (r"Unimplemented keys: \[(.*)\]", r"not enforced: \1"),
        (r"oneOf constraints are not supported.*", "oneOf: a value may match two of its branches"),
        (r"oneOf not fully supported.*", "oneOf: not enforced that a value matches one alone"),
        (r"regex parse error:.*error: (.*)", r"pattern: invalid: \1"),
        (r"(?:Unsatisfiable schema: )?Regex is empty.*", "pattern: no text matches it with others"),
        (r"(lookarounds not supported.*)", r"pattern: \1"),
        (r"Unknown format: (.*)", r"format: \1 is unknown and not enforced"),
        (r"Invalid type: (.*)", r"type: \1 is unknown"),
        (r"(Pointer|Resource) ('[^']*') .*", r"$ref: there is no \2"),
        (r"invalid multiple of", "multipleOf: must be more than 0"),
        (r"Expected (.*) for '(\w+)', got (.*)", r"\2: must be of the type \1, not \3"),
        (r"Unsatisfiable schema: (.*)", r"\1: no value matches"),
    )
)
_FIRST = re.compile(r"(?P<name>\$?[a-zA-Z]+)(?::| )")


def located(message: str, grammar: Grammar) -> str:
    """Returns the message with the JSON pointers of the keywords that it names."""
    if grammar.kind != "json_schema":
        return message
    text = message.removeprefix(_INVALID)
    before = message[: len(message) - len(text)]
    shown = next((found.expand(words) for found, words in _matches(text)), text)
    schema = msgspec.json.decode(grammar.source)
    places = [place for name in _keywords(text, shown) for place in pointers(schema, name)]
    said = " at " in shown  # `enforceable` has written the message
    return f"{before}{shown}" if said or not places else f"{before}{shown} at {', '.join(places)}"


def _matches(message: str) -> Iterator[tuple[re.Match[str], str]]:
    for pattern, words in _WORDS:
        found = pattern.fullmatch(message)
        if found is not None:
            yield found, words


def _keywords(message: str, shown: str) -> Iterator[str]:
    listed = _LIST.search(message)
    if listed is not None:
        yield from msgspec.json.decode(listed["names"], type=list[str])
        return
    found = _FIRST.match(shown)
    if found is not None:
        yield found["name"]
