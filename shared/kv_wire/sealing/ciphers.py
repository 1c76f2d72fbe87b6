"""Seals the records and payloads of one TCP connection with keys that only its two ends have.

    direction key = HKDF-SHA256(link key, salt = SHA-256(Hello ‖ Welcome), info = direction)
    record        = prefix ‖ seal(body; nonce = number of the record, associated data = prefix)
    payload       = seal(payload; nonce = frame_id)

Hello and Welcome each contain a fresh random nonce, so no connection repeats another's keys, and a
peer that altered either of them derives other keys than its victim. Records are numbered by both
ends: a flipped bit, a replayed, reordered or missing record, and a foreign key fail the tag. Each
payload belongs to the sealed record that names its frame id.

With "mac" the same tag is computed over data that stays readable.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shared.kv_wire.sealing.cipher_choice import AES, CHACHA, TAG_BYTES
from shared.messages import LinkKey

_AEADS: dict[str, type[AESGCM] | type[ChaCha20Poly1305]] = {AES: AESGCM, CHACHA: ChaCha20Poly1305}
_KEY_BYTES = 32
_TO_RECEIVER, _TO_SENDER = b"hearth-kv to receiver", b"hearth-kv to sender"
# The first 4 of a seal's 12 nonce bytes; the other 8 are its number.
_RECORD, _PAYLOAD = b"\0\0\0\0", b"\0\0\0\1"


class DirectionCipher:
    """Seals, or opens, what one end of a connection sends. Payloads may be sealed, or opened, on
    another thread than records: one of them at a time.
    """

    def __init__(self, key: bytes, cipher: str, *, is_encrypted: bool) -> None:
        self._aead = _AEADS[cipher](key)
        self._of_payloads = _AEADS[cipher](key)
        self._is_encrypted = is_encrypted
        self._num_records = 0

    def seal_record(self, prefix: bytes, body: bytes) -> bytes:
        """Returns the body as it is sent, TAG_BYTES longer. `prefix` is sent before it,
        readable.
        """
        nonce = self._next_record()
        if self._is_encrypted:
            return self._aead.encrypt(nonce, body, prefix)
        return body + self._aead.encrypt(nonce, b"", prefix + body)

    def open_record(self, prefix: bytes, sealed: memoryview) -> bytes | memoryview | None:
        """Returns the body, or None if it is not the next record of the peer."""
        nonce = self._next_record()
        try:
            if self._is_encrypted:
                return self._aead.decrypt(nonce, sealed, prefix)
            body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
            self._aead.decrypt(nonce, tag, prefix + bytes(body))
            return body
        except InvalidTag:
            return None

    def seal_payload(self, frame_id: int, buffer: memoryview) -> None:
        """Seals a payload in place: it is all of the buffer but its last TAG_BYTES.

        A `frame_id` must not be used twice.
        """
        payload, nonce = buffer[:-TAG_BYTES], _nonce(_PAYLOAD, frame_id)
        if self._is_encrypted:
            self._of_payloads.encrypt_into(nonce, payload, None, buffer)
        else:
            buffer[-TAG_BYTES:] = self._of_payloads.encrypt(nonce, b"", payload)

    def open_payload(self, frame_id: int, buffer: memoryview) -> bool:
        """Opens a payload in place. Returns False if the buffer is not what the peer sealed for
        this frame.
        """
        payload, nonce = buffer[:-TAG_BYTES], _nonce(_PAYLOAD, frame_id)
        try:
            if self._is_encrypted:
                self._of_payloads.decrypt_into(nonce, buffer, None, payload)
            else:
                self._of_payloads.decrypt(nonce, buffer[-TAG_BYTES:], payload)
        except InvalidTag:
            return False
        return True

    def _next_record(self) -> bytes:
        number, self._num_records = self._num_records, self._num_records + 1
        return _nonce(_RECORD, number)


@dataclass(frozen=True, slots=True)
class LinkCiphers:
    """The ciphers of one end of a connection, one for each direction."""

    sealing: DirectionCipher
    opening: DirectionCipher


def ciphers_of_sender(link_key: LinkKey, cipher: str, hello: bytes, welcome: bytes) -> LinkCiphers:
    """Returns the sender's ciphers; `hello` and `welcome` are the bytes of the handshake."""
    to_receiver, to_sender = _both_directions(link_key, cipher, hello, welcome)
    return LinkCiphers(sealing=to_receiver, opening=to_sender)


def ciphers_of_receiver(
    link_key: LinkKey, cipher: str, hello: bytes, welcome: bytes
) -> LinkCiphers:
    """Returns the receiver's ciphers; `hello` and `welcome` are the bytes of the handshake."""
    to_receiver, to_sender = _both_directions(link_key, cipher, hello, welcome)
    return LinkCiphers(sealing=to_sender, opening=to_receiver)


def _both_directions(
    link_key: LinkKey, cipher: str, hello: bytes, welcome: bytes
) -> tuple[DirectionCipher, DirectionCipher]:
    transcript = hashlib.sha256(hello + welcome).digest()

    def direction(info: bytes) -> DirectionCipher:
        key = HKDF(SHA256(), _KEY_BYTES, salt=transcript, info=info).derive(link_key.key)
        return DirectionCipher(key, cipher, is_encrypted=link_key.security == "aead")

    return direction(_TO_RECEIVER), direction(_TO_SENDER)


def _nonce(kind: bytes, number: int) -> bytes:
    return kind + number.to_bytes(8, "big")
