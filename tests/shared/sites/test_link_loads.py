"""What a process sees of its links, on a clock that the test sets."""

from __future__ import annotations

import structlog

from shared.messages import MAX_LINKS, LinkLoad
from shared.sites.link_loads import CUT_S, FORGET_CUT_S, MAX_PROBLEM, LinkLoads
from shared.subjects import ANY
from shared.transport.site_bytes import SiteBytes


class Seen:
    def __init__(self, *expected: str) -> None:
        self.bytes = SiteBytes()
        self.links = LinkLoads(expected, self.bytes, 0.0)

    def at(self, now: float, *, can_judge: bool = True) -> tuple[LinkLoad, ...]:
        return self.links.loads(now, {"b/": 0.02}.get, can_judge=can_judge)

    def states(self, site: str, *times: float) -> None:
        for now in times:
            self.links.heard(site, "eu", now)
            self.at(now)


def test_a_link_is_cut_without_states_and_connected_with_the_next_one() -> None:
    seen = Seen()
    with structlog.testing.capture_logs() as logs:
        seen.states("b", 0.0, 1.0, 2.0)
        (link,) = seen.at(2.0 + CUT_S)
        assert (link.site, link.region, link.is_cut, link.round_trip_s) == ("b", "eu", False, 0.02)
        (link,) = seen.at(9.0)
        assert (link.is_cut, link.changed_s, link.round_trip_s) == (True, 7.0, None)
        seen.states("b", 10.0)
    (link,) = seen.at(12.0)
    assert (link.is_cut, link.changed_s, link.num_states) == (False, 2.0, 4)
    assert [each["event"] for each in logs] == ["link_cut", "link_connected"]


def test_a_process_that_is_cut_off_from_its_own_server_judges_no_link() -> None:
    seen = Seen()
    seen.states("b", 0.0)
    for now in (5.0, 60.0):
        assert not seen.at(now, can_judge=False)[0].is_cut
    assert not seen.at(61.0)[0].is_cut, "the first state may still be on its way"
    assert seen.at(60.1 + CUT_S)[0].is_cut


def test_a_link_that_never_worked_is_cut_and_stays_so() -> None:
    seen = Seen("c")
    assert not seen.at(1.0)[0].is_cut
    (link,) = seen.at(CUT_S + 1)
    assert (link.site, link.is_cut, link.changed_s) == ("c", True, CUT_S + 1)
    seen.states("b", 10.0)
    seen.at(20.0)
    (link,) = seen.at(30.0 + FORGET_CUT_S)
    assert link.site == "c", "a site that nobody expects is forgotten after a day"


def test_what_goes_to_all_sites_crosses_connected_links_alone() -> None:
    seen = Seen()
    seen.states("b", 0.0)
    seen.bytes.sent.update({ANY: 100, "b": 7})
    seen.bytes.received["b"] = 5
    seen.at(1.0)
    assert seen.at(20.0)[0].is_cut
    seen.bytes.sent[ANY] += 1000
    (link,) = seen.at(21.0)
    assert (link.sent_bytes, link.received_bytes) == (107, 5)


def test_links_that_are_cut_are_reported_first() -> None:
    seen = Seen()
    for number in range(MAX_LINKS + 1):
        seen.states(f"s{number:03}", 0.0 if number == MAX_LINKS else 5.0)
    links = seen.at(6.0)
    assert len(links) == MAX_LINKS
    assert [each.site for each in links if each.is_cut] == [links[0].site] == [f"s{MAX_LINKS:03}"]


def test_the_reason_for_refused_states_stays_as_long_as_they_come() -> None:
    """A site may send good states as well, as when another one has its key."""
    seen = Seen()
    seen.states("b", 0.0)
    seen.links.refused("b", "a\x1b[2Jreason" + "." * 1000, 0.5)
    (link,) = seen.at(1.0)
    assert (link.is_cut, len(link.problem)) == (False, MAX_PROBLEM)
    assert link.problem.startswith(r"a\x1b[2Jreason")
    assert seen.at(0.6 + CUT_S)[0].problem == ""


def test_counts_are_of_links_that_are_known() -> None:
    seen = Seen()
    seen.links.count("b", "num_placed")
    seen.states("b", 0.0)
    seen.links.count("b", "num_placed")
    assert seen.at(0.0)[0].num_placed == 1
