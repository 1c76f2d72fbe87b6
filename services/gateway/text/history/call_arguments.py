"""Converts the arguments of an earlier call for templates that expect a mapping, and for those that
expect JSON text.
"""

from __future__ import annotations

from typing import Any


class CallArguments(dict[str, Any]):
    """A mapping that templates may also write or join to a text, as the JSON that the model wrote:
    so a repeated call has the tokens of the first one, which a cache may hold.

    So a repeated call has the tokens of the first one, which a cache may hold.
    """

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, after: str) -> str:
        return self._text + after

    def __radd__(self, before: str) -> str:
        return before + self._text
