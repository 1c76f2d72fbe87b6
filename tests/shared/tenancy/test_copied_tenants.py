"""Copies of other sites' tenants: what is taken, refused and removed. No I/O."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.messages import MAX_COPIES, SignedCopy, TenantCopies
from shared.tenancy.copied_tenants import CopiedTenants
from shared.tenancy.tenant import TenantRecord, check_tenant_id, digest_of
from shared.tenancy.tenant_copy import CopyRejected, SigningKey, TenantCopy, opened_copy

KEY, OTHER_KEY = SigningKey.of_secret("of a"), SigningKey.of_secret("of c")


def copy_of(name: str = "team", version: int = 1, *keys: str, **fields: Any) -> TenantCopy:
    record = TenantRecord(tenant_id=name, requests_per_min=60, sites=("b",))
    digests = tuple(digest_of(each) for each in keys or (f"key of {name}",))
    made = {"home": "a", "site": "b", "version": version, "record": record}
    return TenantCopy(**{**made, "key_digests": digests, **fields})


def reply(*copies: TenantCopy, key: SigningKey = KEY, **fields: Any) -> TenantCopies:
    made = {
        "gateway_id": "a/gateway",
        "key": key.public,
        "versions": tuple((each.record.tenant_id, each.version) for each in copies),
        "copies": tuple(map(key.sign, copies)),
    }
    return TenantCopies(**{**made, **fields})


def holding(*copies: TenantCopy) -> CopiedTenants:
    copied = CopiedTenants("b")
    assert copied.take("a", reply(*copies), 100.0).rejected == []
    return copied


def test_copy_is_a_tenant_under_its_sites_name() -> None:
    copied = holding(copy_of())
    found = copied.find(digest_of("key of team"))
    assert found is not None and found.confirmed_at == 100.0
    assert found.tenant.tenant_id == "a/team" and found.tenant.requests_per_min == 60
    with pytest.raises(ConfigError, match="'a/team' has its home at site 'a': change it there"):
        check_tenant_id(found.tenant.tenant_id)


def test_confirmation_counts_from_the_question() -> None:
    """A reply confirms what it names; one that comes late does not shorten a later one."""
    copied = holding(copy_of("one"), copy_of("two"))
    named = reply(copies=(), versions=(("one", 1), ("two", 2)))
    assert copied.take("a", named, 200.0).rejected == []
    copied.take("a", named, 150.0)
    one, two = (copied.find(digest_of(f"key of {each}")) for each in ("one", "two"))
    assert one is not None and one.confirmed_at == 200.0
    assert two is not None and two.confirmed_at == 100.0, "version 2 has not arrived yet"
    assert copied.versions("a") == (("one", 1), ("two", 1))
    assert copied.confirmations() == {"a": [200.0, 100.0]}


def test_tenant_and_key_that_are_gone_go_at_once() -> None:
    copied = holding(copy_of("one"), copy_of("two", 1, "old", "kept"))
    changes = copied.take("a", reply(copy_of("two", 2, "kept")), 101.0)
    assert changes.due == {"a/one": "removed"}
    assert changes.stored["a/one"] is None and changes.stored["a/two"] is not None
    assert [copied.find(digest_of(each)) for each in ("key of one", "old")] == [None, None]
    kept = copied.find(digest_of("kept"))
    assert kept is not None and kept.copy.version == 2


def test_key_that_a_home_names_twice_goes_with_its_tenant() -> None:
    copied = holding(copy_of("one", 1, "twice", "twice", "once"), copy_of("two"))
    for kept in (copy_of("one", 2, "once"), copy_of("two")):
        copied.take("a", reply(kept), 101.0)
        assert copied.find(digest_of("twice")) is None
    assert copied.find(digest_of("once")) is None


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (reply(copy_of(version=4)), "site a sent an older copy of 'team' than it had sent"),
        (reply(copy_of(version=6, home="b")), "a copy of a tenant of site 'b'"),
        (reply(copy_of(version=6, home="c")), "a copy of a tenant of site 'c'"),
        (reply(copy_of(version=6, site="c")), "a copy of 'team' for site 'c'"),
        (
            reply(copy_of(version=6, record=TenantRecord(tenant_id="team", sites=("\x1b[2J",)))),
            "the record of 'team' has names that are not printable",
        ),
        (
            reply(copy_of("x"), versions=(("team", 5),)),
            "site a sent a copy that it does not name",
        ),
        (reply(copy_of("a/x"), versions=(("team", 5),)), "'a/x' has its home at site 'a'"),
        (
            reply(copy_of("x", 1, "key of team"), versions=(("team", 5), ("x", 1))),
            "site a sent a copy of 'x' with another tenant's key",
        ),
        (
            reply(copy_of(version=6), copies=(OTHER_KEY.sign(copy_of(version=6)),)),
            "a copy is not signed by the key of its home site",
        ),
        (
            reply(versions=(("team", 5),), copies=(SignedCopy(b"", b"x" * 64),)),
            "a copy is not signed",
        ),
    ],
)
def test_bad_copy_is_refused_in_one_line_and_counted(sent: TenantCopies, reason: str) -> None:
    copied = holding(copy_of(version=5))
    (found,) = copied.take("a", sent, 200.0).rejected
    assert reason in found and "\n" not in found
    assert copied.num_rejected == 1
    held = copied.find(digest_of("key of team"))
    assert held is not None and held.copy == copy_of(version=5)


def test_site_cannot_take_the_key_of_another_sites_tenant() -> None:
    copied = holding(copy_of())
    theirs = copy_of("thief", 1, "key of team", home="c")
    (found,) = copied.take("c", reply(theirs, key=OTHER_KEY), 200.0).rejected
    assert "with another tenant's key" in found
    held = copied.find(digest_of("key of team"))
    assert held is not None and held.tenant.tenant_id == "a/team"
    copied.take("c", reply(key=OTHER_KEY), 201.0)
    assert copied.find(digest_of("key of team")) is held, "no site removes another's tenant"


def test_site_has_a_bounded_number_of_tenants() -> None:
    copied = CopiedTenants("b")
    for first in range(0, MAX_COPIES + 32, 32):
        sent = [copy_of(f"t{number}") for number in range(first, first + 32)]
        held = tuple((name, version) for name, version in copied.versions("a"))
        changes = copied.take("a", reply(*sent, versions=(*held, *reply(*sent).versions)), 1.0)
    assert len(copied.versions("a")) == MAX_COPIES == 256
    assert changes.rejected == [f"site a has more than {MAX_COPIES} tenants for this one"] * 32


def test_stored_copy_is_known_and_not_confirmed() -> None:
    """As after a start: the home site has to confirm it to this process."""
    copied, signed = CopiedTenants("b"), KEY.sign(copy_of())
    copied.restore("a", signed, KEY.public)
    found = copied.find(digest_of("key of team"))
    assert found is not None and found.confirmed_at == -inf
    with pytest.raises(CopyRejected, match="not signed"):
        copied.restore("a", signed, OTHER_KEY.public)


def test_signature_covers_every_byte() -> None:
    signed = KEY.sign(copy_of())
    assert opened_copy(signed, KEY.public) == copy_of()
    for place in range(0, len(signed.body), 7):
        body = bytearray(signed.body)
        body[place] ^= 1
        with pytest.raises(CopyRejected):
            opened_copy(SignedCopy(bytes(body), signed.signature), KEY.public)
    models = tuple(f"{number:0200d}" for number in range(256))
    large = TenantRecord(tenant_id="team", allowed_models=models)
    with pytest.raises(CopyRejected, match="the record of 'team' takes 51"):
        KEY.sign(copy_of(record=large))
