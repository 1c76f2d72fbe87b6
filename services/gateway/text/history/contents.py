"""The content of a message: a text, or a list of texts and of the places of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Content = str | list[Mapping[str, Any]]


def joined(first: Content, second: Content, separator: str = "\n") -> Content:
    """Returns both contents with the separator between their texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{separator}{second}"
    return [*_parts(first), *_parts(separator), *_parts(second)]


def enclosed(before: str, content: Content, after: str) -> Content:
    """Returns the content with a text before and after it."""
    return joined(joined(before, content, ""), after, "")


def num_chars(content: Content) -> int:
    return sum(len(each) for each in texts_of(content))


def texts_of(content: Content) -> list[str]:
    """Returns the texts of a content, without the places of its images."""
    if isinstance(content, str):
        return [content]
    return [each["text"] for each in content if each["type"] == "text"]


def _parts(content: Content) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content
