"""The release of this installation."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_release() -> str:
    """Returns "0" for a tree that is not installed."""
    try:
        return version("hearth")
    except PackageNotFoundError:
        return "0"
