"""Fields of a body that no struct has: named in a warning, refused, or ignored without a word."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.request.supported_fields import (
    IGNORED,
    MAX_NAME_CHARS,
    MAX_NAMED_BYTES,
    MAX_WARNINGS,
    SupportedFields,
)
from shared.errors import InvalidRequest


class Body(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int | None = None
    hearth_own: int | None = None


FIELDS = SupportedFields(
    Body, {"audio": (None,), "modalities": (None, ["text"]), "image": (None,)}, frozenset({"user"})
)


def warnings(given: dict[str, Any]) -> tuple[str, ...]:
    return FIELDS.warnings(FIELDS.decode(msgspec.json.encode(given)))


def test_typo_is_named_with_what_was_meant() -> None:
    assert warnings({"max_token": 1}) == (
        "max_token is unknown here and was ignored: did you mean max_tokens?",
    )
    assert warnings({"zzz": 1}) == ("zzz is unknown here and was ignored",)


def test_known_fields_give_no_warning_and_no_other_type() -> None:
    body = FIELDS.decode(b'{"max_tokens": 1, "user": "u", "audio": null, "modalities": ["text"]}')
    assert body == Body(max_tokens=1)
    assert FIELDS.warnings(body) == ()


def test_body_keeps_its_fields_and_the_names_when_it_is_encoded_again() -> None:
    body = FIELDS.decode(b'{"max_tokens": 1, "max_token": 2}')
    assert (body.max_tokens, isinstance(body, Body)) == (1, True)
    again = FIELDS.decode(msgspec.json.encode(body))
    assert FIELDS.warnings(again) == FIELDS.warnings(body) != ()


def test_warnings_are_bounded() -> None:
    given = warnings({f"{index}{'a' * 999}": 1 for index in range(99)})
    assert len(given) == MAX_WARNINGS
    assert all(len(each) < MAX_NAME_CHARS + 64 for each in given)
    assert len(warnings({IGNORED: ["a" * 999] * 99})) == MAX_WARNINGS
    assert warnings({IGNORED: 3}) == ()


def test_names_of_a_large_body_are_not_collected() -> None:
    large = {"zzz": "a" * MAX_NAMED_BYTES}
    assert warnings(large) == ()
    with pytest.raises(InvalidRequest, match="audio is not supported"):
        warnings({**large, "audio": 1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("audio", "audio is not supported"),
        ("modalities", 'modalities is not supported, except as ["text"]'),
        ("image", "image: send images as parts of messages"),
    ],
)
def test_refusal_says_what_is_supported(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FIELDS.decode(msgspec.json.encode({name: ["x"]}))
    assert (caught.value.message, caught.value.param) == (message, name)
