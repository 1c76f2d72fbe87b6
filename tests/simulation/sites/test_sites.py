"""Linked sites under faults of links, of processes and of sites that lie: a handful of schedules.
`scripts/test --long schedules` runs thousands.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shared.subjects import (
    LINKED_COMMANDS,
    command,
    permissions,
    prefix_digest,
    sent_by,
    state_to_sites,
)
from tests.simulation.sites.drawing import sites_plan_of
from tests.simulation.sites.plan import LinkFault, SitesPlan
from tests.simulation.sites.simulation import run_sites, simulate_sites
from tests.simulation.world.fleet import JOIN_S
from tests.support.world.bus import SimulatedNetwork, matches
from tests.support.world.links import LinkedNetworks

FAILED_ONCE = (4953, 7028)  # sites that refuse, or accept and are silent, kept a request


@pytest.mark.parametrize("seed", [*range(6), *FAILED_ONCE])
def test_linked_sites_keep_all_promises(seed: int) -> None:
    outcome = simulate_sites(seed)
    assert outcome.wrongs == [], outcome.replay


def test_schedules_cross_links_and_use_every_fault() -> None:
    plans = [sites_plan_of(seed) for seed in range(100)]
    assert {fault.kind for plan in plans for fault in plan.faults} == {
        *("cut", "flap", "slow", "stall", "one_way")
    }
    assert {plan.lie for plan in plans} == {None, "refuses", "is_silent", "accepts"}


def _networks() -> LinkedNetworks:
    networks = {name: SimulatedNetwork() for name in "abc"}
    pairs = [("a", "b"), ("a", "c")]
    return LinkedNetworks(networks, {"a": "eu", "b": "us"}, delay_s=0.0, pairs=pairs)


def test_what_crosses_a_link_is_what_processes_may_send_and_receive() -> None:
    """The accounts, which the model reads, and the permissions of processes name the same
    subjects, and no third site gets any.
    """
    accounts = _networks().accounts
    senders = {
        role: permissions(role, role, "eu", is_linked=True) for role in ("gateway", "scheduler")
    }
    crossing = {command(role, "b/gateway.1", verb) for role, verb in LINKED_COMMANDS}
    crossing ^= {command("scheduler", "b/gateway.1", "digest"), prefix_digest("b")}
    for subject, sender in product((*crossing, state_to_sites("gateway.1")), senders):
        sent = sent_by(subject, f"{sender}.1")
        may_send = any(matches(each, sent) for each in senders[sender].publish)
        arrivals = [
            each
            for peer, on_link in accounts["a"].leaving(sent)
            for each in accounts[peer].arriving("a", on_link)
        ]
        read = [each for sender in senders.values() for each in sender.subscribe]
        is_read = [any(matches(each, at) for each in read) for at in arrivals]
        if may_send:
            assert is_read == [True] * len(arrivals) and arrivals, sent
    for subject in crossing:
        assert len(accounts["a"].leaving(sent_by(subject, "gateway.1"))) == 1
        assert accounts["c"].arriving("b", sent_by(subject, "gateway.1")) == []
    for subject in ("hearth.v1.scheduler.any.submit", "hearth.v1.site.b.decode.x.-.list_blocks"):
        assert accounts["a"].leaving(sent_by(subject, "gateway.1")) == []


def test_sites_serve_their_own_while_the_link_is_cut() -> None:
    plans = map(sites_plan_of, range(100))
    plan = next(each for each in plans if len(each.sites) == 2 and _can_serve_alone(each))
    cut = LinkFault(at_s=-JOIN_S, kind="cut", first="a", second="b", duration_s=60.0)
    outcome = run_sites(replace(plan, faults=(cut,), lie=None))
    assert (outcome.wrongs, outcome.num_crossed) == ([], 0)
    assert outcome.endings["finished"] > 6


def _can_serve_alone(plan: SitesPlan) -> bool:
    return all(each.fleet.worker_ids and not each.faults for each in plan.sites.values())
