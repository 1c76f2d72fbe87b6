"""Admits requests over HTTP before their routes: authenticates, charges, reads the body.

    authenticate ──▶ reserve ──▶ read ──large──▶ preparation process ──▶ route ──▶ close

One order in Redis charges the request and takes its place under `concurrency` before a byte of its
body is read, so requests that are rejected later are paid, too. The reservation is closed when the
response has been sent. An ASGI middleware rather than Litestar's hooks, since only a middleware
sees the end of a request and may replace its body.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from litestar.types import ASGIApp, Empty, Receive, Scope, Send
from litestar.utils.scope.state import ScopeState

from services.gateway.body_budget import BodyBytes
from services.gateway.dialects.route_options import (
    BODY_KIND,
    IS_FREE,
    MODEL_OF,
    RAW,
    TAKES_IMAGES,
)
from services.gateway.dialects.transport_parts import TransportParts
from services.gateway.http.body_encoding import BodyEncoding
from services.gateway.http.headers import authorization_of, header_of
from services.gateway.http.server import ON_AUTHENTICATED
from services.gateway.request.prepared_bodies import decodable
from services.gateway.request.request_output import ClientDisconnected
from services.gateway.request.reservation import Reservation
from shared.errors import HearthError, PayloadTooLarge
from shared.tenancy.tenant import TenantRecord


class Admission:
    """Sets `request_id`, `tenant`, `reservation`, `prompts` and `hold` in the state of a request.

    `prompts`: the tokenized prompts of a large body, else empty. `hold`: counts bytes that the
    request reads from the store as body bytes, before it reads them; raises Overloaded.
    """

    def __init__(self, parts: TransportParts) -> None:
        self._dialects = parts.dialects
        self._submission = parts.submission
        self._api_keys = parts.api_keys
        self._new_request_id = parts.new_request_id
        self._body_limit = parts.body_limit
        self._budget = parts.budget

    def middleware(self, app: ASGIApp) -> ASGIApp:
        async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
            state = scope["state"]
            request_id = self._new_request_id()
            state["request_id"] = request_id
            record = self._submission.begin(
                request_id,
                dialect=self._dialects.of_path(scope["path"]).name,
                traceparent=header_of(scope["headers"], b"traceparent"),
            )
            tenant = await self._authenticate(scope)
            state["tenant"] = tenant
            options = scope["route_handler"].opt
            if options.get(IS_FREE):
                await app(scope, receive, send)
                return
            reservation = await self._submission.reserve(tenant, record)
            body = self._budget.body(tenant.tenant_id)
            state["reservation"], state["prompts"], state["hold"] = reservation, (), body.add
            try:
                if BODY_KIND in options:
                    receive = await self._with_body(scope, receive, body, reservation, options)
                await app(scope, receive, send)
            except HearthError as error:
                record.reject(error)
                raise
            finally:
                # A connection holds the scope of its last request, which has the body.
                ScopeState.from_scope(scope).body = Empty
                body.release()
                reservation.close_submissions()

        return admitted

    async def _authenticate(self, scope: Scope) -> TenantRecord:
        tenant = await self._api_keys.tenant_of(authorization_of(scope["headers"]))
        on_authenticated = scope["state"].get(ON_AUTHENTICATED)
        if on_authenticated is not None:
            on_authenticated(tenant.tenant_id)
        return tenant

    async def _with_body(
        self,
        scope: Scope,
        receive: Receive,
        body: BodyBytes,
        reservation: Reservation,
        options: Mapping[str, Any],
    ) -> Receive:
        """Returns a `receive` with the body, or with what remains of a large one."""
        limit = self._body_limit(takes_images=bool(options.get(TAKES_IMAGES)))
        data = decodable(await self._read(scope, receive, body, limit))
        kind = options[BODY_KIND]
        if kind == RAW:
            return _replayed(data, receive, body)
        model_of = partial(options[MODEL_OF], scope) if MODEL_OF in options else None
        read = await self._submission.read(reservation, kind, data, body.add, model_of)
        scope["state"]["prompts"] = read.prompts
        return _replayed(read.body, receive, body)

    async def _read(self, scope: Scope, receive: Receive, body: BodyBytes, limit: int) -> bytes:
        """Returns the body. Raises PayloadTooLarge, UnsupportedMediaType, Overloaded and
        ClientDisconnected.
        """
        announced = header_of(scope["headers"], b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        kind = header_of(scope["headers"], b"content-type")
        encoding = BodyEncoding(header_of(scope["headers"], b"content-encoding"), kind)
        parts, num_bytes, num_sent = [], 0, 0  # a compressed body may become nothing
        while True:
            event: dict[str, Any] = await receive()  # type: ignore[assignment]
            if event["type"] == "http.disconnect":
                raise ClientDisconnected("the client closed the connection")
            chunk = event.get("body", b"")
            num_sent += len(chunk)
            if num_sent > limit:
                raise _too_large(limit)
            for part in encoding.parts(chunk):
                num_bytes += len(part)
                if num_bytes > limit:
                    raise _too_large(limit)
                body.add(len(part))
                parts.append(part)
            if not event.get("more_body", False):
                return encoding.text(b"".join(parts))


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes")


def _replayed(data: bytes, receive: Receive, body: BodyBytes) -> Receive:
    """Returns a `receive` whose first event has the body. The second call means that the request is
    submitted and the response begins, so the body no longer counts.
    """
    has_sent = False

    async def replay() -> Any:
        nonlocal has_sent
        if has_sent:
            body.release()
            return await receive()
        has_sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    return replay
