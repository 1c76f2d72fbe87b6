"""The tokens that wait for the gateway of another site."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from services.gateway.sites.site_placements import SitePlacements
from services.gateway.sites.site_requests import MAX_TOKENS_PER_S
from shared.errors import WorkerBusy
from shared.messages import Choice, StartDecode, TokenLogprobs
from shared.packing import pack_token_ids
from tests.services.scheduler.literals import submit_of
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import run
from tests.support.world.gateway import StreamGateway


def test_prompt_logprobs_are_sent_once() -> None:
    """They take megabytes, and are the same for all choices."""
    made = submit_of("r", gateway_id="b/gw").request
    choices = tuple(Choice(choice_index=index) for index in range(3))
    command = StartDecode(
        placement_id=b"p" * 16, request=msgspec.structs.replace(made, choices=choices)
    )
    placements = SitePlacements(lambda: None, max_held=1)
    receiver = placements.open(command, command.request, "a/gw/00ff", 0.0)
    receiver.on_prompt_logprobs([TokenLogprobs(logprob=-1.0)] * 4)
    for index in range(3):
        receiver.on_tokens(index, [1], [])
    batches = [batch.entries for _, batch in placements.take(0.0)]
    assert [[len(each.prompt_logprobs) for each in entries] for entries in batches] == [[4], [0, 0]]


def test_other_sites_leave_room_for_the_requests_of_this_one() -> None:
    request = submit_of("r", gateway_id="b/gw").request
    placements = SitePlacements(lambda: None, max_held=2)
    for number in range(2):
        order = StartDecode(placement_id=bytes([number]) * 16, request=request)
        placements.open(order, request, "a/gw/00ff", 0.0)
    more = StartDecode(placement_id=b"p" * 16, request=request)
    with pytest.raises(WorkerBusy):
        placements.open(more, request, "a/gw/00ff", 0.0)
    placements.close(bytes(16))
    placements.open(more, request, "a/gw/00ff", 0.0)


def test_one_site_leaves_room_for_another() -> None:
    placements, numbers = SitePlacements(lambda: None, max_held=10), count()

    def fill(site: str) -> int:
        request = submit_of("r", gateway_id=f"{site}/gw").request
        for num_open in range(20):
            order = StartDecode(placement_id=b"%016d" % next(numbers), request=request)
            try:
                placements.open(order, request, "a/gw/00ff", 0.0)
            except WorkerBusy:
                return num_open
        return 20

    assert [fill("b"), fill("c"), fill("b")] == [8, 2, 0]
    placements.close(b"%016d" % 0)
    assert [fill("b"), fill("c"), fill("d")] == [0, 1, 0]


def test_a_gateway_with_enough_of_other_sites_hashes_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        sites = StreamGateway(SimulatedNetwork(), "gw", seed=1, site="b").sites
        monkeypatch.setattr(sites, "_check_capacity", lambda: None)
        monkeypatch.setattr(sites._placements, "_max_held", 0)
        hashed: list[StartDecode] = []
        monkeypatch.setattr(sites, "_request", hashed.append)
        command = StartDecode(placement_id=bytes(16), request=submit_of("r").request)
        with pytest.raises(WorkerBusy, match="as many requests of other sites"):
            sites._start_decode(command)
        assert hashed == []

    run(test())


def test_site_may_send_so_many_tokens_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs time of this process, also of a request that is aborted at once."""

    async def test() -> None:
        sites = StreamGateway(SimulatedNetwork(), "gw", seed=1, site="b").sites
        monkeypatch.setattr(sites, "_check_capacity", lambda: None)
        half = pack_token_ids(range(MAX_TOKENS_PER_S // 2))
        made = submit_of("r", gateway_id="a/gw").request
        long = msgspec.structs.replace(made, prompt_token_ids=half)
        outputs = (Choice(choice_index=0, output_token_ids=half),)
        continued = msgspec.structs.replace(made, prompt_token_ids=b"", choices=outputs)
        for request, reason in (
            (long, "no worker of this site serves"),
            (continued, "no worker of this site serves"),
            (made, "site a sends more than 1000000 tokens a second"),
            (msgspec.structs.replace(made, gateway_id="c/gw"), "no worker of this site serves"),
        ):
            with pytest.raises(WorkerBusy, match=reason):
                sites._start_decode(StartDecode(placement_id=bytes(16), request=request))

    run(test())
