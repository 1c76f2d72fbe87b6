"""One timeline of a request whose decode workers are killed, with all its tries."""

from __future__ import annotations

import asyncio

from shared.transport.bus import NatsBus
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import events_of, text_of
from tests.services.gateway.peer import PeerDecode
from tests.support.servers import NatsServer

WAIT_S = 10.0


async def killed_after(worker: PeerDecode, position: int) -> None:
    async with asyncio.timeout(WAIT_S):
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
    running = asyncio.create_task(events_of(cluster, stream_options={"include_usage": True}))
    await killed_after(first, 5)
    await killed_after(second, 9)
    async with asyncio.timeout(WAIT_S):
        events = await running
    await third.stop()
    assert text_of(events) == ANSWER
    ring = cluster.gateway.telemetry.ring
    timeline = ring.get([*ring][-1])
    assert timeline is not None
    assert [each.worker_id for each in timeline.tries] == ["decode-1", "decode-2", "decode-3"]
    assert [each.outcome for each in timeline.tries] == ["worker_lost", "worker_lost", "finished"]
    for each in timeline.tries[:2]:
        assert [phase.name for phase in each.phases[-2:]] == ["decode", "recovery"]
    assert timeline.num_resubmissions == 2
    assert timeline.num_output_tokens == len(cluster.answer)
    phases = [phase for each in timeline.tries for phase in each.phases]
    spent_s = sum(phase.duration_s for phase in (*timeline.gateway_phases, *phases))
    assert abs(spent_s - timeline.duration_s) < 0.002
