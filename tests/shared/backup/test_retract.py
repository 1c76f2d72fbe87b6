"""What a list takes back of a backup."""

from __future__ import annotations

import msgspec
import pytest

from shared.backup.records import StoredKey, StoredTenant
from shared.backup.retract import CLOCKS_S, Retracted, allows_texts
from shared.tenancy.deletion.retractions import Retraction, of_key, of_removal, of_retention, united
from shared.tenancy.tenant import ApiKeyRecord, TenantRecord, decoded_tenant

MADE_AT = 1_000.0
TENANT = TenantRecord(tenant_id="acme", created_at=100.0, concurrency=4)
KEY = ApiKeyRecord(tenant_id="acme", key_id="k", created_at=100.0)


def stored(record: TenantRecord = TENANT, key: ApiKeyRecord = KEY) -> StoredTenant:
    keys = (StoredKey(key_id=key.key_id, digest="d", record=key),)
    return StoredTenant(tenant_id="acme", record=msgspec.json.encode(record), keys=keys)


def applied(*entries: Retraction, tenant: StoredTenant | None = None) -> StoredTenant | None:
    return Retracted(entries, MADE_AT).applied(tenant or stored())


def record_of(*entries: Retraction) -> TenantRecord | None:
    found = applied(*entries)
    assert found is not None
    return decoded_tenant(found.record)


def key_of(*entries: Retraction, key: ApiKeyRecord = KEY) -> ApiKeyRecord:
    found = applied(*entries, tenant=stored(key=key))
    assert found is not None
    return found.keys[0].record


def test_without_entries_nothing_changes() -> None:
    assert applied() == stored()


@pytest.mark.parametrize("at", [1.0, MADE_AT, 9_999.0])
def test_removed_tenant_is_out_whenever_that_was(at: float) -> None:
    assert applied(of_removal(TENANT, at, with_usage=False)) is None


def test_tenant_made_anew_is_another_one() -> None:
    before = msgspec.structs.replace(TENANT, created_at=50.0)
    assert applied(of_removal(before, 99.0, with_usage=True)) == stored()


def test_key_ends_when_it_was_ended() -> None:
    assert key_of(of_key(KEY, "other", 2.0, field="revoked_at", ends_at=2.0)) == KEY
    revoked = of_key(KEY, "d", 2_000.0, field="revoked_at", ends_at=2_000.0)
    late = of_key(KEY, "d", 2_000.0, field="expires_at", ends_at=9_000.0)
    soon = of_key(KEY, "d", 2_000.0, field="expires_at", ends_at=3_000.0)
    assert key_of(revoked).revoked_at == 2_000.0
    assert key_of(soon, late).expires_at == key_of(late, soon).expires_at == 3_000.0
    ended = msgspec.structs.replace(KEY, expires_at=2_500.0)
    assert key_of(late, key=ended).expires_at == 2_500.0


def test_client_made_anew_is_another_one() -> None:
    entry = of_key(KEY, "d", 2.0, field="revoked_at", ends_at=2.0)
    anew = msgspec.structs.replace(KEY, created_at=200.0)
    assert key_of(entry, key=anew) == anew


def test_last_change_of_retention_counts_if_it_is_later_than_the_backup() -> None:
    def change(at: float, **fields: object) -> Retraction:
        return of_retention(msgspec.structs.replace(TENANT, **fields), at)

    off_again = [change(2_000.0, is_zero_retention=True), change(3_000.0)]
    assert record_of(*off_again) == TENANT
    assert record_of(change(MADE_AT - CLOCKS_S - 1, is_zero_retention=True)) == TENANT
    found = record_of(change(MADE_AT - 1, is_zero_retention=True, allowed_regions=("eu",)))
    assert found == msgspec.structs.replace(TENANT, is_zero_retention=True, allowed_regions=("eu",))


def test_lists_are_united_in_the_order_of_their_times() -> None:
    first, second = (of_retention(TENANT, at) for at in (1.0, 2.0))
    assert united([second], [first, second], []) == [first, second]


def test_texts_are_allowed_where_they_were() -> None:
    def is_allowed(before: dict[str, object], now: dict[str, object]) -> bool:
        changed = (msgspec.structs.replace(TENANT, **each) for each in (before, now))
        return allows_texts(*changed)

    eu, both = {"allowed_regions": ("eu",)}, {"allowed_regions": ("eu", "us")}
    classed = {"region_class": "gdpr"}
    assert all(is_allowed({}, each) for each in ({}, {"concurrency": 1}))
    assert is_allowed(eu, both)
    assert is_allowed(eu, {})
    assert is_allowed(classed, classed)
    assert is_allowed(classed, {})
    for before, now in ((both, eu), ({}, eu), ({}, classed), ({}, {"created_at": 101.0})):
        assert not is_allowed(before, now)
    assert not is_allowed({}, {"is_zero_retention": True})
