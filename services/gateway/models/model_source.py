"""Finds the files of a catalogue's source on this machine: a directory, a bundle or a hub id.

A hub id is found in Hugging Face's cache, in which `hearth` commands and hosts put what they load.
Nothing is downloaded: a request would wait for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from shared.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def source_dir(source: str) -> Path:
    """Returns the directory of a source. Raises ConfigError."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(source):
        raise ConfigError(f"{source!r} is not a directory on this machine")
    snapshot = _cached_snapshot(source)
    if snapshot is None:
        raise ConfigError(
            f"{source!r} is neither a directory on this machine nor in its cache {hub_cache()}"
        )
    return snapshot


def hub_cache() -> Path:
    """Returns the directory of huggingface_hub's cache, without loading that package."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return (Path(home) if home else cache / "huggingface").expanduser() / "hub"


def _cached_snapshot(hub_id: str) -> Path | None:
    folder = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None
