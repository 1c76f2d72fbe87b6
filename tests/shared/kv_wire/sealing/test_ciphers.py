"""Sealing of records and payloads: round trips, and the refusal of anything else."""

from __future__ import annotations

import os

import msgspec
import pytest

from shared.kv_wire.sealing.cipher_choice import AES, CHACHA, TAG_BYTES, common_cipher
from shared.kv_wire.sealing.ciphers import LinkCiphers, ciphers_of_receiver, ciphers_of_sender
from shared.kv_wire.sealing.link_keys import MAX_KEYS, LinkKeys
from shared.messages import LinkKey, LinkSecurity
from shared.randomness import SystemRandomness

HELLO, WELCOME, PREFIX = b"hello", b"welcome", b"prefix"
KEY = LinkKey(key_id=b"i" * 16, key=bytes(range(32)), security="aead")
SECURITIES: tuple[LinkSecurity, ...] = ("aead", "mac")


def both_ends(security: LinkSecurity, cipher: str = AES) -> tuple[LinkCiphers, LinkCiphers]:
    link_key = msgspec.structs.replace(KEY, security=security)
    return (
        ciphers_of_sender(link_key, cipher, HELLO, WELCOME),
        ciphers_of_receiver(link_key, cipher, HELLO, WELCOME),
    )


@pytest.mark.parametrize("cipher", [AES, CHACHA])
@pytest.mark.parametrize("security", SECURITIES)
def test_both_directions_open_what_was_sealed(security: LinkSecurity, cipher: str) -> None:
    sender, receiver = both_ends(security, cipher)
    for sealing, opening in (
        (sender.sealing, receiver.opening),
        (receiver.sealing, sender.opening),
    ):
        for body in (b"first", b"second", b""):
            sealed = sealing.seal_record(PREFIX, body)
            assert len(sealed) == len(body) + TAG_BYTES
            assert body == b"" or (body in sealed) is (security == "mac")
            opened = opening.open_record(PREFIX, memoryview(sealed))
            assert opened is not None
            assert bytes(opened) == body


@pytest.mark.parametrize("cipher", [AES, CHACHA])
@pytest.mark.parametrize("security", SECURITIES)
@pytest.mark.parametrize("num_bytes", [1, 4097, 3 << 20])
def test_payload_is_sealed_and_opened_in_place(
    security: LinkSecurity, cipher: str, num_bytes: int
) -> None:
    sender, receiver = both_ends(security, cipher)
    payload = os.urandom(num_bytes)
    buffer = memoryview(bytearray(payload + bytes(TAG_BYTES)))
    sender.sealing.seal_payload(7, buffer)
    if num_bytes > 1:
        assert (buffer[:-TAG_BYTES] == payload) is (security == "mac")
    assert receiver.opening.open_payload(7, buffer)
    assert buffer[:-TAG_BYTES] == payload


@pytest.mark.parametrize("security", SECURITIES)
def test_only_the_next_unaltered_record_is_opened(security: LinkSecurity) -> None:
    sender, _ = both_ends(security)
    first, second = (sender.sealing.seal_record(PREFIX, b"body") for _ in range(2))
    flipped = bytes([first[0] ^ 1]) + first[1:]
    for prefix, sealed in (
        (PREFIX, second),
        (PREFIX, flipped),
        (PREFIX, first[:-1]),
        (b"another", first),
    ):
        _, receiver = both_ends(security)
        assert receiver.opening.open_record(prefix, memoryview(sealed)) is None
    _, receiver = both_ends(security)
    assert receiver.opening.open_record(PREFIX, memoryview(first)) is not None
    assert receiver.opening.open_record(PREFIX, memoryview(first)) is None, "replayed"


@pytest.mark.parametrize("security", SECURITIES)
@pytest.mark.parametrize("changed", ["bit", "tag", "frame", "key", "handshake", "direction"])
def test_payload_of_another_origin_is_not_opened(security: LinkSecurity, changed: str) -> None:
    sender, receiver = both_ends(security)
    buffer = memoryview(bytearray(100 + TAG_BYTES))
    sender.sealing.seal_payload(7, buffer)
    opening, frame_id = receiver.opening, 7
    match changed:
        case "bit":
            buffer[50] ^= 0x10
        case "tag":
            buffer[-1] ^= 1
        case "frame":
            frame_id = 8
        case "key":
            foreign = LinkKey(key_id=KEY.key_id, key=bytes(32), security=security)
            opening = ciphers_of_receiver(foreign, AES, HELLO, WELCOME).opening
        case "handshake":
            link_key = msgspec.structs.replace(KEY, security=security)
            opening = ciphers_of_receiver(link_key, AES, HELLO, b"altered").opening
        case "direction":
            opening = sender.opening
    assert not opening.open_payload(frame_id, buffer)


def test_aes_is_used_if_both_cpus_have_its_instructions() -> None:
    with_aes, without = (AES, CHACHA), (CHACHA, AES)
    assert common_cipher(with_aes, with_aes) == AES
    assert common_cipher(with_aes, without) == common_cipher(without, with_aes) == CHACHA
    assert common_cipher((), with_aes) is None
    assert common_cipher(("rot13",), with_aes) is None


def test_link_key_is_drawn_once_and_found_until_forgotten() -> None:
    keys = LinkKeys("aead", SystemRandomness())
    drawn = {name: keys.key_for(name) for name in ("prefill-1", "prefill-2")}
    assert drawn["prefill-1"].key != drawn["prefill-2"].key
    assert keys.key_for("prefill-1") is drawn["prefill-1"]
    assert keys.find(drawn["prefill-1"].key_id) is drawn["prefill-1"]
    keys.forget("prefill-1")
    keys.forget("prefill-1")
    assert keys.find(drawn["prefill-1"].key_id) is None
    assert keys.key_for("prefill-1").key != drawn["prefill-1"].key
    assert keys.find(b"") is None


def test_key_of_the_leader_is_found_at_a_rank_until_another_replaces_it() -> None:
    leader, rank = (LinkKeys("aead", SystemRandomness()) for _ in range(2))
    first = leader.key_for("prefill-1")
    for _ in range(2):
        rank.adopt("prefill-1", first)
    assert rank.find(first.key_id) is first
    leader.forget("prefill-1")
    second = leader.key_for("prefill-1")
    rank.adopt("prefill-1", second)
    assert rank.find(first.key_id) is None
    assert rank.find(second.key_id) is second


def test_keys_are_bounded_and_the_oldest_is_dropped() -> None:
    keys = LinkKeys("mac", SystemRandomness())
    first, second = keys.key_for("first"), keys.key_for("second")
    keys.key_for("first")
    for number in range(MAX_KEYS - 1):
        keys.key_for(f"worker-{number}")
    assert keys.find(first.key_id) is first
    assert keys.find(second.key_id) is None


def test_key_is_in_no_log() -> None:
    assert repr(KEY.key)[2:-1] not in repr(KEY)
    assert KEY.key.hex() not in repr(KEY)
