"""A JSON Schema as a document: its schemas by JSON pointer, and references between them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from shared.errors import InvalidRequest

Pointer = str


class SchemaDocument:
    def __init__(self, root: Any) -> None:
        self.root = root
        self._known: dict[Pointer, Any] = {"": root}

    def schema(self, pointer: Pointer) -> dict[str, Any] | bool:
        """Returns the schema at a pointer that `child` or `target` returned. Raises InvalidRequest
        if the value there is not a schema.
        """
        found = self._known[pointer]
        if not isinstance(found, dict | bool):
            raise InvalidRequest(f"the value at {pointer or '/'} is no JSON Schema")
        return found

    def child(self, pointer: Pointer, *keys: str | int) -> Pointer:
        found, place = self._known[pointer], pointer
        for key in keys:
            found, place = found[key], f"{place}/{escaped(str(key))}"
        self._known[place] = found
        return place

    def target(self, reference: Any) -> Pointer | None:
        """Returns the pointer that a `$ref` refers to, or None if it is not in this document."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found, pointer = self.root, unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return None
        for part in pointer.split("/")[1:]:
            key: Any = part.replace("~1", "/").replace("~0", "~")
            key = int(key) if isinstance(found, list) and key.isdecimal() else key
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        self._known[pointer] = found
        return pointer


def escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
