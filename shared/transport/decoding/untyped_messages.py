"""Messages with headers and data of any format, for clients that do not speak `shared.messages`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import nats.errors
import structlog
from nats.aio.subscription import Subscription

from shared.errors import DependencyUnavailable, PayloadTooLarge
from shared.transport.nats_client import DirectClient, TakeWithHeaders
from shared.transport.server_config import CLIENT_PAYLOAD_BYTES

log = structlog.get_logger(__name__)

HEADER_LINE_BYTES = len(": \r\n")
HEADER_BLOCK_BYTES = len("NATS/1.0\r\n\r\n")


class UntypedMessages:
    """Sends and receives bytes. `inbox` is the prefix of this process's reply subjects."""

    def __init__(self, client: DirectClient, inbox: str) -> None:
        self._client = client
        self.inbox = inbox

    @property
    def max_payload_bytes(self) -> int:
        """The limit of headers and data together."""
        return min(self._client.max_payload, CLIENT_PAYLOAD_BYTES)

    @property
    def num_reconnects(self) -> int:
        """The number of reconnections. It increases after each loss, before the connection is
        established again.
        """
        return self._client.stats["reconnects"]

    async def listen(
        self, subject: str, take: TakeWithHeaders, *, queue: str = ""
    ) -> Callable[[], Awaitable[None]]:
        """Subscribes. `take` is called in the order of arrival and delays all later messages of the
        process, so it may await only `send`. Returns a function that ends the subscription.
        """
        subscription = await self._client.listen_with_headers(subject, take, queue=queue)

        async def stop() -> None:
            await self._stop(subscription)

        return stop

    async def flush(self) -> None:
        """Returns when the server has processed all subscriptions and messages so far."""
        try:
            await self._client.flush_all()
        except (nats.errors.Error, OSError) as error:
            log.warning("nats_flush_failed", error=repr(error))

    async def _stop(self, subscription: Subscription) -> None:
        try:
            await self._client.stop_listening(subscription)
        except (nats.errors.Error, OSError) as error:
            log.warning("unsubscribe_failed", subject=subscription.subject, error=repr(error))

    async def send(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """Sends bytes. Raises PayloadTooLarge before sending, and DependencyUnavailable
        without a connection.
        """
        num_bytes = len(data) + (0 if headers is None else encoded_bytes(headers))
        if num_bytes > self.max_payload_bytes:  # the server would close the connection
            raise PayloadTooLarge(
                f"the message has {num_bytes} bytes; NATS accepts at most {self.max_payload_bytes}"
            )
        fields = None if headers is None else dict(headers)
        try:
            await self._client.publish(subject, data, reply=reply, headers=fields)
        except (nats.errors.Error, OSError) as error:
            raise DependencyUnavailable(f"cannot publish on NATS: {error!r}") from error


def encoded_bytes(headers: Mapping[str, str]) -> int:
    """Returns an upper bound of the headers' bytes in a message."""
    fields = sum(len(name) + 4 * len(text) for name, text in headers.items())
    return HEADER_BLOCK_BYTES + HEADER_LINE_BYTES * len(headers) + fields
