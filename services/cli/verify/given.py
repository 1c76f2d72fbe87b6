"""Reads what `hearth verify` is given: a receipt, keys, a prompt or an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.cli.options import read_given_file
from shared.errors import ConfigError
from shared.receipts.jws import JwkSet, PublicJwk, jwk_of, public_of
from shared.receipts.receipt import IssuedReceipt, decoded_bytes
from shared.receipts.salted import SALT_BYTES, ReceiptSalt
from shared.transport.wire_errors import UNREADABLE, one_line

MAX_ID_CHARS = 256
TokenList = list[list[int]]


class GivenReceipt(NamedTuple):
    """A JWS, and the salt and hash that came with it."""

    jws: str
    salt: str | None = None
    hash: str | None = None


def given_receipt(text: str) -> GivenReceipt | str:
    """Reads a JWS, a file with one, or a file with the gateway's reply. Returns anything else as
    the id of a request. Raises ConfigError.
    """
    if text.count(".") == 2 and not _is_file(text):
        return GivenReceipt(text.strip())
    if text != "-" and not _is_file(text):
        if "/" in text or len(text) > MAX_ID_CHARS:
            raise ConfigError(f"RECEIPT {text[:80]!r} is no file, no receipt and no request's id")
        return text
    data = read_given_file(Path(text), what="RECEIPT")
    if not data.lstrip().startswith(b"{"):
        return GivenReceipt(data.decode(errors="replace").strip())
    try:
        return _issued(msgspec.json.decode(data, type=IssuedReceipt))
    except UNREADABLE as error:
        raise ConfigError(f"RECEIPT {text} is no reply with a receipt: {one_line(error)}") from None


def _issued(found: IssuedReceipt) -> GivenReceipt:
    return GivenReceipt(found.receipt, found.salt, found.hash)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def given_salt(text: str) -> ReceiptSalt:
    """Raises ConfigError."""
    try:
        salt = decoded_bytes(text)
    except ValueError:
        salt = b""
    if len(salt) != SALT_BYTES:
        raise ConfigError(f"--salt {text[:64]!r} is not {SALT_BYTES} bytes in base64url")
    return ReceiptSalt(salt)


def given_keys(text: str) -> tuple[PublicJwk, ...]:
    """Reads a file with a JWK or a JWK Set, or the `x` of a key. Raises ConfigError."""
    if text != "-" and not _is_file(text):
        return (jwk_of(public_of(text), ""),)
    data = read_given_file(Path(text), what="--key")
    try:
        if b'"keys"' in data:
            keys = msgspec.json.decode(data, type=JwkSet).keys
        else:
            keys = (msgspec.json.decode(data, type=PublicJwk),)
    except UNREADABLE as error:
        raise ConfigError(f"--key {text} is no JWK and no JWK Set: {one_line(error)}") from None
    for each in keys:
        public_of(each.x)
    return keys


def given_json(path: Path, what: str) -> Any:
    """Raises ConfigError."""
    data = read_given_file(path, what=what)
    try:
        return msgspec.json.decode(data)
    except UNREADABLE as error:
        raise ConfigError(f"{what} {path} is no JSON: {one_line(error)}") from None


def token_lists(value: Any, what: str) -> TokenList:
    """Returns lists of token ids; a single list stands for itself. Raises ConfigError."""
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    try:
        return msgspec.convert(lists, TokenList)
    except msgspec.ValidationError:
        raise ConfigError(f"{what} must be token ids, as [1, 2] or [[1, 2], [3]]") from None
