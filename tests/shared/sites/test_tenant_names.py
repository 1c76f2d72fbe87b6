"""The names of other sites' tenants: an order that names a tenant reaches what is held of it."""

from __future__ import annotations

from random import Random

import pytest

from shared.errors import ConfigError
from shared.sites.tenant_names import NUM_SHARED, SiteTenantNames, names_of
from shared.tenancy.tenant import check_tenant_id

TENANTS = [f"a/tenant-{number}" for number in range(2_000)]


def test_each_process_names_a_tenant_as_an_order_finds_it() -> None:
    """Each process has met the tenants in another order."""
    for seed in range(3):
        names, met = SiteTenantNames(max_named=50), Random(seed).sample(TENANTS, len(TENANTS))
        given = {each: names.of(each) for each in met}
        assert all(name in names_of(tenant) for tenant, name in given.items())
        assert [given[each] for each in met[:50]] == met[:50]
        assert len({*given.values()}) <= 50 + NUM_SHARED
        assert given == {each: names.of(each) for each in met}, "for the life of the process"


def test_a_shared_name_costs_few_others_what_is_cached() -> None:
    shared = [names_of(each)[1] for each in TENANTS]
    assert max(map(shared.count, {*shared})) < 4 * len(TENANTS) / NUM_SHARED


def test_a_shared_name_is_that_of_no_tenant_and_of_one_site() -> None:
    own, shared = names_of("a/acme")
    assert own == "a/acme" and shared.startswith("a/+") and shared != names_of("b/acme")[1]
    with pytest.raises(ConfigError, match="starting with a letter or digit"):
        check_tenant_id(shared.removeprefix("a/"))


def test_a_tenant_of_this_site_has_its_own_name_alone() -> None:
    assert names_of("acme") == ("acme",)
