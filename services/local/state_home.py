"""The folder below which this user's clusters and hosts store their state."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shared.errors import ConfigError


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns $XDG_STATE_HOME, else ~/.local/state, else a private folder below the temporary one,
    which users share. Raises ConfigError if another user may write there.
    """
    if root := environ.get("XDG_STATE_HOME"):
        return Path(root)
    if home := environ.get("HOME"):
        return Path(home, ".local/state")
    return _private_folder(Path(tempfile.gettempdir(), f"hearth-{os.geteuid()}"))


def _private_folder(path: Path) -> Path:
    """Makes a folder with mode 0700, unless this user has made it before."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot store state in {path}: {error.strerror}") from None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is not a folder of this user alone: set HOME or XDG_STATE_HOME to store state"
        )
    return path
