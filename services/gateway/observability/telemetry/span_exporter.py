"""Samples traces, and sends ended requests to a process that builds and exports their spans.

    ended ──▶ unsent ──FLUSH_S──▶ in the span process ──SETTLED──▶ sent, or lost and counted
       └─MAX_IN_FLIGHT─▶ lost                     └──the process ended──▶ lost

If the collector is absent, hangs or rejects, or the span process ends, spans are lost and counted;
requests are not affected. The span process has a lower priority than requests.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from services.gateway.observability.telemetry.trace_context import TraceContext, caller_context
from services.gateway.observability.telemetry.traced_request import (
    SETTLED,
    AttributeValue,
    TracedRequest,
    num_spans,
)
from shared.background import Background, is_logged
from shared.clock import Clock
from shared.lifecycle.child_process import (
    NETWORK_NAMES,
    child_environ,
    is_stopped,
    lower_priority,
)
from shared.lifecycle.piped_child import PipedChild, start_piped
from shared.telemetry.timeline import Timeline

log = structlog.get_logger(__name__)

MAX_IN_FLIGHT = 2048  # requests: 4 MB
FLUSH_S = 0.2  # requests that end within this time are sent together
CLOSE_S = 2.0
RESTART_S = 1.0
SUSPECT_S = 1.0  # a process that two checks find stopped is replaced
NICENESS = 5  # a third of other processes' share of a busy core
SPAN_PROCESS = "services.gateway.observability.telemetry.span_process"


class SpanTracing:
    """Traces requests as the `OTEL_…` variables configure, which the SDK reads here and in the span
    process.
    """

    def __init__(
        self,
        process_id: str,
        random_bytes: Callable[[int], bytes],
        clock: Clock,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self.num_dropped = 0
        self._process_id = process_id
        self._random_bytes = random_bytes
        self._clock = clock
        self._max_in_flight = max_in_flight
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._in_flight: deque[Timeline] = deque()  # sending order, the unsent last
        self._unsent: list[bytes] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self._process: PipedChild | None = None
        self._background = Background()
        self._running: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def num_in_flight(self) -> int:
        """The number of requests whose spans are neither sent nor lost."""
        return len(self._in_flight)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self) -> None:
        self._running = self._background.start_own(self._run())

    def begin(self, header: str | None) -> TraceContext | None:
        caller = caller_context(header)
        ids = self._random_bytes(24 if caller is None else 8)
        trace_id = ids[8:] if caller is None else caller.trace_id
        parent = None if caller is None else trace.set_span_in_context(_remote(caller))
        result = self._sampler.should_sample(parent, int.from_bytes(trace_id, "big"), "chat")
        is_sampled = result.decision.is_sampled()
        if caller is None:
            return TraceContext(trace_id, ids[:8], is_sampled=True) if is_sampled else None
        return TraceContext(trace_id, ids[:8], is_sampled, caller.span_id)

    def ended(
        self,
        timeline: Timeline,
        encoded: bytes,
        context: TraceContext,
        attributes: Mapping[str, AttributeValue],
        regions: Mapping[str, str],
    ) -> None:
        if not context.is_sampled:
            return
        if len(self._in_flight) >= self._max_in_flight or self._is_closing:
            self.num_dropped += num_spans(timeline)
            return
        traced = TracedRequest(
            msgspec.Raw(encoded),
            context.trace_id,
            context.span_id,
            context.parent_id,
            attributes,
            regions,
        )
        self._in_flight.append(timeline)
        self._unsent.append(traced.frame)
        if self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(FLUSH_S, self._flush)

    async def close(self) -> None:
        """Stops within CLOSE_S. Requests that are not sent by then are counted as lost."""
        self._is_closing = True
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush()
        process = self._process
        if process is not None:
            process.stdin.close()
            await asyncio.wait({self._running} if self._running else (), timeout=CLOSE_S)
            process.kill()
            await process.wait()
        await self._background.stop()
        self._unsent.clear()
        self._lose()
        if self.num_dropped:
            log.warning("spans_dropped", num_spans=self.num_dropped)

    def _flush(self) -> None:
        self._flush_timer = None
        if self._process is None or not self._unsent:
            return  # `_run` flushes when the process has started
        frames, self._unsent = self._unsent, []
        try:
            self._process.stdin.write(b"".join(frames))
        except (OSError, RuntimeError):  # it has just ended; uvloop raises RuntimeError
            log.debug("span_process_closed")

    async def _run(self) -> None:
        while not self._is_closing:
            try:
                self._process = process = await self._spawn()
            except OSError as error:
                log.warning("span_process_not_started", error=str(error))
            else:
                self._flush()
                self._background.start_item(self._watch(process), is_logged)
                await self._settle(process)
                self._process = None
                self._lose()
                if not self._is_closing:
                    log.warning("span_process_lost", returncode=process.returncode)
            if not self._is_closing:
                await self._clock.sleep(RESTART_S)

    async def _spawn(self) -> PipedChild:
        process = await start_piped(
            [sys.executable, "-m", SPAN_PROCESS, self._process_id],
            child_environ(os.environ, names=NETWORK_NAMES, prefixes=("OTEL_",)),
        )
        lower_priority(process.pid, NICENESS)
        return process

    async def _settle(self, process: PipedChild) -> None:
        """Removes the requests that the span process reports as sent or lost, until the process
        ends.
        """
        try:
            while True:
                reply = await process.stdout.readexactly(SETTLED.size)
                num_requests, num_lost = SETTLED.unpack(reply)
                self.num_dropped += num_lost
                for _ in range(num_requests):
                    self._in_flight.popleft()
        except (EOFError, ConnectionError):
            await process.wait()

    async def _watch(self, process: PipedChild) -> None:
        """Kills a process that two successive checks find stopped: it would report neither losses
        nor its end.
        """
        was_stopped = False
        while process.returncode is None:
            await self._clock.sleep(SUSPECT_S)
            before, was_stopped = was_stopped, is_stopped(process.pid)
            if before and was_stopped:
                process.kill()

    def _lose(self) -> None:
        """Counts the spans that were sent to a process that has ended as lost."""
        while len(self._in_flight) > len(self._unsent):
            self.num_dropped += num_spans(self._in_flight.popleft())


def _remote(caller: TraceContext) -> NonRecordingSpan:
    return NonRecordingSpan(
        SpanContext(
            int.from_bytes(caller.trace_id, "big"),
            int.from_bytes(caller.span_id, "big"),
            is_remote=True,
            trace_flags=TraceFlags(int(caller.is_sampled)),
        )
    )
