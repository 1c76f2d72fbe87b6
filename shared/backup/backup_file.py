"""The file of a backup: written at once or not at all, and checked before anything is read of it.

    header    one line of JSON: BackupHeader
    chunk     4 bytes of length, big endian; zlib; msgpack: a list of `Stored`
    end       4 zero bytes, then 32 bytes of BLAKE2b of all before

With a key, each chunk is sealed with ChaCha20-Poly1305 (RFC 8439) under its number, and the digest
is keyed. The key is derived from the text of a file, which has to be random.
"""

from __future__ import annotations

import hmac
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import IO

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from shared.backup.records import Stored
from shared.errors import ConfigError
from shared.transport.wire_errors import UNREADABLE

FORMAT = 1
CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 64 << 20
MAX_HEADER_BYTES = 4096
MIN_KEY_CHARS = 32
_DIGEST_BYTES, _LENGTH_BYTES = 32, 4
_MARK = b'{"hearth_backup":'


class BackupHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`generation` is that of the Redis. `made_at` is in Unix seconds, of the time at which the
    backup began. `key_check` tells whether a key is the right one; empty: nothing is encrypted.
    """

    hearth_backup: int = msgspec.field(default_factory=lambda: FORMAT)  # the format
    backup_id: str
    release: str
    generation: str
    made_at: float
    salt: str = ""
    key_check: str = ""


class FileKey:
    """Seals and opens the chunks of one backup."""

    def __init__(self, text: bytes, salt: str) -> None:
        self._secret = blake2b(text, digest_size=32, salt=bytes.fromhex(salt)).digest()
        self._cipher = ChaCha20Poly1305(self._derived(b"chunks"))
        self.digest_key = self._derived(b"digest")
        self.check = self._derived(b"check")[:8].hex()

    def _derived(self, purpose: bytes) -> bytes:
        return blake2b(purpose, digest_size=32, key=self._secret).digest()

    def seal(self, number: int, data: bytes) -> bytes:
        return self._cipher.encrypt(number.to_bytes(12, "big"), data, None)

    def open(self, number: int, data: bytes) -> bytes:
        return self._cipher.decrypt(number.to_bytes(12, "big"), data, None)


def read_key(path: Path) -> bytes:
    """Returns the text of a key file. Raises ConfigError."""
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--key-file {path}: {error.strerror}") from None
    if len(text) < MIN_KEY_CHARS:
        raise ConfigError(
            f"--key-file {path} has {len(text)} characters, {MIN_KEY_CHARS} at least: "
            "openssl rand -hex 32 makes one"
        )
    return text


@contextmanager
def writing_backup(
    path: Path, header: BackupHeader, key: FileKey | None
) -> Iterator[Callable[[Stored], None]]:
    """Gives a function that adds a record. Replaces the file, of mode 0600, once all are added.
    Raises ConfigError.
    """
    _check_replaceable(path)
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with open(new, "xb", opener=partial(os.open, mode=0o600)) as file:
            writer = _Writer(file, header, key)
            yield writer.add
            writer.finish()
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)


def _check_replaceable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            is_backup = file.read(len(_MARK)) == _MARK
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not is_backup:
        raise ConfigError(f"{path} is there and is no backup: name another file")


class _Writer:
    """Writes chunks of CHUNK_BYTES, or of one larger record."""

    def __init__(self, file: IO[bytes], header: BackupHeader, key: FileKey | None) -> None:
        self._file = file
        self._key = key
        self._digest = _hasher(key)
        self._number = self._size = 0
        self._part: list[msgspec.Raw] = []
        self._put(msgspec.json.encode(header) + b"\n")

    def add(self, stored: Stored) -> None:
        data = msgspec.msgpack.encode(stored)
        self._part.append(msgspec.Raw(data))
        self._size += len(data)
        if self._size >= CHUNK_BYTES:
            self._write_chunk()

    def finish(self) -> None:
        self._write_chunk()
        self._put(bytes(_LENGTH_BYTES))
        self._file.write(self._digest.digest())

    def _write_chunk(self) -> None:
        data = zlib.compress(msgspec.msgpack.encode(self._part))
        sealed = data if self._key is None else self._key.seal(self._number, data)
        self._put(len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed)
        self._part, self._size = [], 0
        self._number += 1

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


class BackupFile:
    """A backup that has been checked. Raises ConfigError for anything else."""

    def __init__(self, path: Path, key_text: bytes | None = None) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                line = file.readline(MAX_HEADER_BYTES)
                self.header = _header(path, line)
                self._key = _key(path, self.header, key_text)
                self._check_digest(file, line)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        self._start = len(line)

    def records(self) -> Iterator[Stored]:
        """Yields what the backup consists of, a chunk in memory at a time."""
        with self._path.open("rb") as file:
            file.seek(self._start)
            for number in count():
                length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
                if not length:
                    return
                if length > MAX_CHUNK_BYTES:
                    raise ConfigError(f"{self._path} has a chunk of {length} bytes")
                yield from self._opened(number, file.read(length))

    def _opened(self, number: int, data: bytes) -> list[Stored]:
        try:
            opened = data if self._key is None else self._key.open(number, data)
            return msgspec.msgpack.decode(zlib.decompress(opened), type=list[Stored])
        except (*UNREADABLE, zlib.error, InvalidTag) as error:
            raise ConfigError(f"{self._path} is unreadable in chunk {number}: {error}") from None

    def _check_digest(self, file: IO[bytes], line: bytes) -> None:
        digest = _hasher(self._key)
        digest.update(line)
        last = b""
        while data := last + file.read(CHUNK_BYTES):
            digest.update(data[:-_DIGEST_BYTES])
            if data == last:
                break
            last = data[-_DIGEST_BYTES:]
        if not hmac.compare_digest(last, digest.digest()):
            raise ConfigError(f"{self._path} is truncated or damaged: its checksum is another one")


def _hasher(key: FileKey | None) -> blake2b:
    return blake2b(digest_size=_DIGEST_BYTES, key=b"" if key is None else key.digest_key)


def _header(path: Path, line: bytes) -> BackupHeader:
    if not line.startswith(_MARK):
        raise ConfigError(f"{path} is no backup of Hearth")
    try:
        header = msgspec.json.decode(line, type=BackupHeader)
    except UNREADABLE:
        raise ConfigError(f"{path} is truncated or damaged: its header is unreadable") from None
    if header.hearth_backup > FORMAT:
        raise ConfigError(
            f"{path} is of format {header.hearth_backup}, made by release {header.release}: "
            f"this release reads formats up to {FORMAT}"
        )
    return header


def _key(path: Path, header: BackupHeader, text: bytes | None) -> FileKey | None:
    if not header.key_check:
        return None
    if text is None:
        raise ConfigError(f"{path} is encrypted: --key-file FILE opens it")
    try:
        key = FileKey(text, header.salt)
    except ValueError:  # not hexadecimal, or too long
        raise ConfigError(f"{path} is truncated or damaged: its header is unreadable") from None
    if key.check != header.key_check:
        raise ConfigError(f"{path} was encrypted with another key than that of --key-file")
    return key
