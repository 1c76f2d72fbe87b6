"""Cloudflare's envelope of a success: {"result": …, "success": true, "errors", "messages"}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class ResultInfo(msgspec.Struct, frozen=True):
    """The place of a page in all rows that were found."""

    count: int
    """Rows of this page."""
    page: int
    """The number of the page, from 1."""
    per_page: int
    """Most rows of a page."""
    total_count: int
    """All rows that were found."""


class WorkersAIMessage(msgspec.Struct, frozen=True):
    code: int
    """The number of the warning."""
    message: str
    """What was not enforced, was left out, or is unknown."""


class Success(msgspec.Struct, frozen=True, kw_only=True):
    result: Any
    """The answer."""
    success: bool = True
    """Always true."""
    errors: Sequence[str] = ()
    """Always empty."""
    messages: Sequence[WorkersAIMessage] = ()
    """Warnings."""
    result_info: ResultInfo | msgspec.UnsetType = msgspec.UNSET
    """The place of the page, where there are pages."""
