"""Discovery of the API as a NATS service: answers PING, INFO and STATS.

    $SRV.{PING,INFO,STATS}                 every service
    $SRV.{PING,INFO,STATS}.hearth          every gateway
    $SRV.{PING,INFO,STATS}.hearth.{id}     one gateway

The format is that of NATS's service protocol (ADR-32), so that `nats micro ls`, `info` and `stats`
show the gateways.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

import msgspec
import structlog

from services.gateway.nats_api.endpoint_counts import EndpointCounts
from services.gateway.schemas.struct_schemas import schema_components
from shared.errors import HearthError
from shared.subjects import SERVICES
from shared.transport.decoding.untyped_messages import UntypedMessages

log = structlog.get_logger(__name__)

SERVICE = "hearth"
DESCRIPTION = "Chat, completions, embeddings, ranks and tokens of models, as over HTTP."
UNKNOWN_VERSION = "0.0.0"
_SEMANTIC_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_PREFIX = "io.nats.micro.v1"
# A client's inbox is `_INBOX.{client}.{random}` with at most one more part. Inboxes of processes,
# where replies to their own requests arrive, are longer.
MAX_INBOX_PARTS = 4
# Requests cost nothing and do not authenticate their sender: responses are limited by the client of
# the inbox and in total, since a client may name other clients.
MAX_PER_CLIENT, MAX_PER_SECOND = 20, 400
_encode = msgspec.json.Encoder().encode


class _Service(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    name: str
    id: str
    version: str
    metadata: Mapping[str, str]


class Ping(_Service, frozen=True, kw_only=True, tag=f"{_PREFIX}.ping_response"):
    pass


class EndpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    subject: str
    queue_group: str
    metadata: Mapping[str, str]


class Info(_Service, frozen=True, kw_only=True, tag=f"{_PREFIX}.info_response"):
    description: str
    endpoints: Sequence[EndpointInfo]


class EndpointStats(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one endpoint. Times are in nanoseconds."""

    name: str
    subject: str
    queue_group: str
    num_requests: int
    num_errors: int
    last_error: str
    processing_time: int
    average_processing_time: int


class Stats(_Service, frozen=True, kw_only=True, tag=f"{_PREFIX}.stats_response"):
    started: datetime
    endpoints: Sequence[EndpointStats]


class Discovery:
    """Answers discovery. `counts` has the counts of each endpoint by name. `now` returns monotonic
    seconds.
    """

    def __init__(
        self,
        messages: UntypedMessages,
        now: Callable[[], float],
        endpoints: Sequence[EndpointInfo],
        counts: Mapping[str, EndpointCounts],
        *,
        service_id: str,
        version: str,
        metadata: Mapping[str, str],
        started_at: float,
    ) -> None:
        self._messages = messages
        self._now = now
        self._second = 0
        self._num_sent: Counter[str] = Counter()  # replies in this second, by client
        self._endpoints = endpoints
        self._counts = counts
        self._started = datetime.fromtimestamp(started_at, UTC)
        self._identity: dict[str, Any] = {
            "name": SERVICE,
            "id": service_id,
            "version": version if _SEMANTIC_VERSION.fullmatch(version) else UNKNOWN_VERSION,
            "metadata": metadata,
        }
        ping = _encode(Ping(**self._identity))
        info = _encode(Info(**self._identity, description=DESCRIPTION, endpoints=endpoints))
        self._responses = {
            f"{SERVICES}.{verb}{suffix}": response
            for verb, response in (
                ("PING", lambda: ping),
                ("INFO", lambda: info),
                ("STATS", lambda: _encode(self.stats())),
            )
            for suffix in ("", f".{SERVICE}", f".{SERVICE}.{service_id}")
        }

    async def start(self) -> Callable[[], Awaitable[None]]:
        """Starts to answer. Returns a function that stops this."""
        return await self._messages.listen(f"{SERVICES}.>", self._respond)

    def stats(self) -> Stats:
        endpoints = [_stats_of(each, self._counts[each.name]) for each in self._endpoints]
        return Stats(**self._identity, started=self._started, endpoints=endpoints)

    def _take_turn(self, client_id: str) -> bool:
        second = int(self._now())
        if second != self._second:
            self._second = second
            self._num_sent.clear()
        if self._num_sent.total() >= MAX_PER_SECOND or self._num_sent[client_id] >= MAX_PER_CLIENT:
            return False
        self._num_sent[client_id] += 1
        return True

    async def _respond(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        response = self._responses.get(subject)
        # Unlike a client, the gateway may send to any reply subject: a response must not become a
        # command or a reply to a process.
        if response is None or not _is_client_inbox(reply):
            return
        if not self._take_turn(reply.split(".")[1]):
            return
        try:
            await self._messages.send(reply, response())
        except HearthError as error:
            log.warning("discovery_failed", subject=subject, error=error.message)


def _is_client_inbox(subject: str) -> bool:
    parts = subject.split(".")
    is_plain = not {"", "*", ">"} & set(parts)
    return parts[0] == "_INBOX" and 3 <= len(parts) <= MAX_INBOX_PARTS and is_plain


def _stats_of(endpoint: EndpointInfo, counts: EndpointCounts) -> EndpointStats:
    return EndpointStats(
        name=endpoint.name,
        subject=endpoint.subject,
        queue_group=endpoint.queue_group,
        num_requests=counts.num_requests,
        num_errors=counts.num_errors,
        last_error=counts.last_error,
        processing_time=counts.processing_ns,
        average_processing_time=counts.average_ns,
    )


@cache
def schema_of(types: tuple[Any, ...]) -> str:
    """Returns the JSON Schema, as text, of a value of any of the types."""
    schemas, definitions = schema_components(types)
    whole = {"anyOf": list(schemas)} if len(schemas) > 1 else dict(schemas[0])
    return _encode({**whole, "$defs": definitions}).decode()
