"""The file of weights that all processes of a host map: its format, creation and removal.

    <cache>/<key>.packed    payload; header (JSON); trailer: digest and length of the header, magic
    <cache>/lock            locked by the process that builds; others wait and then map

Every span of the payload starts at a multiple of 64 bytes. `key` is a digest of everything that
determines the content. A file appears atomically: it is built under another name, synced, renamed.
The digest of its payload is computed during writing, and its mtime is then set to a fixed value; a
file with any other mtime is verified completely before it is used.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import msgspec
import structlog
import torch
import xxhash
from torch import Tensor

from shared.engine.weights.weight_bytes import StoredForm
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

MAGIC = b"hearthW4"  # the digit changes with the file's format
ALIGNMENT = 64
_TRAILER = struct.Struct("<16sQ8s")
_SUFFIX, _PARTIAL = ".packed", ".partial"


NumBytes = Annotated[int, msgspec.Meta(ge=0)]


class FileIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a checkpoint's file when it was read."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Raises OSError."""
        real = path.resolve()
        stat = real.stat()
        return cls(
            path=str(real), num_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino
        )

    @property
    def is_current(self) -> bool:
        try:
            return FileIdentity.of(Path(self.path)) == self
        except (OSError, ValueError):
            return False


class RegionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A range of bytes in the payload; `form` if they are a packed or compressed weight."""

    offset: NumBytes
    num_bytes: NumBytes
    form: StoredForm | None = None


class SharedFileHeader(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    revision: str
    sources: tuple[FileIdentity, ...]
    spans: dict[str, RegionSpan]
    num_payload_bytes: int
    payload_digest: str
    sealed_ns: int  # the file's mtime while it is unmodified


class PackedFile:
    """An open file: the mapping lives as long as this object or a tensor over it."""

    def __init__(self, header: SharedFileHeader, payload: Tensor) -> None:
        self.header = header
        self._payload = payload

    def bytes_of(self, name: str) -> Tensor:
        """[num_bytes] uint8; a write to it crashes the process."""
        span = self.header.spans[name]
        return self._payload[span.offset : span.offset + span.num_bytes]


def packed_path(cache_dir: Path, key: str) -> Path:
    return cache_dir / f"{key}{_SUFFIX}"


def open_packed(path: Path, key: str) -> PackedFile | None:
    """Returns None if no valid file exists. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        header = _read_header(file)
        if header is None or header.key != key:
            return None
        payload = _mapped(file)[: header.num_payload_bytes]
        mtime_ns = os.fstat(file.fileno()).st_mtime_ns
    if mtime_ns != header.sealed_ns:
        if xxhash.xxh3_128_hexdigest(payload.numpy().data) != header.payload_digest:
            return None
        _seal(path, header.sealed_ns)
    return PackedFile(header, payload)


def _read_header(file: IO[bytes]) -> SharedFileHeader | None:
    """Returns None for a truncated file, or one without the trailer of a packed file."""
    size = os.fstat(file.fileno()).st_size
    if size < _TRAILER.size:
        return None
    file.seek(size - _TRAILER.size)
    digest, num_bytes, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    start = size - _TRAILER.size - num_bytes
    if magic != MAGIC or start < 0:
        return None
    file.seek(start)
    encoded = file.read(num_bytes)
    if xxhash.xxh3_128_digest(encoded) != digest:
        return None
    try:
        header = msgspec.json.decode(encoded, type=SharedFileHeader)
    except UNREADABLE:
        return None
    ends = (span.offset + span.num_bytes for span in header.spans.values())
    is_complete = header.num_payload_bytes == start and all(end <= start for end in ends)
    return header if is_complete else None


def _mapped(file: IO[bytes]) -> Tensor:
    """Returns the mapped file, with all pages read in before the first step."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
    with warnings.catch_warnings():  # the mapping is read-only on purpose
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _seal(path: Path, sealed_ns: int) -> None:
    try:
        os.utime(path, ns=(sealed_ns, sealed_ns))
    except (OSError, OverflowError) as error:  # still usable, but verified at every start
        log.info("shared_weights_seal_failed", path=str(path), reason=str(error))


class PayloadWriter:
    """Appends spans; only one of them needs to be in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.spans: dict[str, RegionSpan] = {}
        self.num_bytes = 0
        self._file = file
        self._digest = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def append(self, name: str, data: Tensor, form: StoredForm | None = None) -> None:
        """Appends `data`, [num_bytes] uint8."""
        self._write(bytes(-self.num_bytes % ALIGNMENT))
        self.spans[name] = RegionSpan(offset=self.num_bytes, num_bytes=data.numel(), form=form)
        self._write(data.numpy().data)

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)


def build_packed(
    path: Path,
    key: str,
    sources: tuple[FileIdentity, ...],
    write: Callable[[PayloadWriter], str],
    *,
    num_expected_bytes: int,
) -> PackedFile:
    """Opens the file, after building it with `write`, which returns the revision, unless another
    process has built it first. Raises OSError if it cannot be stored, and the errors of `write`.
    """
    cache_dir = path.parent
    cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(cache_dir):
        opened = open_packed(path, key)
        if opened is not None:
            return opened
        _remove_outdated(cache_dir)
        if shutil.disk_usage(cache_dir).free < num_expected_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cache_dir))
        _write_file(path, key, sources, write)
        opened = open_packed(path, key)
    if opened is None:
        raise OSError(errno.EIO, "the written file cannot be read back", str(path))
    log.info("weights_packed", path=str(path), num_bytes=opened.header.num_payload_bytes)
    return opened


@contextmanager
def _locked(cache_dir: Path) -> Iterator[None]:
    """Locks the cache; the kernel releases the lock of a process that dies."""
    with (cache_dir / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_outdated(cache_dir: Path) -> None:
    """Removes files whose checkpoint has changed or is gone, and partial files of dead builders.

    Processes that have mapped a removed file can use it until they end.
    """
    for each in (*cache_dir.glob(f"*{_PARTIAL}"), *cache_dir.glob(f"*{_SUFFIX}")):
        with each.open("rb") as file:
            header = _read_header(file)
        if header is None or not all(source.is_current for source in header.sources):
            each.unlink(missing_ok=True)


def _write_file(
    path: Path, key: str, sources: tuple[FileIdentity, ...], write: Callable[[PayloadWriter], str]
) -> None:
    partial = path.with_suffix(_PARTIAL)
    sealed_ns = max(each.mtime_ns for each in sources) // 10**9 * 10**9
    try:
        with partial.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            writer = PayloadWriter(file)
            revision = write(writer)
            header = SharedFileHeader(
                key=key,
                revision=revision,
                sources=sources,
                spans=writer.spans,
                num_payload_bytes=writer.num_bytes,
                payload_digest=writer.digest,
                sealed_ns=sealed_ns,
            )
            encoded = msgspec.json.encode(header)
            file.write(encoded)
            file.write(_TRAILER.pack(xxhash.xxh3_128_digest(encoded), len(encoded), MAGIC))
            file.flush()
            os.fsync(file.fileno())
        _seal(partial, sealed_ns)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
