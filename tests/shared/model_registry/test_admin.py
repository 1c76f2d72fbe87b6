"""What `RegistryAdmin` stores and refuses, also with two operators at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.record import (
    REGISTRY,
    REGISTRY_VERSION,
    RegisteredModel,
    RegisteredRevision,
)
from shared.store import Store
from shared.tenancy.tenant import TENANTS
from tests.shared.model_registry.conftest import NOW


async def version(store: Store) -> int:
    """The number of changes."""
    found = await store.get(REGISTRY_VERSION)
    return 0 if found is None else int(found) - int(NOW)


async def test_model_is_added_extended_promoted_and_removed(
    admin: RegistryAdmin, store: Store
) -> None:
    await admin.add("m", "/one", settings={"priority": 3})
    first = RegisteredRevision(name="r1", source="/one", added_at=NOW)
    assert await admin.all() == {
        "m": RegisteredModel(name="m", revisions=(first,), priority=3, created_at=NOW)
    }
    await admin.record_digest("m", "r1", "d1")
    extended = await admin.add("m", "/two", canary=5, settings={"num_standby": 2})
    assert [(each.name, each.weight) for each in extended.revisions] == [("r1", 95), ("r2", 5)]
    assert (extended.priority, extended.num_standby) == (3, 2)
    assert await admin.set_share("m", "r2", 10) == await admin.one("m")
    pending = await admin.promote("m", "r2")
    assert [each.promotion for each in pending.revisions] == ["", "replace"]
    assert await admin.record_digest("m", "r2", "d2") == "d2"
    (left,) = (await admin.one("m")).revisions
    assert (left.name, left.digest, left.weight) == ("r2", "d2", 1)
    await admin.add("m", "/three", revision="spring")
    await admin.remove("m", "spring")
    await admin.remove("m")
    assert await admin.all() == {} and await version(store) == 9


async def test_only_changes_increment_the_version(admin: RegistryAdmin, store: Store) -> None:
    await admin.add("m", "/one")
    await admin.pin("m")
    assert (await admin.one("m")).is_pinned and await version(store) == 2
    await admin.pin("m")
    await admin.one("m")
    assert await version(store) == 2
    assert not (await admin.unpin("m")).is_pinned


async def test_first_digest_stays(admin: RegistryAdmin) -> None:
    await admin.add("m", "/one")
    found = await asyncio.gather(*(admin.record_digest("m", "r1", f"d{i}") for i in range(8)))
    assert len(set(found)) == 1 and found[0] == (await admin.one("m")).revisions[0].digest
    with pytest.raises(ConfigError, match="'r1' of 'm' is now '/one', not '/other'"):
        await admin.record_digest("m", "r1", "d", source="/other")
    with pytest.raises(ConfigError, match="has no revision 'r2'"):
        await admin.record_digest("m", "r2", "d")


async def test_operators_do_not_overwrite_each_other(admin: RegistryAdmin, store: Store) -> None:
    other = RegistryAdmin(store, lambda: NOW)
    await admin.add("m", "/one")
    await asyncio.gather(
        admin.pin("m"),
        other.set_fields("m", {"priority": 5}),
        admin.record_digest("m", "r1", "d1"),
        other.add("m", "/two", canary=20),
        *(each.set_fields("m", {"num_standby": 2}) for each in (admin, other)),
    )
    found = await admin.one("m")
    assert (found.is_pinned, found.priority, found.num_standby) == (True, 5, 2)
    assert [(each.digest, each.weight) for each in found.revisions] == [("d1", 80), ("", 20)]


async def test_one_of_two_operators_adds_a_name(admin: RegistryAdmin, store: Store) -> None:
    """The second one adds a further revision."""
    await asyncio.gather(admin.add("m", "/a"), RegistryAdmin(store, lambda: NOW).add("m", "/b"))
    revisions = (await admin.one("m")).revisions
    assert {each.source for each in revisions} == {"/a", "/b"}
    assert [(each.name, each.weight) for each in revisions] == [("r1", 1), ("r2", 0)]


async def test_number_of_models_is_limited(store: Store) -> None:
    admin = RegistryAdmin(store, lambda: NOW, max_models=2)
    for name in ("a", "b"):
        await admin.add(name, "/x")
    await admin.add("b", "/y")
    with pytest.raises(ConfigError, match="the catalogue has 2 models, which is the most"):
        await admin.add("c", "/x")
    await admin.remove("a")
    await admin.add("c", "/x")
    assert list(await admin.all()) == ["b", "c"]


async def test_tenants_must_exist(admin: RegistryAdmin, store: Store) -> None:
    await store.write([("HSET", TENANTS, "acme", "{}")])
    added = await admin.add("m", "/x", settings={"tenants": ("acme",)})
    assert added.tenants == ("acme",)
    with pytest.raises(ConfigError, match="tenant 'nobody' does not exist"):
        await admin.set_fields("m", {"tenants": ("acme", "nobody")})
    assert (await admin.set_fields("m", {"tenants": None})).tenants is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"priority": 101}, "invalid priority 101 of 'm': Expected `int` <= 100"),
        ({"num_standby": -1}, "invalid num_standby -1 of 'm'"),
        ({"max_context_tokens": 0}, "invalid max_context_tokens 0 of 'm'"),
        ({"weights": "half"}, "invalid weights 'half' of 'm'"),
        ({"revisions": ()}, "'revisions' is no setting of a model"),
    ],
)
async def test_invalid_settings_are_rejected(
    admin: RegistryAdmin, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await admin.add("m", "/x", settings=settings)
    assert await admin.all() == {}


async def test_invalid_and_unknown_names_are_rejected(admin: RegistryAdmin, store: Store) -> None:
    await admin.add("m", "/x")
    before = await version(store)
    for change, words in (
        (admin.add("a b", "/x"), "invalid model 'a b'"),
        (admin.add("m", "/x", revision="-r"), "invalid revision '-r'"),
        (admin.add("m", "/x", revision="r1"), "has a revision 'r1' already"),
        (admin.add("n", "x" * 1025), "invalid model 'n': .*source"),
        (admin.add("m", ""), "invalid model 'm': .*source"),
        (admin.add("n", "/x", canary=5), "the model 'n' does not exist yet"),
        (admin.promote("n", "r1"), "the catalogue has no model 'n'"),
        (admin.remove("n"), "the catalogue has no model 'n'"),
        (admin.remove("m", "r2"), "'m' has no revision 'r2'"),
        (admin.pin("n"), "the catalogue has no model 'n'"),
    ):
        with pytest.raises(ConfigError, match=words):
            await change
    assert await version(store) == before


async def test_unreadable_record_affects_its_model_only(admin: RegistryAdmin, store: Store) -> None:
    await admin.add("m", "/x")
    await store.write([("HSET", REGISTRY, "broken", b'{"name": "broken"}')])
    assert (await admin.all())["broken"] is None and (await admin.one("m")).name == "m"
    with pytest.raises(ConfigError, match=r"'broken' is unreadable .*revisions.*: remove it with"):
        await admin.add("broken", "/x")
    await admin.remove("broken")
    assert list(await admin.all()) == ["m"]
