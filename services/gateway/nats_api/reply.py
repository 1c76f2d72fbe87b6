"""The messages with which a gateway answers one request, in order.

    open ──send*──▶ open ──finish | fail──▶ ended

`Hearth-Seq` numbers the messages, so that a client notices a lost one. Methods put their message
into the connection's buffer before they first await, so that two tasks may send.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog

from services.gateway.dialects.dialect import EncodeError
from services.gateway.http.response import error_headers
from shared.errors import DependencyUnavailable, HearthError, PayloadTooLarge
from shared.transport.decoding.untyped_messages import UntypedMessages

log = structlog.get_logger(__name__)

REQUEST, NUMBER, END = "Hearth-Request", "Hearth-Seq", "Hearth-End"
GATEWAY = "Hearth-Gateway"  # the gateway to which cancellations are sent
ERROR, ERROR_CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
RECEIPT = "Hearth-Receipt"  # the hash of the response's receipt
FAILED = "error"  # the value of END after an error
MAX_REASON_CHARS = 500  # an error's message may repeat what the client sent
_encode = msgspec.json.Encoder().encode


class NatsReply:
    """The reply to one request. `limit_headers` describe the tenant's limits, in the first and the
    last message. The first message also names the gateway.
    """

    def __init__(
        self,
        messages: UntypedMessages,
        subject: str,
        request_id: str,
        gateway_id: str,
        encode_error: EncodeError,
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
        """Sends a message, unless the reply has ended. `check` is the reply subject at which a
        listening client confirms. Raises DependencyUnavailable and PayloadTooLarge.
        """
        if not self.is_ended:
            await self._send(data, {} if self._num_sent else self.limit_headers, check)

    async def finish(self, data: bytes = b"", *, reason: str = "", receipt: str = "") -> None:
        """Sends the last message: a body, or the end reason of a stream, with the hash of its
        receipt. Raises DependencyUnavailable and PayloadTooLarge.
        """
        headers = {END: reason, **self.limit_headers} if reason else self.limit_headers
        headers = {**headers, RECEIPT: receipt} if receipt else headers
        await self._send(data, headers)
        self.is_ended = True

    async def fail(self, error: HearthError) -> None:
        """Sends the error as the last message. Does nothing if the reply has ended."""
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
        except PayloadTooLarge:  # the message was not sent
            self._num_sent = number
            raise
