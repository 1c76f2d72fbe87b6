"""Several requests of one response: some are open at once."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from services.gateway.streams.actions import Submit
from services.gateway.streams.queued_openings import MAX_OPEN, MAX_TENANT_OPEN, Opening
from services.gateway.streams.streams import Streams
from shared.errors import HearthError, Overloaded
from shared.messages import Placed, Request, SubmitRequest, TokenBatch, TokenEntry
from tests.services.gateway.streams.test_streams import STOP, Recorder, request


class Response:
    """Of `count` requests, `r0` and so on. `streams`: also of other responses."""

    def __init__(
        self,
        count: int,
        streams: Streams | None = None,
        name: str = "r",
        *,
        is_queueable: bool = True,
    ) -> None:
        self.streams = Streams("g") if streams is None else streams
        self.now = 10.0
        self.clients = {f"{name}{number}": Recorder() for number in range(count)}
        openings = [
            Opening(request(name), client, is_queueable=is_queueable)
            for name, client in self.clients.items()
        ]
        self.streams.open(openings, self.now)

    def submitted(self) -> list[Request]:
        return [each.request for each in self.messages()]

    def messages(self) -> list[SubmitRequest]:
        actions = self.streams.take_actions()
        return [each.message for each in actions if isinstance(each, Submit)]

    def finish(self, name: str) -> None:
        placement_id = name.encode().ljust(16)
        placed = Placed(request_id=name, placement_id=placement_id, worker_id="w1")
        self.streams.on_placed(placed, self.now)
        entry = TokenEntry(placement_id, 0, 0, (5,), STOP)
        self.streams.on_token_batch(TokenBatch(worker_id="w1", entries=(entry,)), self.now)

    @property
    def num_ended(self) -> int:
        return sum(bool(each.ends) for each in self.clients.values())


def test_requests_of_a_response_open_in_their_order() -> None:
    response = Response(MAX_OPEN + 6)
    assert [each.request_id for each in response.submitted()] == [f"r{n}" for n in range(MAX_OPEN)]
    assert len(response.streams) == MAX_OPEN
    response.now += 20.0
    for number in (3, 0, 7):
        response.finish(f"r{number}")
    later = response.submitted()
    assert [each.request_id for each in later] == [f"r{MAX_OPEN + n}" for n in range(3)]
    assert {each.deadline_s for each in later} == {40.0}  # from the beginning of the response
    response.streams.on_rejected(f"r{MAX_OPEN}", 1, Overloaded("full"), response.now)
    assert not response.clients[f"r{MAX_OPEN}"].ends  # the client may have a part of its response
    response.now += 1.0
    response.streams.tick(response.now, is_bus_trusted=True)
    assert [each.request_id for each in response.submitted()] == [f"r{MAX_OPEN}"]
    for name in response.clients:
        if not response.clients[name].ends:
            response.finish(name)
    assert response.num_ended == MAX_OPEN + 6 and not len(response.streams)


def test_failed_request_ends_those_that_wait() -> None:
    response = Response(MAX_OPEN + 6)
    response.submitted()
    response.streams.on_rejected("r5", 1, Overloaded("full"), response.now)
    assert response.num_ended == 7 and not response.submitted()
    assert isinstance(response.clients[f"r{MAX_OPEN}"].error, Overloaded)
    for number in range(MAX_OPEN):
        response.finish(f"r{number}")
    assert not response.submitted() and not len(response.streams)


def test_client_whose_end_raises_holds_up_no_other_request() -> None:
    response = Response(MAX_OPEN + 1)
    response.submitted()
    with patch.object(response.clients["r0"], "on_end", side_effect=KeyError("missing")):
        response.finish("r0")
    assert [each.request_id for each in response.submitted()] == [f"r{MAX_OPEN}"]
    for number in range(1, MAX_OPEN + 1):
        response.finish(f"r{number}")
    assert response.num_ended == MAX_OPEN and not len(response.streams)


@pytest.mark.parametrize("first", [0, MAX_OPEN + 1])
def test_left_response_opens_no_more(first: int) -> None:
    """Closed in any order."""
    response = Response(MAX_OPEN + 6)
    response.submitted()
    error = HearthError("the client is gone")
    names = [*response.clients]
    for name in names[first:] + names[:first]:
        response.streams.close(name, "client_gone", error, response.now)
    assert not response.submitted() and not len(response.streams)
    assert [each.error for each in response.clients.values()] == [error] * len(names)
    response.streams.close("r0", "client_gone", error, response.now)


def test_deadline_ends_those_that_wait() -> None:
    response = Response(MAX_OPEN + 1)
    response.streams.tick(response.now + 60.0, is_bus_trusted=True)
    assert response.num_ended == MAX_OPEN + 1


@pytest.mark.parametrize(
    "sizes",
    [
        *([600], [600, 600, 8], [40] * 100),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ([600] * 3, [300] * 63, [1] * 600 + [500, 500])
        ),
    ],
)
def test_responses_of_one_tenant_have_a_bounded_number_open(sizes: list[int]) -> None:
    streams = Streams("g")
    responses = [Response(size, streams, f"{n}-") for n, size in enumerate(sizes)]
    for _ in range(min(sum(sizes), 3000)):
        running = streams.request_ids()
        assert len(running) <= MAX_TENANT_OPEN + len(sizes) - 1
        responses[0].finish(running[0])
    assert all(each.num_ended for each in responses)


def test_room_of_one_response_goes_to_another() -> None:
    """Of the same tenant, after a failure, too."""
    streams = Streams("g")
    first, second, third = (Response(600, streams, name) for name in "abc")
    assert [*map(num_running, (first, second, third))] == [MAX_OPEN, MAX_OPEN, 1]
    for number in range(100):
        first.finish(f"a{number}")
    assert [*map(num_running, (first, second, third))] == [MAX_OPEN - 100, MAX_OPEN, 100]
    for name in [each for each in streams.request_ids() if each.startswith("b")]:
        streams.close(name, "client_gone", HearthError("the client is gone"), 10.0)
    assert second.num_ended == 600
    assert [*map(num_running, (first, third))] == [MAX_OPEN, MAX_OPEN]


def test_room_goes_to_the_response_that_came_first() -> None:
    """Of those with the fewest open requests."""
    streams = Streams("g")
    first, _, *others = (Response(600, streams, f"{n}-") for n in range(22))
    first.submitted()
    for number in range(2 * len(others)):
        first.finish(f"0-{number}")
    assert [each.request_id for each in first.submitted()] == [f"{n}-1" for n in range(2, 22)]


def test_response_that_began_in_a_full_gateway_grows_with_its_room() -> None:
    """Each end opens two while there is room for both, and one in any case."""
    limits = [3]
    streams = Streams("g", lambda: limits[-1] - len(streams))
    response = Response(40, streams)
    Response(1, streams, "other")  # takes room of the gateway, too
    num_open = [num_running(response)]
    for number, limit in enumerate((3, 4, 9, 9, 9, 9, 9, 9, 1)):
        limits.append(limit)
        response.finish(f"r{number}")
        num_open.append(num_running(response))
    assert num_open == [3, 3, 3, 4, 5, 6, 7, 8, 8, 8]


def test_request_may_wait_for_a_worker_once_its_response_has_output() -> None:
    """The output of another response of the tenant, which leaves it room, does not count."""
    streams = Streams("g")
    first, _, third = (Response(600, streams, name, is_queueable=False) for name in "abc")
    first.messages()
    for number in range(2):
        first.finish(f"a{number}")
    (message,) = first.messages()
    assert (message.request.request_id, message.is_queueable) == ("c1", False)
    third.finish("c0")
    (message,) = first.messages()
    assert (message.request.request_id, message.is_queueable) == ("c2", True)


def num_running(response: Response) -> int:
    return sum(each in response.clients for each in response.streams.request_ids())
