"""Whatever an index says, a request is placed once, on a worker that is there: it costs time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import subjects
from shared.errors import HearthError
from shared.messages import Done, MatchPrefix, Message, Placed, PrefixMatch, PrefixMatches
from shared.transport.bus import failure_of
from tests.services.scheduler.literals import submit_of
from tests.services.scheduler.rig import Rig
from tests.simulation.world.clock import run

LARGEST = 2**53


def matches(*pairs: tuple[str, int]) -> PrefixMatches:
    found = tuple(PrefixMatch(worker_id=name, num_blocks=count) for name, count in pairs)
    return PrefixMatches(state="exact", matches=found)


class Torn(Message, frozen=True, kw_only=True, tag="PrefixMatches"):
    """Looks like an answer."""

    state: Any = "exact"
    matches: Any = ()


NONSENSE: dict[str, Message] = {
    "unknown workers": matches(("nobody", 3), ("", 2), ("gateway-0", 9)),
    "more blocks than asked": matches(("decode-0", LARGEST), ("prefill-0", LARGEST)),
    "one worker again and again": matches(*[("decode-0", count) for count in (0, 9, 1)] * 500),
    "a prefill worker as decode": matches(("prefill-0", 2)),
    "negative": Torn(matches=[{"worker_id": "decode-0", "num_blocks": -4}]),
    "no number": Torn(matches=[{"worker_id": "decode-0", "num_blocks": "many"}]),
    "no list": Torn(matches={"decode-0": 4}),
    "no state": Torn(state="fine"),
    "another message": Done(),
    "a failure": failure_of(HearthError("out of order")),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("has_prefill", [False, True])
def test_a_request_is_placed_once_on_a_worker_that_is_there(
    answer: Message, has_prefill: bool
) -> None:
    async def play() -> None:
        rig = Rig()
        await rig.start()
        bus = rig.network.bus("kv_index-0")
        asked: list[MatchPrefix] = []

        def match(question: MatchPrefix) -> Message:
            asked.append(question)
            return answer

        await bus.serve(subjects.MATCH, MatchPrefix, match, queue=subjects.KV_INDEX_GROUP)
        workers = [await rig.worker("decode-0"), await rig.worker("decode-1")]
        if has_prefill:
            await rig.worker("prefill-0", "prefill")
        await rig.submit(submit_of("r", num_prompt_tokens=100))
        ending = await rig.ending()
        assert isinstance(ending, Placed), ending
        await asyncio.sleep(1)
        assert len(asked) == 1
        assert [ending.placement_id] == [
            start.placement_id for worker in workers for start in worker.started
        ]
        for worker in workers:
            for start in worker.started:
                assert set(start.prefill_candidates) <= {"prefill-0"}
        await rig.service.stop()

    run(play())
