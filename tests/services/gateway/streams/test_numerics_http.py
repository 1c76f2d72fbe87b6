"""A gateway's counts of unequal numerics, in its metrics and its heartbeats."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.messages import GatewayLoad
from shared.numerics import Numerics
from tests.services.gateway.conftest import ANSWER, Cluster
from tests.services.gateway.dialects.openai.test_chat_http import events_of, text_of
from tests.services.gateway.peer import PeerDecode
from tests.services.gateway.samples import sample_sum
from tests.services.gateway.streams.test_recovery_http import emitted, wait_for_first_token
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.own_cluster

ONE = Numerics("exact", "cpu-avx512", "float32", "1")
OTHER = Numerics("exact", "cpu-plain", "float32", "1")


def computes_with(decode: PeerDecode, numerics: Numerics) -> None:
    served = msgspec.structs.replace(decode.finish.served, numerics=numerics)
    decode.finish = msgspec.structs.replace(decode.finish, served=served)


async def test_unlike_prefills_and_changes_of_numerics_are_in_metrics_and_heartbeats(
    cluster: Cluster,
) -> None:
    first, second = cluster.decodes
    computes_with(first, ONE)
    computes_with(second, OTHER)
    cluster.scheduler.has_unlike_prefill = True
    first.hold_at = 5
    running = asyncio.create_task(events_of(cluster))
    await emitted(cluster, 0, 4)
    await wait_for_first_token(cluster)
    cluster.scheduler.has_unlike_prefill = False
    cluster.scheduler.workers = [second]
    await first.health_monitor.stop()
    async with asyncio.timeout(LIMIT_S):
        assert text_of(await running) == ANSWER
    assert sample_sum(cluster.gateway, "hearth_gateway_unlike_prefills_total") == 1
    assert sample_sum(cluster.gateway, "hearth_gateway_numerics_changes_total") == 1

    def counts_of_gateway() -> tuple[int, int, int]:
        heartbeat = second.health_monitor.fleet.heartbeat_of("gateway-1")
        load = GatewayLoad() if heartbeat is None else heartbeat.gateway or GatewayLoad()
        return load.num_unlike_prefills, load.num_numerics_changes, load.num_resubmissions

    await until(lambda: counts_of_gateway() == (1, 1, 1))
