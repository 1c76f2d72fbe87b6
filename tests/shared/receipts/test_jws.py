"""Receipts as JWS: the vectors of the RFCs, and that no change of a text goes unnoticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.receipts.jws import ParsedJws, parsed_jws, signed_jws, thumbprint
from shared.receipts.receipt import decoded_bytes, encoded_bytes
from shared.tenancy.tenant_copy import SigningKey

KEY = SigningKey.of_secret("of a")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."
TEXT = signed_jws(b'{"a": 1}', KEY.public, KEY.sign_jws)

# RFC 8037, appendix A
X = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
JWS = (
    "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc."
    "hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg"
)


def test_vectors_of_rfc_8037() -> None:
    public = decoded_bytes(X)
    assert thumbprint(public) == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
    head, _, signature = JWS.rpartition(".")
    payload = decoded_bytes(head.partition(".")[2])
    parsed = ParsedJws(
        kid="", payload=payload, signed=head.encode(), signature=decoded_bytes(signature)
    )
    assert payload == b"Example of Ed25519 signing"
    assert parsed.is_signed_by(public)
    assert not parsed.is_signed_by(KEY.public)


@given(st.binary())
def test_signed_payload_is_read_back(payload: bytes) -> None:
    text = signed_jws(payload, KEY.public, KEY.sign_jws)
    found = parsed_jws(text)
    assert (found.payload, found.kid) == (payload, thumbprint(KEY.public))
    assert found.is_signed_by(KEY.public)
    assert text == signed_jws(payload, KEY.public, KEY.sign_jws), "read twice, it is one text"


@given(st.integers(0, len(TEXT) - 1), st.sampled_from(ALPHABET))
def test_every_changed_character_is_found(place: int, character: str) -> None:
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    if changed == TEXT:
        return
    try:
        found = parsed_jws(changed)
    except ConfigError:
        return
    assert not found.is_signed_by(KEY.public)


@given(st.binary())
def test_base64url_has_one_spelling(data: bytes) -> None:
    text = encoded_bytes(data)
    assert decoded_bytes(text) == data
    for other in (f"{text}=", f" {text}", f"{text}\n", text + "+"):
        with pytest.raises(ValueError, match="base64"):
            decoded_bytes(other)


@pytest.mark.parametrize(
    "text", ["", "a.b", "a.b.c.d", "é.b.c", f"{encoded_bytes(b'{}')}.b.c", JWS]
)
def test_other_texts_are_rejected_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed_jws(text)
    assert "receipt" in caught.value.message
