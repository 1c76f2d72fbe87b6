"""The endpoint `/v1/cluster/faults`: an operator kills or freezes a worker of a local cluster.

Only `hearth up` on loopback gives its gateway a socket for it, and owns the processes. Any other
gateway has no worker that may fail.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Request, Response

from services.gateway.http.errors import RouteNotFound
from services.gateway.operator.cluster.events import EventLog
from shared.errors import DependencyUnavailable, InvalidRequest
from shared.lifecycle.faults import FREEZE_S, MAX_LINE_BYTES, Fault, FaultReply, FaultRequest
from shared.transport.wire_errors import UNREADABLE, one_line

REPLY_TIMEOUT_S = 2.0
_EVENTS: dict[Fault, str] = {"kill": "killed", "freeze": "frozen"}


class FaultCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker_id: str
    fault: Fault


class FaultTargets(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that may be killed and frozen, and how long a frozen one rests."""

    worker_ids: tuple[str, ...]
    freeze_s: float = FREEZE_S


class FaultRoutes:
    """`socket` is that of `hearth up`; empty: there is none, and no such route."""

    def __init__(self, socket: str, token: str, events: EventLog) -> None:
        self._socket = socket
        self._token = token
        self._events = events

    async def targets(self) -> Response[FaultTargets]:
        request = FaultRequest(token=self._token)
        reply = await self._ask(request) if self._socket else FaultReply()
        body = FaultTargets(worker_ids=reply.worker_ids)
        return Response(body, headers={"cache-control": "no-store"})

    async def inject(self, request: Request[Any, Any, Any]) -> Response[FaultTargets]:
        """Raises InvalidRequest for another body, or a worker that is not one of `targets`, and
        RouteNotFound without a socket.
        """
        if not self._socket:
            raise RouteNotFound("only the gateway of `hearth up` on loopback injects faults")
        try:
            command = msgspec.json.decode(await request.body(), type=FaultCommand)
        except UNREADABLE as error:
            raise InvalidRequest(f"not a fault: {one_line(error)}") from None
        reply = await self._ask(
            FaultRequest(token=self._token, fault=command.fault, worker_id=command.worker_id)
        )
        self._events.add(_EVENTS[command.fault], command.worker_id, detail="by an operator")
        return Response(FaultTargets(worker_ids=reply.worker_ids))

    async def _ask(self, request: FaultRequest) -> FaultReply:
        """Raises InvalidRequest with the reason of a refusal."""
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                line = await _exchange(self._socket, msgspec.json.encode(request) + b"\n")
            reply = msgspec.json.decode(line, type=FaultReply)
        except (OSError, TimeoutError, *UNREADABLE):
            raise DependencyUnavailable("`hearth up` does not answer") from None
        if reply.error:
            raise InvalidRequest(reply.error)
        return reply


async def _exchange(socket: str, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(socket, limit=MAX_LINE_BYTES)
    try:
        writer.write(line)
        await writer.drain()
        return await reader.readline()
    finally:
        writer.close()
