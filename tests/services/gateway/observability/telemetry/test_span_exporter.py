"""The span process and a collector that fails: every span is sent, or counted as lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from services.gateway.observability.telemetry import span_exporter
from services.gateway.observability.telemetry.span_exporter import CLOSE_S, SpanTracing
from services.gateway.observability.telemetry.traced_request import num_spans
from shared.clock import MonotonicClock
from shared.telemetry.timeline import Phase, Timeline, Try
from tests.services.telemetry.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.waiting import LIMIT_S, until

WAIT_S = LIMIT_S / 2
PHASE = Phase(name="decode", process_id="decode-1", start_s=0.0, duration_s=1.0)
TIMELINE = Timeline(
    request_id="r",
    tenant_id="t",
    gateway_id="gateway-1",
    model="m",
    outcome="stop",
    started_at=0.0,
    duration_s=1.0,
    tries=(Try(number=1, worker_id="decode-1", outcome="finished", phases=(PHASE,)),),
)
NUM_SPANS = 3  # of TIMELINE
NUM_REQUESTS = 20

Open = Callable[[], Awaitable[SpanTracing]]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        yield running


@pytest.fixture
async def open_tracing(receiver: OtlpReceiver) -> AsyncIterator[Open]:
    opened: list[SpanTracing] = []

    async def open_one() -> SpanTracing:
        tracing = SpanTracing("gateway-1", os.urandom, MonotonicClock(), NUM_REQUESTS)
        opened.append(tracing)
        await tracing.open()
        return tracing

    yield open_one
    for each in opened:
        await each.close()


def send(tracing: SpanTracing, num_requests: int = NUM_REQUESTS) -> None:
    for _ in range(num_requests):
        trace = tracing.begin(None)
        assert trace is not None
        encoded = msgspec.msgpack.encode(TIMELINE)
        tracing.ended(TIMELINE, encoded, trace, {}, {"decode-1": "fra"})


async def test_no_span_is_lost_in_a_collector_that_works(
    open_tracing: Open, receiver: OtlpReceiver
) -> None:
    assert num_spans(TIMELINE) == NUM_SPANS
    tracing = await open_tracing()
    send(tracing, 1)
    await until(lambda: not tracing.num_in_flight)
    send(tracing)
    await tracing.close()  # sends what waits
    assert len(receiver.spans) == (1 + NUM_REQUESTS) * NUM_SPANS
    assert (tracing.num_in_flight, tracing.num_dropped) == (0, 0)


async def test_spans_that_a_collector_rejects_are_counted(
    open_tracing: Open, receiver: OtlpReceiver
) -> None:
    tracing, receiver.status = await open_tracing(), 500
    send(tracing)
    await until(lambda: not tracing.num_in_flight)
    assert tracing.num_dropped == NUM_REQUESTS * NUM_SPANS
    receiver.status = 200
    send(tracing, 1)
    await until(lambda: not tracing.num_in_flight)
    assert len(receiver.spans) == NUM_SPANS


async def test_collector_that_hangs_costs_spans_and_not_the_stop(
    open_tracing: Open, receiver: OtlpReceiver
) -> None:
    receiver.released.clear()
    tracing = await open_tracing()
    send(tracing, NUM_REQUESTS + 5)
    assert tracing.num_dropped == 5 * NUM_SPANS  # more than may be in flight
    async with asyncio.timeout(CLOSE_S + WAIT_S):  # the exporter itself would wait for 60 s
        await tracing.close()
    assert tracing.num_dropped == (NUM_REQUESTS + 5) * NUM_SPANS
    assert tracing.pid is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_span_process_that_dies_or_stops_is_replaced(
    number: signal.Signals,
    open_tracing: Open,
    receiver: OtlpReceiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_exporter, "SUSPECT_S", 0.05)
    monkeypatch.setattr(span_exporter, "RESTART_S", 0.05)
    receiver.released.clear()
    tracing = await open_tracing()
    send(tracing)
    await until(lambda: tracing.pid is not None and not tracing._unsent)
    assert tracing.pid is not None
    os.kill(tracing.pid, number)
    await until(lambda: tracing.num_dropped)
    assert tracing.num_dropped == NUM_REQUESTS * NUM_SPANS
    receiver.released.set()
    receiver.spans.clear()
    send(tracing, 1)
    await until(lambda: not tracing.num_in_flight)
    assert len(receiver.spans) >= NUM_SPANS


GATEWAY = """
import asyncio, os
from services.gateway.observability.telemetry.span_exporter import SpanTracing
from shared.clock import MonotonicClock
from tests.services.gateway.observability.telemetry.test_span_exporter import send

async def main():
    tracing = SpanTracing("gateway-1", os.urandom, MonotonicClock())
    await tracing.open()
    while tracing.pid is None:
        await asyncio.sleep(0.01)
    send(tracing)
    print(tracing.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_span_process_ends_with_a_gateway_that_is_killed(receiver: OtlpReceiver) -> None:
    receiver.released.clear()
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GATEWAY, stdout=asyncio.subprocess.PIPE
    )
    assert gateway.stdout is not None
    statistics = Path(f"/proc/{int(await gateway.stdout.readline())}/stat")
    await until(lambda: receiver.num_waiting)  # the span process is in a request
    gateway.kill()
    await gateway.wait()
    # a container without an init does not reap it
    await until(lambda: not statistics.exists() or ") Z " in statistics.read_text())
