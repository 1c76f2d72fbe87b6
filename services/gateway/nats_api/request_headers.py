"""The headers of a request over NATS."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from services.gateway.receipts.options import NO_OPTIONS, ReceiptOptions, receipt_options
from shared.errors import InvalidRequest, PayloadTooLarge

MAX_HEADER_BYTES = 8 * 1024
DEADLINE, AFFINITY, CHECKS = "Hearth-Deadline-S", "Hearth-Affinity", "Hearth-Checks"
RECEIPT, REPLAY = "Hearth-Receipt", "Hearth-Replay"
TRACE = "traceparent"
_FIRST_LINE = "NATS/1.0"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The decoded headers of a request. `has_checks` means that the client answers checks also
    before a response that is not streamed. `traceparent` is the W3C trace context, for logs.
    """

    deadline_s: float | None = None
    affinity_key: str = ""
    has_checks: bool = False
    traceparent: str = ""
    receipt: ReceiptOptions = NO_OPTIONS


NO_HEADERS = RequestHeaders()


def decode_headers(encoded: bytes) -> RequestHeaders:
    """Returns the known headers and ignores others. Raises InvalidRequest and PayloadTooLarge."""
    if not encoded:
        return NO_HEADERS
    if len(encoded) > MAX_HEADER_BYTES:
        raise PayloadTooLarge(
            f"the headers have {len(encoded)} bytes; the limit is {MAX_HEADER_BYTES}"
        )
    fields = _fields(encoded)
    trace = fields.get(TRACE, "")
    return RequestHeaders(
        deadline_s=_deadline_s(fields.get(DEADLINE.lower())),
        affinity_key=fields.get(AFFINITY.lower(), ""),
        has_checks=fields.get(CHECKS.lower(), "").lower() == "true",
        traceparent=trace if _TRACEPARENT.fullmatch(trace) else "",
        receipt=receipt_options(fields.get(RECEIPT.lower()), fields.get(REPLAY.lower())),
    )


def _fields(encoded: bytes) -> dict[str, str]:
    """Returns header values by lower-case name; the last value of a name wins. Raises
    InvalidRequest.
    """
    try:
        first, *lines = encoded.decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("the headers are not UTF-8") from error
    if not first.startswith(_FIRST_LINE):
        raise InvalidRequest(f"the headers do not start with {_FIRST_LINE}")
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): text.strip() for name, _, text in pairs}


def _deadline_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        deadline_s = float(text)
    except ValueError:
        deadline_s = math.nan
    if not 0 < deadline_s < math.inf:
        raise InvalidRequest(f"{DEADLINE} must be a number of seconds above 0", param=DEADLINE)
    return deadline_s
