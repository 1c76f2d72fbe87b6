"""Streams for which home has no room, while a linked site has some: in virtual time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from services.gateway.streams import moves
from shared.engine.executors.timing_executor import FIRST_TOKEN_ID, StepCost
from shared.messages import TokenLogprobs
from tests.simulation.plan import Plan, RequestPlan
from tests.simulation.scenarios import fleets
from tests.simulation.scenarios.fleets import patient_request
from tests.simulation.sites.plan import LinkFault, SitesPlan
from tests.simulation.sites.simulation import run_sites
from tests.simulation.world.client import Client
from tests.simulation.world.fleet import JOIN_S

CUT_S = 8.0
CUT = LinkFault(at_s=0.0, kind="cut", first="a", second="b", duration_s=CUT_S)
# four answers of 190 tokens take 48 blocks, and their prompts 12
FLEET = replace(
    fleets.FLEET, num_decode=0, num_both=1, num_blocks=16, cost=StepCost(base_s=0.1, per_token_s=0)
)


def request(number: int, *, at_s: float, max_tokens: int) -> RequestPlan:
    first = FIRST_TOKEN_ID + number
    return patient_request(number, range(first, first + 40), at_s=at_s, max_tokens=max_tokens)


REQUESTS = tuple(request(n, at_s=1.0, max_tokens=150) for n in range(4))


def plan_with(*faults: LinkFault) -> SitesPlan:
    home = Plan(seed=1, fleet=FLEET, requests=REQUESTS, faults=())
    far = replace(home, fleet=replace(FLEET, num_blocks=64), requests=())
    regions = {"a": "eu", "b": "us"}
    return SitesPlan(
        seed=1, sites={"a": home, "b": far}, regions=regions, delay_s=0.05, faults=faults
    )


def plan_of_two_workers() -> SitesPlan:
    """Two long answers at one worker at home, and two short ones at the other one."""
    alone = plan_with()
    fleet = replace(FLEET, num_both=2, num_blocks=32, cost=StepCost(base_s=0.05, per_token_s=0))
    lengths = enumerate((400, 60, 400, 60))
    requests = tuple(request(n, at_s=1.0 + n / 20, max_tokens=num) for n, num in lengths)
    home = replace(alone.sites["a"], fleet=fleet, requests=requests)
    return replace(alone, sites={**alone.sites, "a": home}, faults=())


def longest_pause_s(plan: SitesPlan, monkeypatch: pytest.MonkeyPatch) -> float:
    """Returns the longest time between two tokens of an answer, which all end well."""
    times = defaultdict[str, list[float]](list)
    on_tokens = Client.on_tokens

    def recording(
        self: Client, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        times[self.plan.request_id].append(asyncio.get_running_loop().time())
        return on_tokens(self, choice_index, token_ids, logprobs)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "on_tokens", recording)
        outcome = run_sites(plan)
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": len(REQUESTS)}
    return max(b - a for each in times.values() for a, b in pairwise(each))


@pytest.mark.parametrize(("faults", "most_s"), [((), 0.0), ((CUT,), JOIN_S + CUT_S)])
def test_stream_goes_on_where_there_is_room(
    faults: tuple[LinkFault, ...], most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_s = longest_pause_s(plan_with(*faults), monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(moves, "MAX_MOVES", 0)
        before_s = longest_pause_s(plan_with(*faults), patch)
    assert before_s > 15.0
    assert pause_s < max(most_s, moves.MIN_PAUSE_S) + moves.MAX_RETRY_S


def test_stream_goes_on_at_another_worker_of_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full one, which has both roles, computes no prompt for it."""
    plan = plan_of_two_workers()
    pause_s = longest_pause_s(plan, monkeypatch)
    assert pause_s < moves.MIN_PAUSE_S + 1.0
