"""The release of this installation."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "hearth-serve"
NOT_INSTALLED = "0"


@cache
def installed_release() -> str:
    """Returns NOT_INSTALLED for a tree that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return NOT_INSTALLED
