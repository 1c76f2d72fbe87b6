from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv_wire.frames import (
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_RECORD_BYTES,
    PREFIX,
    VERSION,
    Ack,
    Frame,
    Goodbye,
    Hello,
    ProtocolError,
    Refusal,
    Welcome,
    closing_record,
    decode_prefix,
    decode_record,
    encode_record,
    fault_of,
)
from tests.shared.kv_wire.support import header

RECORDS = [
    Hello(b"me"),
    Welcome(b"me", 4, 8 << 20),
    Goodbye("no"),
    Frame(7, header(100)),
    Frame(2**40, header(100), 3),
    Ack(1),
    Refusal(2, "why"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_round_trip(record: msgspec.Struct) -> None:
    data = encode_record(record)  # type: ignore[arg-type]
    assert decode_prefix(data[: PREFIX.size]) == len(data) - PREFIX.size
    assert decode_record(data[PREFIX.size :]) == record


@given(st.binary(max_size=200))
def test_garbage_raises_only_protocol_errors(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_record(data)
    if len(data) >= PREFIX.size:
        with contextlib.suppress(ProtocolError):
            decode_prefix(data[: PREFIX.size])


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (PREFIX.pack(b"HTTP", VERSION, 10), "not a KV data plane peer"),
        (PREFIX.pack(MAGIC, VERSION + 1, 10), f"version {VERSION + 1}"),
        (PREFIX.pack(MAGIC, VERSION, 0), "a record of 0 bytes"),
        (PREFIX.pack(MAGIC, VERSION, MAX_RECORD_BYTES + 1), "a record of 65537 bytes"),
    ],
)
def test_error_states_fault_of_prefix(prefix: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_prefix(prefix)


def test_encoded_records_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        encode_record(Goodbye("x" * (MAX_RECORD_BYTES + 1)))
    assert len(closing_record("x" * (MAX_RECORD_BYTES + 1))) < MAX_RECORD_BYTES


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"payload_bytes": MAX_FRAME_BYTES}, None),
        ({"payload_bytes": MAX_FRAME_BYTES + 1}, "payload"),
        ({"payload_bytes": 0}, "payload"),
        ({"placement_id": b""}, "placement_id"),
        ({"placement_id": b"x" * 65}, "placement_id"),
        ({"first_token": -1}, "ranges"),
        ({"num_tokens": 0}, "ranges"),
        ({"num_cached_tokens": -1}, "ranges"),
    ],
)
def test_fault_of_invalid_header(change: dict[str, object], fault: str | None) -> None:
    found = fault_of(msgspec.structs.replace(header(100), **change))
    assert found is None if fault is None else fault in str(found)
