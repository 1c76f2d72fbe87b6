"""Digests of the tensors of checkpoint files, remembered by the identity of each file.

    <cache>/digests/<digest of the path>    xxh3-128 of the rest, JSON

An entry only saves time. It counts if it is intact, this user's alone, of exactly this file (path,
size, mtime, inode, ctime) and its tensors, and if one of them, chosen at random, still has its
digest: anything else is computed again. Copies and archives restore a file's mtime; nobody can set
its ctime. A file that was changed just before it was read is not remembered, since a later change
may have the same times.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import xxhash

from kernels.cache import cache_root
from shared.engine.weights.shared_file import FileIdentity
from shared.transport.wire_errors import UNREADABLE, one_line

log = structlog.get_logger(__name__)

LEAST_AGE_S = 2.0  # age of a file's last change: longer than the steps of any file system's clock
MAX_BYTES = 64 << 20
_CHECKSUM_BYTES = 16

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]


class _CachedDigests(msgspec.Struct, frozen=True):
    source: FileIdentity
    digests: dict[str, Digest]
    ctime_ns: int = 0  # no part of `FileIdentity`: a new link changes it, but not the content


class DigestCache:
    """Raises nothing: an entry that cannot be read or written is as none."""

    def __init__(self, folder: Path, wall_clock_s: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = wall_clock_s

    def of(self, source: FileIdentity, ctime_ns: int) -> dict[str, str]:
        """Returns the digests by tensor; empty if there are none to trust. `ctime_ns` is
        that of the file.
        """
        try:
            entry = _decoded(self._read(source))
        except (FileNotFoundError, NotADirectoryError):  # writing one is what fails
            return {}
        except (OSError, ValueError, *UNREADABLE) as error:
            log.warning("digests_not_used", path=source.path, reason=one_line(error))
            return {}
        is_same = (entry.source, entry.ctime_ns) == (source, ctime_ns)
        return entry.digests if is_same else {}

    def remember(self, source: FileIdentity, ctime_ns: int, digests: dict[str, str]) -> None:
        """Stores digests. `ctime_ns` is the file's before it was read."""
        changed_s = max(source.mtime_ns, ctime_ns) / 1e9
        if self._now() - changed_s < LEAST_AGE_S or not source.is_current:
            return
        try:
            self._write(source, msgspec.json.encode(_CachedDigests(source, digests, ctime_ns)))
        except OSError as error:
            log.warning("digests_not_remembered", path=source.path, reason=one_line(error))

    def _path(self, source: FileIdentity) -> Path:
        return self._folder / xxhash.xxh3_128_hexdigest(source.path.encode(errors="replace"))

    def _read(self, source: FileIdentity) -> bytes:
        descriptor = os.open(self._path(source), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            is_own = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
            if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise OSError("others may have written it")
            return file.read(MAX_BYTES)

    def _write(self, source: FileIdentity, content: bytes) -> None:
        """Atomically: other workers read the file."""
        path = self._path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(xxhash.xxh3_128_digest(content) + content)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def digest_cache() -> DigestCache:
    return DigestCache(cache_root() / "digests")


def _decoded(stored: bytes) -> _CachedDigests:
    checksum, content = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(content) != checksum:
        raise ValueError("the file is damaged")
    return msgspec.json.decode(content, type=_CachedDigests)
