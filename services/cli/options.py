"""Shared parts of options: panels of the help, words of values, files that they name."""

from __future__ import annotations

import sys
from pathlib import Path

from shared.errors import ConfigError

OPERATE = "Operate"  # a panel of the help
UNLIMITED, ALL = "unlimited", "all"
MAX_BYTES = 4 << 20


def read_given_file(path: Path, *, what: str) -> bytes:
    """Reads a file that an operator names, up to MAX_BYTES. It may be a pipe; `-` is standard
    input.

    `what` begins the error messages, such as the option's name. Raises ConfigError.
    """
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{what} {path} has more than {MAX_BYTES} bytes")
    return data
