"""What a request says of its receipt, over HTTP or NATS."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import InvalidRequest
from shared.receipts.receipt import decoded_bytes
from shared.receipts.salted import SALT_BYTES

RECEIPT, REPLAY = "x-hearth-receipt", "x-hearth-replay"
RECEIPT_URL = "x-hearth-receipt-url"
NUM_SEEDS = 2**64
_REPLAY = re.compile(r"seed=(\d{1,20}); ?salt=([A-Za-z0-9_-]{22})")
_CHOICES = {"on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Replayed:
    """Seed and salt of the receipt whose response is computed again."""

    seed: int
    salt: bytes


@dataclass(frozen=True, slots=True)
class ReceiptOptions:
    """`is_wanted`: None means that the tenant's retention decides."""

    is_wanted: bool | None = None
    replayed: Replayed | None = None


NO_OPTIONS = ReceiptOptions()


def receipt_options(receipt: str | None, replay: str | None) -> ReceiptOptions:
    """Reads the two headers. Raises InvalidRequest."""
    if receipt is None and replay is None:
        return NO_OPTIONS
    is_wanted = None if receipt is None else _CHOICES.get(receipt.strip().lower())
    if receipt is not None and is_wanted is None:
        raise InvalidRequest(f"{RECEIPT} must be on or off", param=RECEIPT)
    return ReceiptOptions(is_wanted, None if replay is None else _replayed(replay))


def _replayed(text: str) -> Replayed:
    found = _REPLAY.fullmatch(text.strip())
    if found is None or int(found[1]) >= NUM_SEEDS:
        raise InvalidRequest(f"{REPLAY} must be `seed=U64; salt=SALT` of a receipt", param=REPLAY)
    try:
        salt = decoded_bytes(found[2])
    except ValueError:
        salt = b""
    if len(salt) != SALT_BYTES:
        raise InvalidRequest(f"{REPLAY}: the salt must have {SALT_BYTES} bytes", param=REPLAY)
    return Replayed(int(found[1]), salt)
