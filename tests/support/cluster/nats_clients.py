"""The same requests over NATS, with the client that applications copy."""

from __future__ import annotations

import time

import msgspec
from nats.errors import Error as NatsError

from services.client.hearth_nats import ApiError, HearthClient, ResponseLost
from tests.support.cluster.clients import Exchange

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
RETRY_AFTER = b"retry-after: 1"  # 429 and 503 may be repeated


async def run_nats_exchange(exchange: Exchange, client: HearthClient, path: str) -> Exchange:
    """Runs the exchange to its end and records errors in it, as over HTTP."""
    exchange.started = time.monotonic()
    try:
        async for event in client.stream(ENDPOINTS[path], exchange.body):
            exchange.status = 200
            _take(exchange, event)
        exchange.status, exchange.is_done = 200, True
    except ApiError as error:
        if exchange.status == 200:
            _take(exchange, {"error": {"message": error.message, "code": error.code}})
        exchange.status = exchange.status or error.status
        exchange.headers = RETRY_AFTER
    except (ResponseLost, NatsError, OSError) as error:
        exchange.failure = repr(error)
    finally:
        exchange.ended = time.monotonic()
        exchange.first_event.set()
    return exchange


def _take(exchange: Exchange, event: object) -> None:
    exchange.events.append(b"data: " + msgspec.json.encode(event))
    exchange.arrivals.append(time.monotonic())
    exchange.first_event.set()
