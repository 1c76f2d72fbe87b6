"""Serves the API over NATS: receives requests, runs one task for each, and leaves without losing
one.

    started ──gateway ready──▶ joined (the queue group sends requests here) ──leave──▶ left ──stop

A message's handler delays all later messages of the process, so it only starts the task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from services.gateway.dialects.transport_parts import TransportParts
from services.gateway.nats_api.discovery import Discovery
from services.gateway.nats_api.endpoint_counts import EndpointCounts
from services.gateway.nats_api.endpoints import Cancelled, CancelRequest, api_endpoints
from services.gateway.nats_api.errors import RequestCancelled
from services.gateway.nats_api.listeners import Listeners
from services.gateway.nats_api.reply import GATEWAY, NatsReply
from services.gateway.nats_api.served_request import NatsParts, RequestMessage, ServedRequest
from services.gateway.request.supported_fields import SupportedFields
from shared.background import Background, is_logged
from shared.config import GatewayConfig
from shared.errors import HearthError, InvalidRequest, Overloaded, PayloadTooLarge
from shared.lifecycle.release import installed_release
from shared.subjects import (
    API_GROUP,
    API_REQUESTS,
    CANCEL,
    api_cancel,
    api_request,
    client_inbox,
    endpoint_and_client,
    two_tokens,
)
from shared.transport.decoding.untyped_messages import UntypedMessages

log = structlog.get_logger(__name__)

READY_POLL_S = 0.05
GRACE_S = 5.0  # seconds to submit the last requests, and for the last replies
MAX_CANCEL_BYTES = 1024  # larger ones are not decoded
MAX_CLIENT_SHARE = 4  # one client may have a quarter of `max_requests`
_CANCEL_FIELDS = SupportedFields(CancelRequest, {})
_encode = msgspec.json.Encoder().encode


class NatsApi:
    """The API of one gateway over NATS. `service_id` is its id in discovery. `started_at` is in
    Unix seconds.
    """

    def __init__(
        self,
        messages: UntypedMessages,
        config: GatewayConfig,
        transport: TransportParts,
        *,
        service_id: str,
        started_at: float,
    ) -> None:
        self._messages = messages
        self._parts = NatsParts(
            transport=transport,
            endpoints=api_endpoints(transport.dialects.declared),
            listeners=Listeners(messages, transport.clock),
            max_reply_bytes=lambda: messages.max_payload_bytes,
        )
        self._clock = transport.clock
        self._new_request_id = transport.new_request_id
        self._encode_error = transport.dialects.default.encode_error
        self._max_requests = config.max_requests
        self._process_id = config.process_id
        endpoints = self._parts.endpoints
        self.counts = {name: EndpointCounts() for name in endpoints}
        self._discovery = Discovery(
            messages,
            self._clock.now,
            [each.info for each in endpoints.values()],
            self.counts,
            service_id=service_id,
            version=installed_release(),
            metadata={"gateway": config.process_id},
            started_at=started_at,
        )
        self._running: dict[tuple[str, str], ServedRequest] = {}  # keys: client and request id
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running: Counter[str] = Counter()  # key: client
        self._joining: asyncio.Task[None] | None = None
        self._background = Background()
        self.has_joined = False  # stays true after leaving
        self._leave: Callable[[], Awaitable[None]] | None = None
        self._stops: list[Callable[[], Awaitable[None]]] = []

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    async def start(self, is_ready: Callable[[], bool]) -> None:
        """Starts discovery and listeners, and joins the queue group once the gateway is ready:
        until then, other gateways serve the requests.
        """
        self._stops = [
            await self._discovery.start(),
            await self._parts.listeners.start(),
            await self._messages.listen(api_cancel("*", self._process_id), self._take_cancellation),
        ]
        self._background.start_own(self._parts.listeners.run())
        self._joining = self._background.start_own(self._join(is_ready))

    async def leave(self) -> None:
        """Leaves the queue group. Waits up to GRACE_S until the requests received so far are
        submitted. Idempotent.
        """
        if self._joining is not None:  # else its start failed
            self._joining.cancel()
            await asyncio.wait({self._joining})
        leave, self._leave = self._leave, None
        if leave is not None:
            await leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                for request in tuple(self._running.values()):
                    await request.has_passed.wait()

    async def idle(self) -> None:
        """Returns when the last reply to each request has been sent."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Stops the API after the gateway has closed its requests; their last replies
        have GRACE_S.
        """
        await self.leave()
        for stop in self._stops:
            await stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE_S)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._background.stop()

    async def _join(self, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            await self._clock.sleep(READY_POLL_S)
        self._leave = await self._messages.listen(API_REQUESTS, self._take, queue=API_GROUP)
        await self._messages.flush()  # returns when the server has the subscription
        self.has_joined = True

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def _take(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        endpoint, client_id = endpoint_and_client(subject)
        if endpoint == CANCEL:  # any gateway gets it, perhaps not the one that runs the request
            await self._take_cancellation(subject, reply, data, headers)
            return
        if not _is_inbox_of(client_id, reply):
            self._parts.transport.metrics.count_dropped_message()
            return
        arrived_at = self._received(endpoint)
        message = RequestMessage(endpoint, client_id, data, headers, arrived_at)
        response = self._reply(reply, endpoint)
        busy = self._busy(client_id)
        if busy:
            error = Overloaded(f"too many requests are open {busy}", retry_after_s=1.0)
            self._ended(endpoint, arrived_at, error)
            await response.fail(error)
            return
        request = ServedRequest(self._parts, message, response)
        self._running[client_id, request.request_id] = request
        self._num_running[client_id] += 1
        task = self._background.start_item(self._serve(request), is_logged)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _busy(self, client_id: str) -> str:
        """Returns the end of an error message if one more request of the client exceeds a limit,
        else "".
        """
        if len(self._tasks) >= self._max_requests:
            return "at this gateway"
        most = max(1, self._max_requests // MAX_CLIENT_SHARE)
        return "of this client" if self._num_running[client_id] >= most else ""

    def _reply(self, subject: str, endpoint: str) -> NatsReply:
        request_id = self._new_request_id()
        gateway_id = two_tokens(self._process_id)
        found = self._parts.endpoints.get(endpoint)
        encode_error = self._encode_error if found is None else found.encode_error
        return NatsReply(self._messages, subject, request_id, gateway_id, encode_error)

    async def _serve(self, request: ServedRequest) -> None:
        message = request.message
        try:
            error = await request.run()
        finally:
            del self._running[message.client_id, request.request_id]
            self._num_running -= Counter({message.client_id: 1})  # drops a client at zero
        self._ended(message.endpoint, message.arrived_at, error)

    def _received(self, endpoint: str) -> float:
        """Counts a request of the endpoint. Returns the time on the gateway's clock."""
        if endpoint in self.counts:
            self.counts[endpoint].num_requests += 1
        return self._clock.now()

    def _ended(self, endpoint: str, arrived_at: float, error: HearthError | None) -> None:
        counts = self.counts.get(endpoint)
        if counts is not None:
            counts.ended(self._clock.now() - arrived_at, error)

    # ── cancellations ────────────────────────────────────────────────────────────────────────────

    async def _take_cancellation(
        self, subject: str, reply: str, data: bytes, headers: bytes
    ) -> None:
        arrived_at, error = self._received(CANCEL), None
        _, client_id = endpoint_and_client(subject)
        response = self._reply(reply, CANCEL) if _is_inbox_of(client_id, reply) else None
        try:
            cancelled = self._cancel(client_id, subject, data)
            if response is not None:
                await response.finish(_encode(cancelled))
        except HearthError as raised:
            error = raised
            if response is not None:
                await response.fail(error)
        self._ended(CANCEL, arrived_at, error)

    def _cancel(self, client_id: str, subject: str, data: bytes) -> Cancelled:
        """Cancels the request that the body names, if it runs here. Raises InvalidRequest and
        PayloadTooLarge.
        """
        if len(data) > MAX_CANCEL_BYTES:
            raise PayloadTooLarge(f"a cancellation has at most {MAX_CANCEL_BYTES} bytes")
        body: CancelRequest = _CANCEL_FIELDS.decode(data)
        request = self._running.get((client_id, body.request))
        if request is not None:
            request.cancel(RequestCancelled("the client has cancelled the request"))
        elif subject == api_request(CANCEL, client_id):
            raise InvalidRequest(
                "this gateway does not run the request: send the cancellation to "
                f"{subject}.{{{GATEWAY}}}, a header of the first reply to the request",
                param="request",
            )
        return Cancelled(body.request, request is not None)


def _is_inbox_of(client_id: str, reply: str) -> bool:
    """Returns whether the reply subject is in the client's inbox. The gateway may send to any
    subject: a client could otherwise make it send to the inbox of another client, or a command to a
    process.
    """
    return reply.startswith(client_inbox(client_id)) and "*" not in reply and ">" not in reply
