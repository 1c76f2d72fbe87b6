"""Where KV may go that one site computes for another."""

from __future__ import annotations

import msgspec
import pytest

from shared.errors import InvalidRequest
from shared.kv_layout import KvShard
from shared.messages import DataPlaneAddress, KvTarget, KvTargets, LinkKey, LinkSecurity
from shared.sites.kv_targets import (
    MAX_TARGETS,
    check_networks,
    check_sealed,
    check_targets_of_site,
    kv_from_sites_problem,
    networks_of,
    targets_for_sites,
)
from tests.support.world.site_prefills import run_prefill_of_site

NETWORKS = networks_of(["10.2.0.0/16", "fd00::/8"])


def targets_at(*hosts: str, unix_path: str = "") -> KvTargets:
    shard = KvShard(0, 1, 0, 1)
    return tuple(
        KvTarget(
            shard=shard,
            address=DataPlaneAddress(host=each, port=1, unix_path=unix_path, instance_id=b"i"),
        )
        for each in hosts
    )


@pytest.mark.parametrize("host", ["10.2.0.1", "10.2.255.255", "fd12::1"])
def test_address_in_a_network_is_accepted(host: str) -> None:
    check_networks(targets_at(host), NETWORKS)


@pytest.mark.parametrize(
    "host", ["10.3.0.1", "127.0.0.1", "::1", "::ffff:10.2.0.1", "metadata.internal", "", "10.2.1"]
)
def test_any_other_address_is_refused_in_one_line(host: str) -> None:
    """A name may be another address a moment later."""
    with pytest.raises(InvalidRequest, match=r"is in no network of --kv-networks$") as caught:
        check_networks(targets_at("10.2.0.1", host), NETWORKS)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("security", [None, "mac"])
def test_kv_between_sites_is_encrypted(security: LinkSecurity | None) -> None:
    key = security and LinkKey(key_id=bytes(16), key=bytes(32), security=security)
    with pytest.raises(InvalidRequest, match="KV between sites is encrypted"):
        check_sealed(key or None)


def test_socket_of_this_host_is_no_target_of_another_site() -> None:
    own = targets_at("10.2.0.1", unix_path="/run/kv")
    assert targets_for_sites(own) == targets_at("10.2.0.1")
    command = run_prefill_of_site("a", targets=targets_for_sites(own))
    check_targets_of_site(command)
    for targets in (own, (), targets_at("10.2.0.1") * (MAX_TARGETS + 1)):
        with pytest.raises(InvalidRequest):
            check_targets_of_site(msgspec.structs.replace(command, targets=targets))


def test_worker_that_no_site_can_reach_says_why() -> None:
    assert kv_from_sites_problem("aead", targets_at("10.2.0.1")) is None
    assert "data_plane_security is none" in (kv_from_sites_problem("none", ()) or "")
    named = kv_from_sites_problem("aead", targets_at("worker-1"))
    assert named == "data_plane_advertised_host 'worker-1' is no IP address, which links need"
