"""The store of receipts against a list of all that were added."""

from __future__ import annotations

import random

from services.gateway.receipts.receipt_store import ENTRY_BYTES, FREED_SHARE, ReceiptStore

TTL_S, MAX_BYTES = 10.0, 64 * 1024
SALT = b"s"


def test_random_operations() -> None:
    rng = random.Random(1)
    store, now, added = ReceiptStore(TTL_S, MAX_BYTES), 0.0, dict[str, tuple[str, bytes, float]]()
    num_found = 0
    for number in range(3000):
        now += rng.expovariate(10)
        tenant, name = f"t{min(5, int(rng.expovariate(1)))}", str(number)
        payload = rng.randbytes(rng.randrange(2000))
        store.add(tenant, name, payload, SALT, now)
        added[name] = tenant, payload, now + TTL_S
        assert store.num_bytes <= MAX_BYTES
        asked = str(rng.randrange(max(0, number - 80), number + 1))
        owner, expected, expires_at = added[asked]
        found = store.read(owner, asked, now)
        assert store.read("other", asked, now) is None
        if found is not None:
            num_found += 1
            assert found.payload == expected
            assert now < expires_at
        if rng.random() < 0.01:
            store.remove_tenant(tenant)
            assert store.read(tenant, name, now) is None
    assert 500 < num_found < 2900
    store.expire(now + TTL_S)
    assert (len(store), store.num_bytes, store._tenants) == (0, 0, {})


def test_busy_tenant_displaces_its_own() -> None:
    store = ReceiptStore(TTL_S, MAX_BYTES)
    store.add("quiet", "first", b"x", SALT, 0.0)
    for number in range(1000):
        store.add("busy", str(number), b"y" * 500, SALT, 0.0)
    assert store.read("quiet", "first", 0.0) is not None
    assert store.read("busy", "999", 0.0) is not None
    assert store.read("busy", "0", 0.0) is None
    least = MAX_BYTES - 2 * (MAX_BYTES // FREED_SHARE) - 500 - ENTRY_BYTES
    assert least <= store.num_bytes <= MAX_BYTES


def test_receipt_larger_than_the_store_is_dropped() -> None:
    store = ReceiptStore(TTL_S, MAX_BYTES)
    store.add("t", "small", b"x", SALT, 0.0)
    store.add("t", "large", b"x" * MAX_BYTES, SALT, 0.0)
    assert store.read("t", "large", 0.0) is None
    assert store.read("t", "small", 0.0) is not None


def test_zero_retention_is_read_once() -> None:
    store = ReceiptStore(TTL_S, MAX_BYTES, is_read_once=True)
    store.add("t", "r", b"x", SALT, 0.0)
    assert store.read("other", "r", 0.0) is None
    assert store.read("t", "r", 0.0) is not None
    assert store.read("t", "r", 0.0) is None
    assert store.num_bytes == 0
