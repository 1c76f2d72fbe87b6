"""`hearth model` on a real Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import redis

from tests.servers import RedisServer
from tests.services.cli.in_process import call_hearth
from tests.services.cli.running import environ_for

Hearth = Callable[..., CompletedProcess[str]]
SCOUT = "@cf/meta/llama-4-scout-17b-16e-instruct"


@pytest.fixture
def hearth(tmp_path: Path, redis_server: RedisServer) -> Iterator[Hearth]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    environ, url = environ_for(tmp_path), redis_server.url
    yield lambda *arguments: call_hearth((*arguments, "--redis-url", url), environ)


def text(result: CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_alias_list_and_unalias(hearth: Hearth, redis_server: RedisServer) -> None:
    assert text(hearth("model", "list")) == "no alias"
    text(hearth("tenant", "add", "team-a"))
    assert text(hearth("model", "alias", SCOUT, "hearth-demo")) == ""
    text(hearth("model", "alias", "[b]fast", "hearth-demo", "--tenant", "team-a"))
    heading, everyone, own = text(hearth("model", "list")).splitlines()
    assert heading.split() == ["alias", "model", "tenant", "created"]
    assert everyone.split()[:3] == [SCOUT, "hearth-demo", "all"]
    assert own.split()[:3] == ["[b]fast", "hearth-demo", "team-a"]
    text(hearth("model", "alias", SCOUT, "other", "--tenant", "team-a"))
    rows = json.loads(text(hearth("model", "list", "--tenant", "team-a", "--json")))
    assert [(row["alias"], row["model"], row["tenant_id"]) for row in rows] == [
        (SCOUT, "other", "team-a"),
        ("[b]fast", "hearth-demo", "team-a"),
    ]
    text(hearth("model", "unalias", SCOUT))
    again = hearth("model", "unalias", SCOUT)
    assert again.returncode == 2 and "has no alias" in again.stderr
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset("hearth:model:aliases", "broken", "{")
    assert "unreadable" in text(hearth("model", "list"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["alias", "a b", "m"], "invalid alias 'a b'"),
        (["alias", "../../v1", "m"], "invalid alias"),
        (["alias", "a", "m" * 257], "invalid model"),
        (["alias", "a", "m", "--tenant", "nobody"], "tenant 'nobody' does not exist"),
        (["alias", "a"], "Missing argument 'model'"),
        (["unalias", "a", "--tenant", "a:b"], "invalid tenant id"),
        (["list", "--tenant", "nobody"], "tenant 'nobody' does not exist"),
    ],
)
def test_invalid_arguments_are_rejected(hearth: Hearth, arguments: list[str], words: str) -> None:
    result = hearth("model", *arguments)
    assert result.returncode == 2
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert text(hearth("model", "list")) == "no alias"
