"""An invalid reply of the index costs time only: each request is placed once, on a live worker."""

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
from tests.support.world.clock import run

LARGEST = 2**53


def matches(*pairs: tuple[str, int]) -> PrefixMatches:
    found = tuple(PrefixMatch(worker_id=name, num_blocks=count) for name, count in pairs)
    return PrefixMatches(state="exact", matches=found)


class AnyMatches(Message, frozen=True, kw_only=True, tag="PrefixMatches"):
    """Has the tag of PrefixMatches, but fields of any type."""

    state: Any = "exact"
    matches: Any = ()


INVALID_REPLIES: dict[str, Message] = {
    "unknown workers": matches(("nobody", 3), ("", 2), ("gateway-0", 9)),
    "more blocks than requested": matches(("decode-0", LARGEST), ("prefill-0", LARGEST)),
    "one worker repeatedly": matches(*[("decode-0", count) for count in (0, 9, 1)] * 500),
    "a prefill worker as decode": matches(("prefill-0", 2)),
    "negative": AnyMatches(matches=[{"worker_id": "decode-0", "num_blocks": -4}]),
    "not a number": AnyMatches(matches=[{"worker_id": "decode-0", "num_blocks": "many"}]),
    "not a list": AnyMatches(matches={"decode-0": 4}),
    "unknown state": AnyMatches(state="fine"),
    "another message": Done(),
    "a failure": failure_of(HearthError("out of order")),
}


@pytest.mark.parametrize("reply", INVALID_REPLIES.values(), ids=INVALID_REPLIES)
@pytest.mark.parametrize("has_prefill", [False, True])
def test_request_is_placed_once_on_a_live_worker(reply: Message, has_prefill: bool) -> None:
    async def play() -> None:
        rig = Rig()
        await rig.start()
        bus = rig.network.bus("kv_index-0")
        queries: list[MatchPrefix] = []

        def match(query: MatchPrefix) -> Message:
            queries.append(query)
            return reply

        await bus.serve(subjects.MATCH, MatchPrefix, match, queue=subjects.KV_INDEX_GROUP)
        workers = [await rig.worker("decode-0"), await rig.worker("decode-1")]
        if has_prefill:
            await rig.worker("prefill-0", "prefill")
        await rig.submit(submit_of("r", num_prompt_tokens=100))
        result = await rig.result()
        assert isinstance(result, Placed), result
        await asyncio.sleep(1)
        assert len(queries) == 1
        assert [result.placement_id] == [
            start.placement_id for worker in workers for start in worker.started
        ]
        for worker in workers:
            for start in worker.started:
                assert set(start.prefill_candidates) <= {"prefill-0"}
        await rig.service.stop()

    run(play())
