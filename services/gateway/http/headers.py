"""Reads the headers of a request in ASGI's form."""

from __future__ import annotations

from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]


def header_of(headers: Headers, name: bytes) -> str | None:
    """Returns the first value of a header, or None. `name` must be in lower case."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def authorization_of(headers: Headers) -> str | None:
    """Returns the Authorization header, or one made from `x-api-key`. Anthropic's clients send the
    key there, perhaps beside an empty Authorization header or a proxy's.
    """
    header, api_key = header_of(headers, b"authorization"), header_of(headers, b"x-api-key")
    scheme, _, token = (header or "").partition(" ")
    is_bearer = scheme.lower() == "bearer" and token.strip()
    return header if is_bearer or not api_key else f"Bearer {api_key}"
