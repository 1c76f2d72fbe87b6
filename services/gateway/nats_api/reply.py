"""The messages with which a gateway answers one request, in their order.

    open ──send*──▶ open ──finish | fail──▶ ended

Each has its number in `Hearth-Seq`, so that a client notices a lost one. Methods put their message
into the connection's buffer before they wait for anything: two tasks may send.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog

from services.gateway.dialects.dialect import EncodeError
from services.gateway.dialects.openai.errors import encode_error as encode_openai_error
from services.gateway.http.response import error_headers
from shared.errors import DependencyUnavailable, HearthError, PayloadTooLarge
from shared.transport.untyped_messages import UntypedMessages

log = structlog.get_logger(__name__)

REQUEST, NUMBER, END = "Hearth-Request", "Hearth-Seq", "Hearth-End"
GATEWAY = "Hearth-Gateway"  # to which a cancellation goes
ERROR, ERROR_CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
FAILED = "error"  # the value of END after an error
MAX_REASON_CHARS = 500  # an error's message may repeat what the client sent
_encode = msgspec.json.Encoder().encode


class NatsReply:
    """`limit_headers`: the state of the tenant's limits, in the first and the last message. The
    first one names the gateway, too.
    """

    def __init__(
        self,
        messages: UntypedMessages,
        subject: str,
        request_id: str,
        gateway_id: str,
        encode_error: EncodeError = encode_openai_error,
    ) -> None:
        self.request_id = request_id
        self.limit_headers: Mapping[str, str] = {}
        self.is_ended = False
        self._messages = messages
        self._subject = subject
        self._gateway_id = gateway_id
        self._encode_error = encode_error
        self._num_sent = 0

    async def send(self, data: bytes = b"", *, check: str = "") -> None:
        """`check`: the subject to which the client answers that it is still there. Raises
        DependencyUnavailable and PayloadTooLarge.
        """
        if not self.is_ended:
            await self._send(data, {} if self._num_sent else self.limit_headers, check)

    async def finish(self, data: bytes = b"", *, reason: str = "") -> None:
        """Sends the last message: a body, or after a stream the reason of its end. Raises
        DependencyUnavailable and PayloadTooLarge.
        """
        headers = {END: reason, **self.limit_headers} if reason else self.limit_headers
        await self._send(data, headers)
        self.is_ended = True

    async def fail(self, error: HearthError) -> None:
        """Sends the error as the last message. Does nothing after the last message."""
        if self.is_ended:
            return
        self.is_ended = True
        status, body = self._encode_error(error, self.request_id)
        headers = {
            END: FAILED,
            ERROR: error.public_message[:MAX_REASON_CHARS],
            ERROR_CODE: str(status),
            **self.limit_headers,
            **error_headers(error),
        }
        try:
            await self._send(_encode(body), headers)
        except DependencyUnavailable as lost:
            log.warning("reply_failed", request=self.request_id, error=lost.message)

    async def _send(self, data: bytes, more: Mapping[str, str], check: str = "") -> None:
        number = self._num_sent
        headers = {NUMBER: str(number), REQUEST: self.request_id, **more}
        if not number:
            headers[GATEWAY] = self._gateway_id
        self._num_sent += 1
        try:
            await self._messages.send(self._subject, data, headers=headers, reply=check)
        except PayloadTooLarge:  # not sent
            self._num_sent = number
            raise
