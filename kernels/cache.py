"""The directory that caches compiled kernels and measurements."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Returns `$HEARTH_CACHE_DIR`, or `hearth` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEARTH_CACHE_DIR") or Path(home) / "hearth")
