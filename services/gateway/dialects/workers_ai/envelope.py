"""Cloudflare's envelope of a success: {"result": …, "success": true, "errors", "messages"}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class ResultInfo(msgspec.Struct, frozen=True):
    """The place of a page in all rows that were found; pages count from 1."""

    count: int
    page: int
    per_page: int
    total_count: int


class WorkersAIMessage(msgspec.Struct, frozen=True):
    code: int
    message: str


class Success(msgspec.Struct, frozen=True, kw_only=True):
    result: Any
    success: bool = True
    errors: Sequence[str] = ()
    messages: Sequence[WorkersAIMessage] = ()
    result_info: ResultInfo | msgspec.UnsetType = msgspec.UNSET
