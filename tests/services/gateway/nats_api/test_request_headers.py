from __future__ import annotations

import pytest

from services.gateway.nats_api.request_headers import (
    MAX_HEADER_BYTES,
    NO_HEADERS,
    RequestHeaders,
    decode_headers,
)
from shared.errors import InvalidRequest, PayloadTooLarge
from tests.support.grids import in_one_test

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def encoded(*lines: str) -> bytes:
    return "\r\n".join(["NATS/1.0", *lines, "", ""]).encode()


def test_known_headers_are_read_in_any_case() -> None:
    headers = decode_headers(
        encoded(
            "hearth-deadline-s: 2.5",
            "HEARTH-AFFINITY:  session 1 ",
            "Hearth-Checks: True",
            f"traceparent: {TRACE}",
            "Nats-Expected-Stream: s",
            "no colon",
        )
    )
    assert headers == RequestHeaders(2.5, "session 1", has_checks=True, traceparent=TRACE)
    assert decode_headers(b"") == decode_headers(encoded()) == NO_HEADERS
    assert decode_headers(encoded("Hearth-Checks: no", "traceparent: 00-zz")) == NO_HEADERS


@in_one_test("text", ["nan", "NaN", "inf", "-inf", "-1", "0", "-0.0", "1e999", "1 s", "", "0x1"])
def test_deadline_is_a_positive_number(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Hearth-Deadline-S must be a number") as caught:
        decode_headers(encoded(f"Hearth-Deadline-S: {text}"))
    assert caught.value.param == "Hearth-Deadline-S"


def test_size_is_bounded() -> None:
    longest = encoded("A: ")
    decode_headers(encoded("A: " + "x" * (MAX_HEADER_BYTES - len(longest))))
    with pytest.raises(PayloadTooLarge, match="the limit is 8192"):
        decode_headers(encoded("A: " + "x" * (MAX_HEADER_BYTES - len(longest) + 1)))


@pytest.mark.parametrize("data", [b"NATS/1.0\r\nA: \xff\r\n\r\n", b"x", b"HTTP/1.1\r\n\r\n", b"\0"])
def test_malformed_headers_are_rejected(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_headers(data)
