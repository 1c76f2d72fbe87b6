"""Decodes bodies with texts to tokenize, and names the field of an invalid text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from services.gateway.request.supported_fields import HARMLESS_FIELDS, SupportedFields
from shared.errors import InvalidRequest


class TextFields(SupportedFields):
    """Fields whose errors also name the field of text that is not valid Unicode, which no JSON
    decoder locates.
    """

    def __init__(
        self,
        struct: type[Any],
        neutral_values: Mapping[str, tuple[Any, ...]],
        harmless: frozenset[str] = HARMLESS_FIELDS,
        *,
        leave_out: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(struct, neutral_values, harmless, leave_out=leave_out)
        self._texts = {*struct.__struct_fields__, *neutral_values}

    def decode(self, data: bytes | msgspec.Raw) -> Any:
        try:
            return super().decode(data)
        except InvalidRequest as error:
            field = None if error.param else self._field_of_invalid_text(bytes(data))
            if field is None:
                raise
            message = f"{field}: the text has a lone surrogate, or a byte that is not UTF-8"
            raise InvalidRequest(message, param=field) from error

    def _field_of_invalid_text(self, data: bytes) -> str | None:
        """Returns the field, found by Python's decoder, which accepts such text but is slower."""
        try:
            body = json.loads(data.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            return None
        fields = body if isinstance(body, dict) else {}
        return next(
            (name for name in self._texts & fields.keys() if _is_invalid(fields[name])), None
        )


def _is_invalid(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
