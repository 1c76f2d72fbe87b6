"""Reads a file that a checkpoint brings: anybody may have written it, or put something else there.

A pipe or a device under the name of a file would block its reader for ever, and an endless file
would take all memory.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import CheckpointError

MAX_CONFIG_BYTES = 32 << 20
MAX_TOKENIZER_BYTES = 128 << 20
MAX_TENSOR_LIST_BYTES = 100_000_000  # the safetensors library's limit of a header
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # errors of a JSON decoder

_T = TypeVar("_T")


def read_checkpoint_file(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Reads a file. Raises OSError for one that is missing, is not a regular one or has more
    bytes.
    """
    with open_checkpoint_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return data


def open_checkpoint_file(path: Path) -> BufferedReader:
    """Opens a file. Raises OSError for one that is missing or is not a regular one."""
    return BufferedReader(open_unbuffered(path))


def open_unbuffered(path: Path) -> FileIO:
    """Opens a file as `open_checkpoint_file` does, for reads of any size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return RegularFile(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


class RegularFile(FileIO):
    """A file whose reads never wait: some of the kernel's files look regular and do."""

    def readinto(self, buffer: Any) -> int:  # a buffer that may be written
        num_bytes: int | None = super().readinto(buffer)
        if num_bytes is None:
            raise OSError(errno.EAGAIN, "has no bytes to read now")
        return num_bytes


def read_checkpoint_json(path: Path, kind: type[_T]) -> _T:
    """Reads a file of JSON. Raises CheckpointError with one line."""
    try:
        return msgspec.json.decode(read_checkpoint_file(path), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Returns the text of an error on one line."""
    return " ".join(str(error).split())


def exists(path: Path) -> bool:
    """Whether there is anything of this name, also what cannot be read."""
    return os.path.lexists(path)
