"""The `hearth` command in this process, on an empty Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import redis

from tests.services.cli.in_process import call_hearth
from tests.support.servers import RedisServer
from tests.support.services.running import environ_for

Hearth = Callable[..., CompletedProcess[str]]


@pytest.fixture
def hearth(tmp_path: Path, redis_server: RedisServer) -> Iterator[Hearth]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    environ, url = environ_for(tmp_path), redis_server.url
    yield lambda *arguments: call_hearth((*arguments, "--redis-url", url), environ)


def text(result: CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
