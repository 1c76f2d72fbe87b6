"""Decodes request bodies: strict types, and an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import InvalidRequest, PayloadTooLarge

MAX_NEUTRAL_BYTES = 256  # of a neutral value, with the spaces that a client writes

# msgspec appends the path to a message that may repeat text of the client.
_AT = " - at "
_PATH = re.compile(r"(?:`key` in )?`\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])?`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")


class SupportedFields:
    """Decodes `struct`; rejects by name a field of `neutral_values` with any other value."""

    def __init__(self, struct: type[Any], neutral_values: Mapping[str, tuple[Any, ...]]) -> None:
        self._neutral_values = neutral_values
        self._decoder = msgspec.json.Decoder(struct)
        # Decodes the same bytes again and skips all other fields, and the content of these: only
        # a value that is short enough to be a neutral one is read.
        optional = [(name, msgspec.Raw, msgspec.UNSET) for name in neutral_values]
        self._others = msgspec.json.Decoder(msgspec.defstruct("Others", optional))

    def decode(self, data: bytes | msgspec.Raw) -> Any:
        """Raises InvalidRequest, with `param` set if one field is invalid."""
        try:
            body = self._decoder.decode(data)
            others = self._others.decode(data)
        except msgspec.ValidationError as error:
            raise _invalid_field(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        for name, neutral in self._neutral_values.items():
            raw = getattr(others, name)
            if raw is not msgspec.UNSET and not _is_one_of(raw, neutral):
                raise InvalidRequest(f"{name} is not supported with this value", param=name)
        return body


def check_count(param: str, count: int, limit: int) -> None:
    """Raises PayloadTooLarge."""
    if count > limit:
        raise PayloadTooLarge(f"{param}: {count} are more than the limit of {limit}", param=param)


def _is_one_of(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    """Compares booleans and numbers as different: False is not 0."""
    if len(memoryview(raw)) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


def _invalid_field(message: str) -> InvalidRequest:
    head, _, end = message.rpartition(_AT)
    place = _PATH.fullmatch(end)
    text, path = (message, "") if place is None else (head, place["path"])
    missing = _MISSING.fullmatch(text)
    if missing is not None:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    return InvalidRequest(f"{path}: {text}" if path else text, param=path or None)
