"""What a cache by tenant retains."""

from __future__ import annotations

from services.gateway.structured.grammars.tenant_cache import Bounds, TenantCache

LARGE = Bounds(100, 1000)


def cache(bounds: Bounds = LARGE, of_tenant: Bounds = LARGE) -> TenantCache[str]:
    return TenantCache(bounds, of_tenant=of_tenant)


def put(it: TenantCache[str], tenant_id: str, keys: str, num_bytes: int = 1) -> None:
    for key in keys:
        it.put(tenant_id, key.encode(), f"{tenant_id}{key}", num_bytes)


def known(it: TenantCache[str], tenant_id: str, keys: str) -> str:
    return "".join(key for key in keys if it.get(tenant_id, key.encode()) is not None)


def test_tenants_see_their_own_values() -> None:
    it = cache()
    put(it, "a", "x")
    assert it.get("a", b"x") == "ax" and it.get("b", b"x") is None


def test_tenant_of_many_values_pushes_out_no_others() -> None:
    it = cache(of_tenant=Bounds(2, 1000))
    put(it, "quiet", "r")
    put(it, "busy", "abcd")
    assert known(it, "quiet", "r") == "r" and known(it, "busy", "abcd") == "cd"


def test_least_recently_used_value_leaves() -> None:
    it = cache(of_tenant=Bounds(2, 1000))
    put(it, "t", "ab")
    assert known(it, "t", "a") == "a"
    put(it, "t", "c")
    assert known(it, "t", "abc") == "ac"


def test_least_recently_used_tenant_loses_first() -> None:
    it = cache(Bounds(3, 1000))
    put(it, "a", "xy")
    put(it, "b", "z")
    put(it, "c", "z")
    assert known(it, "a", "xy") == "y" and known(it, "b", "z") == known(it, "c", "z") == "z"


def test_bytes_are_bounded() -> None:
    it = cache(Bounds(100, 10), of_tenant=Bounds(100, 8))
    put(it, "a", "xy", num_bytes=4)
    put(it, "a", "z", num_bytes=9)  # more than a tenant may have
    assert known(it, "a", "xyz") == "xy"
    put(it, "a", "y", num_bytes=5)  # in place of the same
    assert known(it, "a", "xy") == "y"
    put(it, "b", "x", num_bytes=6)
    assert known(it, "a", "y") == "" and known(it, "b", "x") == "x"
