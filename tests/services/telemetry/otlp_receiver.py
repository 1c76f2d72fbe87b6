"""A collector of traces over OTLP/HTTP, in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

POLL_S = 0.02  # the longest time that a stop takes


@dataclass
class OtlpReceiver:
    """`spans`: (service name, span) of all requests so far. `released`: cleared, it hangs."""

    url: str = ""
    status: int = 200
    num_waiting: int = 0  # requests that are not answered yet
    spans: list[tuple[str, Any]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def take(self, body: bytes) -> None:
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {pair.key: pair.value.string_value for pair in each.resource.attributes}
            for scope in each.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    receiver.released.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.num_waiting += 1
            receiver.released.wait()
            receiver.num_waiting -= 1
            if receiver.status == 200:
                receiver.take(body)
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # a client that hung up while this hung
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
