"""Prints results as tables or JSON, and opens one Redis connection for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.console import Console, RenderableType
from rich.table import Column, Table

from services.local.state import clusters_dir, running_cluster
from shared.clock import MonotonicClock
from shared.config import url_problems
from shared.errors import ConfigError
from shared.tls import TlsFiles

if TYPE_CHECKING:
    from shared.store import Store

T = TypeVar("T")

PIPE_WIDTH = 160
TIMEOUT_S = 2.0


def text_console(**settings: Any) -> Console:
    """Returns a console that prints names as they are: `[b]` and `:fire:` are letters."""
    return Console(highlight=False, markup=False, emoji=False, **settings)


def table_console() -> Console:
    """Returns a console as wide as the terminal, or PIPE_WIDTH without a terminal."""
    console = text_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def plain_table(*headings: str) -> Table:
    """Returns a table without lines. A narrow terminal folds its cells, and cuts none."""
    columns = (Column(each, overflow="fold") for each in headings)
    return Table(*columns, box=None, header_style="bold", pad_edge=False)


def show(*parts: RenderableType) -> None:
    console = table_console()
    for part in parts:
        console.print(part)


def print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode())


def time_text(unix_s: float) -> str:
    if not unix_s:
        return "at the start"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def with_store(
    redis_url: str | None, action: Callable[[Store], Awaitable[T]], *, timeout_s: float = TIMEOUT_S
) -> T:
    """Runs a function with a connection to Redis. Raises ConfigError, or StoreUnavailable if Redis
    does not reply within `timeout_s`.
    """
    from shared.store import RedisStore  # 0.1 s, for commands that have no store

    url = find_redis(redis_url)

    async def go() -> T:
        store = RedisStore(
            url,
            MonotonicClock(),
            timeout_s=timeout_s,
            tls=TlsFiles.of_environ("REDIS", os.environ),
        )
        try:
            return await action(store)
        finally:
            await store.close()

    return asyncio.run(go())


def find_redis(redis_url: str | None) -> str:
    """Returns the given URL, else the local cluster's. Raises ConfigError."""
    if redis_url is None:
        _, state = running_cluster(clusters_dir())
        redis_url = state.redis_url
    problems = list(url_problems("redis_url", redis_url, schemes=("redis", "rediss", "unix")))
    if problems:
        raise ConfigError("; ".join(problems))
    return redis_url
