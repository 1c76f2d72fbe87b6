"""Requirements of HTTP/1.0 and HTTP/1.1 that uvicorn does not enforce (RFC 9112)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HTTP_1_0 = "1.0"


def has_valid_host(headers: Iterable[tuple[bytes, bytes]], http_version: str) -> bool:
    """Returns whether there is one Host header, which HTTP/1.0 may omit (section 3.2)."""
    num_hosts = sum(name == b"host" for name, _ in headers)
    return num_hosts == 1 or (num_hosts == 0 and http_version == HTTP_1_0)


def send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Makes the end of the connection end this response: HTTP/1.0 has no chunks (section 6.1)."""
    send = cycle.send

    async def send_until_close(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        else:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_until_close  # type: ignore[method-assign]
