"""`hearth model alias`, `unalias` and `aliases` on a real Redis."""

from __future__ import annotations

import json

import pytest
import redis

from tests.services.cli.models.conftest import Hearth, text
from tests.support.servers import RedisServer

SCOUT = "@cf/meta/llama-4-scout-17b-16e-instruct"


def test_alias_list_and_unalias(hearth: Hearth, redis_server: RedisServer) -> None:
    assert text(hearth("model", "aliases")) == "no alias"
    text(hearth("tenant", "add", "team-a"))
    assert text(hearth("model", "alias", SCOUT, "hearth-demo")) == ""
    text(hearth("model", "alias", "[b]fast", "hearth-demo", "--tenant", "team-a"))
    heading, everyone, own = text(hearth("model", "aliases")).splitlines()
    assert heading.split() == ["alias", "model", "tenant", "created"]
    assert everyone.split()[:3] == [SCOUT, "hearth-demo", "all"]
    assert own.split()[:3] == ["[b]fast", "hearth-demo", "team-a"]
    text(hearth("model", "alias", SCOUT, "other", "--tenant", "team-a"))
    rows = json.loads(text(hearth("model", "aliases", "--tenant", "team-a", "--json")))
    assert [(row["alias"], row["model"], row["tenant_id"]) for row in rows] == [
        (SCOUT, "other", "team-a"),
        ("[b]fast", "hearth-demo", "team-a"),
    ]
    text(hearth("model", "unalias", SCOUT))
    again = hearth("model", "unalias", SCOUT)
    assert again.returncode == 2 and "has no alias" in again.stderr
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset("hearth:model:aliases", "broken", "{")
    assert "unreadable" in text(hearth("model", "aliases"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["alias", "a b", "m"], "invalid alias 'a b'"),
        (["alias", "../../v1", "m"], "invalid alias"),
        (["alias", "a", "m" * 257], "invalid model"),
        (["alias", "a", "m", "--tenant", "nobody"], "tenant 'nobody' does not exist"),
        (["alias", "a"], "Missing argument 'model'"),
        (["unalias", "a", "--tenant", "a:b"], "invalid tenant id"),
        (["aliases", "--tenant", "nobody"], "tenant 'nobody' does not exist"),
    ],
)
def test_invalid_arguments_are_rejected(hearth: Hearth, arguments: list[str], words: str) -> None:
    result = hearth("model", *arguments)
    assert result.returncode == 2
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert text(hearth("model", "aliases")) == "no alias"
