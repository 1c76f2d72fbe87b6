"""One timeline of a request whose decode workers are killed, with all its tries."""

from __future__ import annotations

import asyncio
import json

import msgspec

from shared.telemetry.timeline import Move
from shared.transport.bus import NatsBus
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, text_of
from tests.services.gateway.peer import PeerDecode
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S


async def lines_of(cluster: Cluster) -> list[str]:
    """The lines of a streamed chat whose client wants to know of moves."""
    body, headers = {**BODY, "stream": True}, {"x-hearth-moves": "1"}
    async with cluster.http.stream("POST", CHAT, json=body, headers=headers) as response:
        return [line async for line in response.aiter_lines() if line]


async def killed_after(worker: PeerDecode, position: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await worker.emitted.get()).first_position < position - 1:
            pass
    await worker.die()


async def test_request_resumed_twice_has_one_timeline(
    cluster: Cluster, nats_server: NatsServer
) -> None:
    bus = await NatsBus.connect(nats_server.url("decode-3"), process_id="decode-3")
    third = PeerDecode(bus, cluster.answer)
    await third.start()
    cluster.scheduler.workers.append(third)
    first, second = cluster.decodes
    first.hold_at, second.hold_at = 5, 9
    running = asyncio.create_task(lines_of(cluster))
    await killed_after(first, 5)
    await killed_after(second, 9)
    async with asyncio.timeout(LIMIT_S):
        lines = await running
    await third.stop()
    chunks = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    assert text_of(chunks) == ANSWER
    comments = [each for each in lines if not each.startswith("data: ")]
    assert all(each.startswith(": moved {") for each in comments)
    timeline = cluster.gateway.telemetry.find(chunks[0]["id"])
    assert timeline is not None
    moves = [each.move for each in timeline.tries if each.move is not None]
    assert moves == [msgspec.json.decode(each[8:], type=Move) for each in comments]
    workers = [(each.from_workers, each.cause, each.worker) for each in moves]
    assert workers == [
        (("decode-1",), "worker_lost", "decode-2"),
        (("decode-2",), "worker_lost", "decode-3"),
    ]
    assert 0 < sum(each.pause_s for each in moves) < timeline.duration_s
    (listed, *_) = cluster.gateway.telemetry.recent.of(timeline.tenant_id)
    assert (listed.request_id, listed.num_resubmissions) == (timeline.request_id, 2)
    assert [each.worker_id for each in timeline.tries] == ["decode-1", "decode-2", "decode-3"]
    assert [each.outcome for each in timeline.tries] == ["worker_lost", "worker_lost", "finished"]
    for each in timeline.tries[:2]:
        assert [phase.name for phase in each.phases[-2:]] == ["decode", "recovery"]
        assert each.phases[-2].num_steps == 0  # a lost worker counted none
    assert timeline.num_resubmissions == 2
    assert timeline.num_output_tokens == len(cluster.answer)
    phases = [phase for each in timeline.tries for phase in each.phases]
    before = [each for each in timeline.gateway_phases if each.name != "client_stall"]  # beside all
    spent_s = sum(phase.duration_s for phase in (*before, *phases))
    # a busy machine may take some time from the last token to the end
    assert 0.9 * timeline.duration_s < spent_s < timeline.duration_s + 0.002
