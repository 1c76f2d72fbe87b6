"""Real faults of a cluster, and the alerts that each of them raises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from tests.chaos.world.workload import requests
from tests.deploy import causes
from tests.deploy.overload import SCHEDULERS, STEP_S, WORKERS, overload
from tests.deploy.scenario import Scenario
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.cluster.clients import Exchange, run_exchange
from tests.support.servers import free_port

NUM_STREAMS = 24
TRACING = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{causes.COLLECTOR_PORT}"}


def of_gateways(environ: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    return dict.fromkeys(("gateway-1", "gateway-2"), environ)


SCENARIOS = (
    Scenario(
        "frozen_decode",
        ("HearthProcessLost", "HearthResubmissions"),
        25.0,
        causes.freeze_decode,
        causes.thaw_decode,
        is_live=True,
    ),
    Scenario(
        "frozen_redis",
        ("HearthRedisAway",),
        25.0,
        causes.freeze_redis,
        causes.thaw_redis,
        is_live=True,
    ),
    Scenario("full_redis", ("HearthRedisMemoryFull",), 75.0, causes.fill_redis, causes.nothing),
    Scenario(
        "restarted_nats",
        ("HearthNatsUnstable",),
        25.0,
        causes.restart_nats,
        causes.nothing,
        is_live=True,
    ),
    Scenario(
        "killed_decodes",
        ("HearthNoDecodeWorker",),
        45.0,
        causes.kill_decodes,
        causes.restart_decodes,
        is_live=True,
    ),
    Scenario(
        "failed_collector",
        ("HearthSpansDropped",),
        25.0,
        causes.fail_collector,
        causes.nothing,
        is_live=True,
        environ_of=of_gateways(TRACING),
    ),
    Scenario(
        "lost_streams",
        ("HearthStreamsLost",),
        35.0,
        causes.kill_decodes,
        causes.restart_decodes,
        stream_tokens=1200,  # they would end in time
        environ_of=of_gateways({"HEARTH_REQUEST_TIMEOUT_S": "30"}),
    ),
    Scenario("broken_device", ("HearthStepsFail",), 25.0, causes.break_device, causes.nothing),
    Scenario(
        "forbidden_lists", ("HearthIndexDegraded",), 80.0, causes.forbid_lists, causes.nothing
    ),
    Scenario(
        "foreign_region",
        ("HearthResidencyRefused",),
        20.0,
        causes.ask_in_the_wrong_region,
        causes.nothing,
    ),
    Scenario(
        "stuck_deletion",
        ("HearthDeletionUnfinished",),
        85.0,
        causes.remove_without_index,
        causes.thaw_index,
    ),
    Scenario(
        "full_log",
        ("HearthEventLoopHangs",),
        30.0,
        causes.fill_log,
        causes.nothing,
        metrics_ports={"gateway-1": free_port()},
        unread_logs=("gateway-1",),
    ),
    Scenario(
        "overload",
        (
            *("HearthQueueAge", "HearthRequestsRejected", "HearthSlowFirstToken"),
            *("HearthSlowTokens", "HearthKvCacheFull"),
        ),
        435.0,
        overload,
        causes.nothing,
        interval_s=15,
        stream_tokens=0,
        step_s=STEP_S,
        worker_options=WORKERS,
        scheduler_options=SCHEDULERS,
    ),
    Scenario(
        "large_bodies",
        ("HearthPreparationQueue",),
        45.0,
        causes.send_large_bodies,
        causes.nothing,
    ),
)


@contextlib.asynccontextmanager
async def streams(cluster: ChaosCluster, num_tokens: int) -> AsyncIterator[None]:
    """Streams over all gateways, until the end of the block; none of 0 tokens."""
    gateways = [*cluster.urls]
    tasks, exchanges = [], []
    for number, (path, body) in enumerate(requests(NUM_STREAMS if num_tokens else 0)):
        gateway = gateways[number % len(gateways)]
        exchange = Exchange({**body, "max_tokens": num_tokens, "n": 1}, gateway)
        sending = run_exchange(exchange, cluster.urls[gateway], cluster.api_key, path)
        tasks.append(asyncio.create_task(sending))
        exchanges.append(exchange)
    await asyncio.gather(*(each.first_event.wait() for each in exchanges))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
