"""The audit of operators' commands, and Redis users made on the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from services.__main__ import app
from shared.errors import ConfigError
from shared.tenancy import audit
from shared.tenancy.tenant_admin import new_api_key
from tests.support.servers import RedisServer

RUNNER = CliRunner()


@pytest.fixture
def url(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HEARTH_REDIS_URL", redis_server.url)
    client = redis.Redis.from_url(redis_server.url)
    client.delete(*audit.STREAMS.values())  # other tests have refusals there
    yield redis_server.url
    client.delete(*audit.STREAMS.values(), *client.keys("hearth:*audited*"))
    client.close()


def hearth(*arguments: str) -> Result:
    return RUNNER.invoke(app, list(arguments), catch_exceptions=True)


def lines(count: int = 50) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        hearth("audit", "--json", "--count", str(count)).stdout
    )
    return found


def test_commands_that_change_something_are_recorded_without_secrets(url: str) -> None:
    made = hearth("tenant", "add", "audited", "--requests-per-min", "7")
    assert made.exit_code == 0
    key = hearth("tenant", "rotate", "audited").stdout.split()[0]
    assert hearth("tenant", "list").exit_code == 0
    secret = "https://user:word@hub.example/org/name"
    hearth("model", "add", "audited", secret)
    assert hearth("tenant", "revoke", "nobody", "--all").exit_code != 0
    hearth("model", "remove", "audited")
    assert hearth("profile", "decode-1", "--steps", "0").exit_code != 0
    found = lines()
    assert [each["command"] for each in found] == [
        *("tenant add", "tenant rotate", "model add", "tenant revoke", "model remove", "profile")
    ]
    assert [each["outcome"] for each in found][:2] == ["done", "done"]
    assert found[3]["outcome"] != "done"
    assert json.loads(found[0]["arguments"]) == {"requests_per_min": 7, "tenant": "audited"}
    assert all("@" in each["who"] and each["at"] > 1.6e9 for each in found)
    text = json.dumps(found, ensure_ascii=False)
    for hidden in (key, made.stdout.strip(), "user:word", url):
        assert hidden not in text
    assert "tenant rotate" in hearth("audit").stdout
    assert [each["command"] for each in lines(1)] == ["profile"]


def test_what_was_changed_is_recorded_whole(url: str) -> None:
    assert hearth("api-key", "audited-3").exit_code == 0
    options = (
        "--requests-per-min 0 --concurrency unlimited --allowed-models all --no-zero-retention"
    )
    made = hearth("tenant", "limits", "audited-3", *options.split(), "--allowed-regions", "")
    assert made.exit_code == 0
    first, second = lines()
    assert json.loads(first["arguments"]) == {"tenant": "audited-3"}
    assert json.loads(second["arguments"]) == {
        "tenant": "audited-3",
        "requests_per_min": 0,
        "concurrency": None,
        "allowed_models": None,
        "allowed_regions": "()",
        "is_zero_retention": False,
    }


def test_kinds_are_chosen_and_exported_as_json_lines(url: str) -> None:
    client = redis.Redis.from_url(url)
    hearth("tenant", "add", "audited-4")
    added_ms = int(time.time() * 1000)
    for later_ms, kind in enumerate(("deletion", "refusal"), start=1):
        fields = {"kind": kind, "who": "p", "command": kind, "arguments": "{}", "outcome": "done"}
        client.xadd(audit.STREAMS[kind], fields, id=f"{added_ms + later_ms}-0")
    every = [json.loads(each) for each in hearth("audit", "--jsonl").stdout.splitlines()]
    assert [each["kind"] for each in every] == ["command", "deletion", "refusal"]
    chosen = hearth("audit", "--jsonl", "--kind", "refusal", "--kind", "deletion", "--count", "1")
    assert [json.loads(each)["kind"] for each in chosen.stdout.splitlines()] == ["refusal"]
    assert hearth("audit", "--kind", "other").exit_code == 2
    client.delete(*audit.STREAMS.values())
    client.close()


def test_stream_is_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_LINES", 5)
    client = redis.Redis.from_url(url)
    client.config_set("stream-node-max-entries", 2)
    for _ in range(12):
        hearth("tenant", "revoke", "nobody", "--all")
    assert 5 <= client.xlen(audit.AUDIT) <= 8
    client.config_set("stream-node-max-entries", 100)
    client.close()


def test_command_that_cannot_be_recorded_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = redis.Redis.from_url(url)
    client.set(audit.AUDIT, "another type")
    made = hearth("tenant", "add", "audited-2")
    assert made.exit_code == 0
    assert "not in the audit" in made.stderr
    client.close()


def test_users_are_printed_or_made(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = hearth("redis-acl", "kv-index")
    assert missing.exit_code != 0 and "HEARTH_REDIS_KV_INDEX_PASSWORD" in str(missing.exception)
    monkeypatch.setenv("HEARTH_REDIS_KV_INDEX_PASSWORD", "the word")
    printed = hearth("redis-acl", "kv-index").stdout
    assert printed.startswith("user kv_index reset on #") and "word" not in printed
    assert lines() == [], "nothing was changed"
    assert hearth("redis-acl", "kv-index", "--apply").stdout == ""
    port = url.rpartition(":")[2].removesuffix("/0")
    client = redis.Redis.from_url(f"redis://kv_index:the%20word@127.0.0.1:{port}/0")
    client.zcard("hearth:acme:prefixes")
    with pytest.raises(redis.exceptions.ResponseError):
        client.hgetall("hearth:api_key:0ff")
    client.close()
    admin = redis.Redis.from_url(url)
    admin.execute_command("ACL", "DELUSER", "kv_index")
    admin.close()
    assert [each["command"] for each in lines()] == ["redis-acl"]
    digest = printed.partition("#")[2].split()[0]
    recorded = lines()[0]["arguments"]
    assert json.loads(recorded) == {"roles": "['kv_index']"}
    assert digest not in recorded and "word" not in recorded
    assert hearth("redis-acl", "worker").exit_code != 0


def test_no_backup_is_made_without_its_list(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore could not tell what was revoked after it."""
    assert hearth("api-key", "audited-b").exit_code == 0
    (tmp_path / "other").write_text("no list\n")
    for name, words in ((".", "Is a directory"), ("other", "line 1 is unreadable")):
        monkeypatch.setenv("HEARTH_RETRACTIONS", str(tmp_path / name))
        result = hearth("backup", str(tmp_path / "b"))
        assert isinstance(result.exception, ConfigError) and words in result.exception.message
    assert [each.name for each in tmp_path.iterdir()] == ["other"]


def test_key_that_is_given_for_its_id_is_not_recorded() -> None:
    """It is refused, so that it stays valid: whoever reads the audit could use it."""
    api_key = new_api_key()
    shown = audit.shown_arguments({"tenant": "team-a", "key": api_key}, {"models": f"a,{api_key}"})
    assert api_key not in shown and "hearth-…" in shown
    assert "hearth-demo-vision" in audit.shown_arguments({"model": "hearth-demo-vision"}, {})
