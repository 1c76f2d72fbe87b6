"""Private directories for unix sockets, whose paths the kernel bounds."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 103  # macOS's limit; Linux allows 107
SHORT_DIRECTORY = "/tmp"


def make_socket_directory(prefix: str, *, name_bytes: int) -> Path:
    """Makes a directory of mode 0700 with room for a socket whose path below it, with its slash,
    has `name_bytes`: in the temporary directory, or in /tmp if that one's path is too long.
    """
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(directory)) + name_bytes <= MAX_SOCKET_PATH_BYTES:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=SHORT_DIRECTORY))
