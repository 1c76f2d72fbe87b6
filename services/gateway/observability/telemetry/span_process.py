"""The span process of a gateway: python -m … PROCESS_ID (frames on stdin, SETTLED on stdout).

It builds spans and sends them to the collector that the `OTEL_…` variables name. It ends at most
DRAIN_S after its gateway.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from services.gateway.observability.telemetry.spans import SpanBatch
from services.gateway.observability.telemetry.traced_request import SETTLED, SIZE, TracedRequest
from shared.telemetry.line_writer import replace_standard_error
from shared.telemetry.log import configure_child_logging

MAX_READ_BYTES = 1 << 20  # the frames of one message to the collector
DRAIN_S = 1.5  # the remaining spans are sent after the gateway has closed its end
LOG_INTERVAL_S = 60.0  # between log lines about failures
STDIN, STDOUT = 0, 1

log = structlog.get_logger(__name__)
_decode = msgspec.msgpack.Decoder(TracedRequest).decode


class Collector:
    """The client of the collector."""

    def __init__(self) -> None:
        # The exporter takes only the SDK's spans; its client, which retries, takes encoded ones.
        self._client = OTLPSpanExporter()._client
        self._logged_at: float | None = None

    def num_lost(self, batch: SpanBatch) -> int:
        """Sends the spans. Returns how many were lost: all or none."""
        result = self._client.export(batch.request.SerializeToString())
        if result.success:
            return 0
        self._log(str(result.error or result.reason or "retries ended"), result.status_code)
        return batch.num_spans

    def _log(self, error: str, status: int | None) -> None:
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("span_export_failed", error=error, status=status)


def main(process_id: str) -> None:
    replace_standard_error()
    configure_child_logging(process_id)
    logging.disable()  # the SDK would log one line a batch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends when the gateway closes stdin
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # stdin is no pipe, or its user has too many
        fcntl.fcntl(STDIN, fcntl.F_SETPIPE_SZ, MAX_READ_BYTES)
    threading.Thread(target=_exit_after_gateway, daemon=True).start()
    collector = Collector()
    for frames in read_frames(STDIN):
        batch = SpanBatch()
        for each in frames:
            batch.add(_decode(each))
        os.write(STDOUT, SETTLED.pack(len(frames), collector.num_lost(batch)))


def read_frames(file: int) -> Iterator[list[bytes]]:
    """Yields lists of the frames that have arrived, until the end of the file."""
    held = b""
    while data := os.read(file, MAX_READ_BYTES):
        held += data
        frames, begin = [], 0
        while len(held) >= begin + SIZE.size:
            (size,) = SIZE.unpack_from(held, begin)
            end = begin + SIZE.size + size
            if end > len(held):
                break
            frames.append(held[begin + SIZE.size : end])
            begin = end
        held = held[begin:]
        if frames:
            yield frames


def _exit_after_gateway() -> None:
    """Ends the process DRAIN_S after its gateway, even if the collector hangs."""
    poll = select.poll()
    poll.register(STDIN, select.POLLRDHUP)  # POLLHUP is always included
    poll.poll()
    time.sleep(DRAIN_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
