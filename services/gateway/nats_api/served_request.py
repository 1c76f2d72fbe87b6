"""Serves one request over NATS, from its message to its last reply.

    authenticate ──▶ reserve ──▶ read ──▶ open ──▶ write ──▶ ended
         └─────────────┴───────────┴────────┴────────┴──error──▶ one reply with the error

As over HTTP, a request is charged before its body is read, so rejected requests are charged too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from services.gateway.body_budget import BodyBytes
from services.gateway.dialects.transport_parts import TransportParts
from services.gateway.http.errors import RouteNotFound
from services.gateway.nats_api.endpoints import ApiEndpoint
from services.gateway.nats_api.generation import write_response
from services.gateway.nats_api.listeners import Listeners
from services.gateway.nats_api.reply import NatsReply
from services.gateway.nats_api.request_headers import RequestHeaders, decode_headers
from services.gateway.output.framing import LINES
from services.gateway.request.endpoint import Endpoint, GeneratingEndpoint
from services.gateway.request.prepared_bodies import decodable
from services.gateway.request.request_output import ClientDisconnected
from services.gateway.request.reservation import Reservation
from shared.background import item_error
from shared.errors import DeadlineExceeded, HearthError, InvalidRequest, PayloadTooLarge
from shared.subjects import REPLY_S
from shared.tenancy.tenant import TenantRecord

log = structlog.get_logger(__name__)

# The server accepts no replies after REPLY_S; 60 s remain to send the error of a late request.
MAX_DEADLINE_S = REPLY_S - 60.0
HEADERS_BYTES = 8 * 1024  # bytes of a reply besides its body


@dataclass(slots=True)
class RequestMessage:
    """The message of a request. `arrived_at` is in seconds of the gateway's clock. `data` is the
    body, until the request is submitted.
    """

    endpoint: str
    client_id: str
    data: bytes
    headers: bytes
    arrived_at: float


DIALECT = "nats"  # the label in metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsParts:
    """The parts that all requests over NATS share. `endpoints` are given by name. `max_reply_bytes`
    returns the maximum size of a message.
    """

    transport: TransportParts
    endpoints: Mapping[str, ApiEndpoint]
    listeners: Listeners
    max_reply_bytes: Callable[[], int]


class ServedRequest:
    """Serves one request in one task. Other tasks may cancel it."""

    def __init__(self, parts: NatsParts, message: RequestMessage, reply: NatsReply) -> None:
        self.message = message
        self._parts = parts
        self._transport = parts.transport
        self._reply = reply
        self._task: asyncio.Task[None] | None = None
        self._cancel_open: Callable[[HearthError], None] | None = None
        self._listener = ""
        self._tenant_id = ""  # empty while unknown
        self._error: HearthError | None = None  # the error with which it was cancelled
        self.has_passed = asyncio.Event()  # it is submitted, or has ended

    @property
    def request_id(self) -> str:
        return self._reply.request_id

    async def run(self) -> HearthError | None:
        """Answers the request. Returns the error that ended it, or None."""
        self._task = asyncio.current_task()
        error: HearthError | None = None
        try:
            if self._error is not None:  # cancelled before this task ran
                raise self._error
            await self._respond()
        except asyncio.CancelledError:
            if self._error is None or self._task is None:  # the gateway stops
                raise
            self._task.uncancel()
            error = self._error
        except HearthError as raised:
            error = raised
        except BaseException as raised:  # the service boundary: log and answer
            failure = item_error(raised)
            log.error("request_failed", endpoint=self.message.endpoint, exc_info=failure)
            error = HearthError("internal error")
        finally:
            self.has_passed.set()
            self._parts.listeners.close(self._listener)
        if error is not None:
            if self._cancel_open is None:  # else counted with its output
                self._transport.metrics.count_refused(
                    error.code,
                    dialect=DIALECT,
                    tenant=self._tenant_id,
                    is_failed=error.is_of_cluster,
                )
            await self._reply.fail(error)
        return error

    def cancel(self, error: HearthError) -> None:
        """Ends the request with the error. Does nothing if it is already cancelled."""
        if self._error is not None:
            return
        self._error = error
        if self._cancel_open is not None:
            self._cancel_open(error)
        elif self._task is not None:
            self._task.cancel()

    async def _respond(self) -> None:
        message, transport = self.message, self._transport
        found = self._parts.endpoints.get(message.endpoint)
        if found is None:
            raise RouteNotFound("there is no such endpoint")
        endpoint = found.endpoint
        headers = decode_headers(message.headers)
        if headers.has_checks:
            self._check_listener()
        if headers.traceparent:  # all other logs have the request's id
            trace = headers.traceparent
            log.info("request_traced", request=self.request_id, traceparent=trace)
        held = transport.budget.body(f"client {message.client_id}")  # the tenant is still unknown
        try:
            held.add(len(message.data))
            tenant = await transport.api_keys.tenant_of_client(message.client_id)
            self._tenant_id = tenant.tenant_id
            if endpoint.is_free:
                await self._reply.finish(await self._answer(endpoint, tenant))
            else:
                await self._respond_charged(endpoint, tenant, headers, held)
        finally:
            held.release()

    async def _respond_charged(
        self, endpoint: Endpoint, tenant: TenantRecord, headers: RequestHeaders, held: BodyBytes
    ) -> None:
        record = self._transport.submission.begin(
            self.request_id, dialect=DIALECT, traceparent=headers.traceparent
        )
        reservation = await self._transport.submission.reserve(tenant, record)
        body = self._transport.budget.body(tenant.tenant_id)
        try:
            self._reply.limit_headers = reservation.headers
            self._check_size(endpoint)
            body.add(len(self.message.data))
            self.message.data = decodable(self.message.data)
            held.release()
            if isinstance(endpoint, GeneratingEndpoint):
                await self._generate(endpoint, reservation, headers, body)
            else:
                await self._reply.finish(await self._answer(endpoint, tenant))
        except HearthError as error:
            record.reject(error)
            raise
        finally:
            body.release()
            reservation.close_submissions()

    async def _answer(self, endpoint: Endpoint, tenant: TenantRecord) -> bytes:
        return await self._transport.dialects.answers[endpoint.name](tenant, self.message.data)

    async def _generate(
        self,
        endpoint: GeneratingEndpoint,
        reservation: Reservation,
        headers: RequestHeaders,
        held: BodyBytes,
    ) -> None:
        submission = self._transport.submission
        read = await submission.read(reservation, endpoint.name, self.message.data, hold=held.add)
        body = endpoint.fields.decode(read.body)
        if endpoint.is_streamed(body):
            self._check_listener()
        opened = await submission.open(
            endpoint,
            body,
            reservation,
            prompts=read.prompts,
            framing=LINES,
            affinity_key=headers.affinity_key,
            timeout_s=self._left_s(headers.deadline_s),
            receipt=headers.receipt,
        )
        self._cancel_open = opened.cancel
        self.has_passed.set()
        self._reply.limit_headers = opened.merger.headers
        self.message.data = b""  # the request is submitted
        del read, body
        held.release()
        max_bytes = self._parts.max_reply_bytes() - HEADERS_BYTES
        await write_response(opened, self._reply, max_bytes, self._transport.clock)

    def _left_s(self, deadline_s: float | None) -> float:
        """Returns the remaining seconds until the deadline. Raises DeadlineExceeded."""
        longest = MAX_DEADLINE_S if deadline_s is None else min(deadline_s, MAX_DEADLINE_S)
        left_s = longest - (self._transport.clock.now() - self.message.arrived_at)
        if left_s <= 0:
            raise DeadlineExceeded(f"the request was not submitted within {longest:g} s")
        return left_s

    def _check_size(self, endpoint: Endpoint) -> None:
        """Raises PayloadTooLarge for too large a body, and InvalidRequest for an empty one."""
        limit = self._transport.body_limit(takes_images=endpoint.takes_images)
        if len(self.message.data) > limit:
            raise PayloadTooLarge(f"the request body is larger than {limit} bytes")
        if not self.message.data:
            raise InvalidRequest("the body is empty: send a JSON object")

    def _check_listener(self) -> None:
        """Cancels the request when its client unsubscribes."""
        if not self._listener:
            lost = partial(self.cancel, ClientDisconnected("the client does not listen any more"))
            self._listener = self._parts.listeners.open(self._reply, lost)
