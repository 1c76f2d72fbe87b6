from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.cli.output import with_store
from services.cli.tenants.public_prefixes import publish_prefix, remove_prefix, show_prefixes
from shared.block_hash import PUBLIC_TENANT_ID
from shared.errors import ConfigError
from shared.tenancy.model_alias_admin import ModelAliasAdmin
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import PinnedPrefix
from tests.support.servers import RedisServer
from tests.test_cli import hearth


def load(redis: RedisServer, name: str) -> PinnedPrefix | None:
    return with_store(redis.url, lambda store: pinned_prefix.load(store, PUBLIC_TENANT_ID, name))


def test_publish_list_and_remove_commands(redis_server: RedisServer, tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("Be kind.\n")
    url = ("--redis-url", redis_server.url)
    publish = ("prefix", "publish", "cli-rules", "--model", "m", "--file", str(rules))
    assert hearth(*publish, *url).returncode == 0
    saved = load(redis_server, "cli-rules")
    assert saved is not None
    assert saved.messages == [{"role": "system", "content": "Be kind.\n"}]
    assert (saved.is_public, saved.model, saved.token_ids) == (True, "m", b"")
    shown = hearth("prefix", "list", "--json", HEARTH_REDIS_URL=redis_server.url)
    assert {"name": "cli-rules", "model": "m", "num_tokens": None} in json.loads(shown.stdout)
    assert hearth("prefix", "remove", "cli-rules", *url).returncode == 0
    again = hearth("prefix", "remove", "cli-rules", *url)
    assert again.returncode == 2
    assert "there is no public prefix 'cli-rules'" in again.stderr


def test_json_file_is_a_list_of_messages(redis_server: RedisServer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello."}]
    publish_prefix(redis_server.url, "json", "m", json.dumps(messages), is_json=True)
    saved = load(redis_server, "json")
    assert saved is not None and saved.messages == messages
    remove_prefix(redis_server.url, "json")


def test_alias_for_all_tenants_names_its_model(redis_server: RedisServer) -> None:
    def in_aliases(change: Callable[[ModelAliasAdmin], Awaitable[None]]) -> None:
        with_store(redis_server.url, lambda store: change(ModelAliasAdmin(store, lambda: 1.0)))

    in_aliases(lambda aliases: aliases.put("short", "the/model"))
    publish_prefix(redis_server.url, "aliased", "short", "x", is_json=False)
    saved = load(redis_server, "aliased")
    assert saved is not None and saved.model == "the/model"
    remove_prefix(redis_server.url, "aliased")
    in_aliases(lambda aliases: aliases.remove("short"))
    with pytest.raises(ConfigError, match="invalid model ''"):
        publish_prefix(redis_server.url, "aliased", "", "x", is_json=False)


@pytest.mark.parametrize(
    ("name", "text", "is_json", "error"),
    [
        ("no way", "x", False, "is not a valid prefix name"),
        ("ok", "  \n", False, "is empty"),
        ("ok", "[]", True, "is empty"),
        ("ok", '[{"role": "tool", "content": "x"}]', True, "not a list of messages"),
    ],
)
def test_invalid_prefixes_are_rejected(
    redis_server: RedisServer, name: str, text: str, is_json: bool, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        publish_prefix(redis_server.url, name, "m", text, is_json=is_json)


def test_number_of_public_prefixes_is_limited(redis_server: RedisServer) -> None:
    publish_prefix(redis_server.url, "first", "m", "x", is_json=False)
    with pytest.raises(ConfigError, match="can be at most 1 prefixes: delete one first"):
        publish_prefix(redis_server.url, "second", "m", "x", is_json=False, max_prefixes=1)
    remove_prefix(redis_server.url, "first")


def test_table_marks_prefixes_not_tokenized_yet(
    redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_prefix(redis_server.url, "shown", "m", "x", is_json=False)
    show_prefixes(redis_server.url, is_json=False)
    assert "not tokenized yet" in capsys.readouterr().out
    remove_prefix(redis_server.url, "shown")
