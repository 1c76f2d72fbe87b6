"""Which names are valid, and what `ModelAliasAdmin` stores, on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.store import RedisStore
from shared.tenancy.model_alias import ALIASES, aliases_of, check_model_id, is_model_id
from shared.tenancy.model_alias_admin import AliasRow, ModelAliasAdmin
from shared.tenancy.tenant_admin import store_api_key
from tests.support.servers import RedisServer
from tests.support.waiting import LIMIT_S

NOW = 1_700_000_000.5
SCOUT = "@cf/meta/llama-4-scout-17b-16e-instruct"


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    await store_api_key(store, "k1", "acme")
    yield store
    await store.close()


def admin_of(store: RedisStore, max_aliases: int = 8) -> ModelAliasAdmin:
    return ModelAliasAdmin(store, lambda: NOW, max_aliases=max_aliases)


@pytest.mark.parametrize("text", [SCOUT, "hearth-demo", "org/name:8b", "a.b", "é", "x" * 256])
def test_valid_ids(text: str) -> None:
    assert check_model_id(text, "alias") == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 characters"),
        ("x" * 257, "257 characters"),
        ("a b", "space"),
        ("a\tb", "space"),
        ("a\u00a0b", "space"),
        ("a\nb", "cannot be printed"),
        ("a\x00", "cannot be printed"),
        ("a\u202eb", "cannot be printed"),
        ("a\ud800", "cannot be printed"),
        ("@cf/../v1/models", "'..'"),
        ("a/./b", "'.'"),
        ("a//b", "nothing between two '/'"),
        ("/a", "at an end"),
        ("a/", "at an end"),
    ],
)
def test_invalid_id_is_rejected_with_a_valid_example(text: str, problem: str) -> None:
    assert not is_model_id(text)
    with pytest.raises(ConfigError, match="invalid model") as caught:
        check_model_id(text, "model")
    assert problem in caught.value.message and SCOUT in caught.value.message
    assert len(caught.value.message) < 400


async def test_aliases_are_stored_replaced_listed_and_removed(store: RedisStore) -> None:
    admin = admin_of(store)
    await admin.put(SCOUT, "hearth-demo")
    await admin.put("fast", "other")
    await admin.put("fast", "hearth-demo", "acme")
    await admin.put("fast", "third", "acme")
    everyone = [
        AliasRow(tenant_id=None, alias=SCOUT, model="hearth-demo", created_at=NOW),
        AliasRow(tenant_id=None, alias="fast", model="other", created_at=NOW),
    ]
    own = AliasRow(tenant_id="acme", alias="fast", model="third", created_at=NOW)
    assert await admin.all() == [*everyone, own]
    assert await admin.visible_to("acme") == [everyone[0], own]
    await admin.remove("fast", "acme")
    assert await admin.visible_to("acme") == everyone
    with pytest.raises(ConfigError, match="tenant 'acme' has no alias 'fast'"):
        await admin.remove("fast", "acme")
    with pytest.raises(ConfigError, match="all tenants has no alias 'none'"):
        await admin.remove("none")


async def test_invalid_alias_model_and_tenant_are_rejected(store: RedisStore) -> None:
    admin = admin_of(store)
    for alias, model, tenant_id, words in (
        ("a b", "m", None, "invalid alias 'a b'"),
        ("a", "m//", None, "invalid model 'm//'"),
        ("a", "a", None, "own name"),
        ("a", "m", "nobody", "tenant 'nobody' does not exist"),
        ("a", "m", "x:y", "invalid tenant id"),
    ):
        with pytest.raises(ConfigError, match=words):
            await admin.put(alias, model, tenant_id)
    with pytest.raises(ConfigError, match="tenant 'nobody' does not exist"):
        await admin.visible_to("nobody")
    assert await admin.all() == []


async def test_number_of_aliases_is_limited_for_each_tenant(store: RedisStore) -> None:
    admin = admin_of(store, max_aliases=2)
    for alias in ("a", "b"):
        await admin.put(alias, "m", "acme")
    await admin.put("b", "other", "acme")  # replaces one
    with pytest.raises(ConfigError, match="tenant 'acme' may have at most 2 aliases"):
        await admin.put("c", "m", "acme")
    await admin.put("c", "m")
    assert [row.alias for row in await admin.all()] == ["c", "a", "b"]


async def test_unreadable_record_is_listed_without_a_model(store: RedisStore) -> None:
    await store.write([("HSET", ALIASES, "a", "{"), ("HSET", aliases_of("acme"), b"\xff", "{}")])
    rows = await admin_of(store).all()
    assert [(row.alias, row.model) for row in rows] == [("a", None), ("\ufffd", None)]
