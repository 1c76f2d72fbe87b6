"""The bus seam: publish, request, subscribe and serve typed messages; NATS behind it.

This is the one place where exceptions become replies and replies exceptions again. No message is
read while another is handed over, so a subscriber only enqueues, and what a request has to wait for
runs as a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from shared.errors import (
    ERROR_BY_CODE,
    DependencyUnavailable,
    HearthError,
    InvalidRequest,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    SenderMismatch,
)
from shared.messages import Failure, Message
from shared.subjects import from_anyone, inbox_prefix, sender_of, sent_by
from shared.transport.nats_client import DirectClient
from shared.transport.sender_check import SenderCheck
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)
D = TypeVar("D")  # what a message arrives as
Unsubscribe = Callable[[], Awaitable[None]]

MAX_SERVED_AT_ONCE = 1024
MAX_REFUSALS = 10  # in a second: a credential may be newer than what the server has read so far
_encode = msgspec.msgpack.Encoder().encode


class Bus(Protocol):
    @property
    def process_id(self) -> str: ...

    @property
    def max_payload_bytes(self) -> int: ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def num_reconnects(self) -> int:
        """Grows whenever the connection was lost, before it stands again."""
        ...

    @property
    def num_impostors(self) -> int:
        """Messages refused so far, as another sent them than they say."""
        ...

    async def publish(self, subject: str, message: Message) -> None:
        """Raises PayloadTooLarge before anything is sent, DependencyUnavailable without a link."""
        ...

    async def request(
        self, subject: str, message: Message, reply_type: type[M], *, timeout_s: float
    ) -> M:
        """Raises what the other side raised, NoResponders, RequestTimeout, DependencyUnavailable
        for a reply that is no message, or as `publish`.
        """
        ...

    async def subscribe(
        self, subject: str, message_type: Any, handler: Callable[[Any], None], *, queue: str = ""
    ) -> Unsubscribe:
        """`handler` is called in the order of arrival and must not block."""
        ...

    async def serve(
        self, subject: str, message_type: Any, handler: Callable[[Any], Any], *, queue: str = ""
    ) -> Unsubscribe:
        """`handler` (plain or async) returns the reply or raises; an async one runs as a task."""
        ...

    async def close(self) -> None: ...


def failure_of(error: Exception) -> Failure:
    """What a caller may know of an exception: foreign ones show neither message nor type."""
    if isinstance(error, HearthError):
        return Failure(
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )
    return Failure(code=HearthError.code, message="internal error")


def error_of(failure: Failure) -> HearthError:
    error_class = ERROR_BY_CODE.get(failure.code, HearthError)
    return error_class(failure.message, param=failure.param, retry_after_s=failure.retry_after_s)


def without_password(url: str) -> str:
    """The URL as it may stand in a log or an error."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port is not None else ""
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))


def begin_reply(
    handler: Callable[[Any], Any], decode: Callable[[bytes], Any], data: bytes
) -> Message | Awaitable[Message]:
    """Runs a handler on an encoded request; of an async one the rest is to be awaited. Every
    exception becomes a Failure.
    """
    try:
        request = decode(data)
    except UNREADABLE as error:
        return failure_of(InvalidRequest(f"not a valid message: {error}"))
    except SenderMismatch as error:
        log.warning("sender_mismatch", error=error.message)
        return failure_of(error)
    try:
        reply: Message | Awaitable[Message] = handler(request)
    except Exception as error:
        return _failed(error)
    return reply if isinstance(reply, Message) else _finish_reply(reply)


async def reply_to(
    handler: Callable[[Any], Any], decode: Callable[[bytes], Any], data: bytes
) -> Message:
    """`begin_reply`, to the end."""
    reply = begin_reply(handler, decode, data)
    return reply if isinstance(reply, Message) else await reply


async def _finish_reply(reply: Awaitable[Message]) -> Message:
    try:
        return await reply
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Failure:
    if not isinstance(error, HearthError):  # the service's edge: log and answer
        log.error("handler_failed", exc_info=error)
    return failure_of(error)


def hand_over(
    subject: str, handler: Callable[[Any], None], decode: Callable[[D], Any], data: D
) -> None:
    """Runs a subscriber on an encoded message; what is no message, or not its sender's, is logged
    and dropped.
    """
    try:
        message = decode(data)
    except UNREADABLE as error:
        log.warning("message_invalid", subject=subject, error=str(error))
        return
    except SenderMismatch as error:
        log.warning("sender_mismatch", subject=subject, error=error.message)
        return
    handler(message)


class _ConnectionEvents:
    """What nats-py tells. Before the connection stands its errors are kept, later ones logged."""

    def __init__(self, client: Client) -> None:
        self.last_error: Exception | None = None
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._num_refusals = 0

    async def on_error(self, error: Exception) -> None:
        if self._client.is_connected:
            log.warning("nats_error", error=str(error))
            return
        is_refusal = "authorization" in str(error).lower()
        self._num_refusals += is_refusal
        if is_refusal or not self._num_refusals:  # a reset after a refusal is no reason
            self.last_error = error
        if self._num_refusals >= MAX_REFUSALS and not self.refused.done():
            self.refused.set_result(None)

    async def on_disconnect(self) -> None:
        log.warning("nats_disconnected")

    async def on_reconnect(self) -> None:
        log.info("nats_reconnected")


class NatsBus:
    """One NATS connection. The user name in the URL, if any, is the process id.

    It adds the sender to every subject, and hears each subject from any sender.
    """

    def __init__(self, client: DirectClient, process_id: str) -> None:
        self.process_id = process_id
        self._client = client
        self._sender_check = SenderCheck()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reply_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    @classmethod
    async def connect(cls, url: str, *, process_id: str, timeout_s: float = 10.0) -> NatsBus:
        """Raises DependencyUnavailable if no server lets this process in within `timeout_s`."""
        client = DirectClient()
        events = _ConnectionEvents(client)
        connecting = asyncio.ensure_future(
            client.connect(
                url,
                name=process_id,
                inbox_prefix=inbox_prefix(process_id),
                error_cb=events.on_error,
                disconnected_cb=events.on_disconnect,
                reconnected_cb=events.on_reconnect,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,  # type: ignore[arg-type]  # seconds; a float works
                connect_timeout=2,
                ping_interval=1,
                max_outstanding_pings=2,
                pending_size=64 * 1024 * 1024,
            )
        )
        await asyncio.wait(
            {connecting, events.refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if client.is_connected:
            return cls(client, process_id)
        while not connecting.done():  # a cancellation that meets a timeout within can be lost
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=0.1)
        (ended,) = await asyncio.gather(connecting, return_exceptions=True)
        reason = events.last_error or (ended if isinstance(ended, Exception) else "no answer")
        raise DependencyUnavailable(f"cannot reach NATS at {without_password(url)}: {reason}")

    @property
    def max_payload_bytes(self) -> int:
        return self._client.max_payload

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def num_reconnects(self) -> int:
        return self._client.stats["reconnects"]

    @property
    def num_impostors(self) -> int:
        return self._sender_check.num_impostors

    async def publish(self, subject: str, message: Message) -> None:
        try:
            await self._client.publish(sent_by(subject, self.process_id), self._payload(message))
        except (nats.errors.Error, OSError) as error:
            raise DependencyUnavailable(f"cannot publish on NATS: {error!r}") from error

    async def request(
        self, subject: str, message: Message, reply_type: type[M], *, timeout_s: float
    ) -> M:
        try:
            reply = await self._client.request_bytes(
                sent_by(subject, self.process_id), self._payload(message), timeout_s=timeout_s
            )
        except nats.errors.NoRespondersError:
            raise NoResponders(f"nobody serves {subject}") from None
        except nats.errors.TimeoutError:
            raise RequestTimeout(f"no reply on {subject} within {timeout_s:g} s") from None
        except (nats.errors.Error, OSError) as error:
            raise DependencyUnavailable(f"cannot request on NATS: {error!r}") from error
        try:
            decoded = self._reply_decoder(reply_type).decode(reply)
            self._sender_check.check_reply(subject, decoded)
        except (*UNREADABLE, SenderMismatch) as error:
            raise DependencyUnavailable(f"a reply on {subject} makes no sense: {error}") from None
        if isinstance(decoded, Failure):
            raise error_of(decoded)
        return decoded

    async def subscribe(
        self, subject: str, message_type: Any, handler: Callable[[Any], None], *, queue: str = ""
    ) -> Unsubscribe:
        decode = msgspec.msgpack.Decoder(message_type).decode

        async def take(wire_subject: str, reply: str, data: bytes) -> None:
            checked = self._sender_check.checked(decode, sender_of(wire_subject))
            try:
                hand_over(wire_subject, handler, checked, data)
            except Exception:  # the service's edge: one bad message must not end the subscription
                log.exception("subscriber_failed", subject=wire_subject)

        subscription = await self._client.listen(from_anyone(subject), take, queue=queue)
        return subscription.unsubscribe

    async def serve(
        self, subject: str, message_type: Any, handler: Callable[[Any], Any], *, queue: str = ""
    ) -> Unsubscribe:
        decode = msgspec.msgpack.Decoder(message_type).decode

        async def answer(reply_to: str, reply: Message | Awaitable[Message]) -> None:
            told = reply if isinstance(reply, Message) else await reply
            try:
                await self._client.publish(reply_to, self._payload(told))
            except (nats.errors.Error, HearthError) as error:
                log.warning("reply_failed", subject=subject, error=str(error))

        async def take(wire_subject: str, reply_to: str, data: bytes) -> None:
            if len(self._tasks) >= MAX_SERVED_AT_ONCE:
                refusal = Overloaded("too many requests at once", retry_after_s=1.0)
                await answer(reply_to, failure_of(refusal))
                return
            checked = self._sender_check.checked(decode, sender_of(wire_subject))
            reply = begin_reply(handler, checked, data)
            if isinstance(reply, Message):
                await answer(reply_to, reply)
                return
            task = asyncio.create_task(answer(reply_to, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        subscription = await self._client.listen(from_anyone(subject), take, queue=queue)
        return partial(self._stop_serving, subscription)

    async def _stop_serving(self, subscription: Subscription) -> None:
        """What the server sends until it has seen that nobody subscribes is still answered."""
        try:
            # nats-py's own drain forgets the subscription before the server has (see `flush`)
            await self._client.unsubscribe_at_server(subscription)
            await self.flush()
            await subscription.drain()
        except (nats.errors.Error, OSError) as error:
            log.warning("unsubscribe_failed", subject=subscription.subject, error=repr(error))

    async def flush(self) -> None:
        """Returns when the server has taken all that was published and subscribed.

        nats-py writes a flush's PING ahead of what it still buffers, but sends that buffer before
        the PONG is back: the second PING comes behind it.
        """
        for _ in range(2):
            await self._client.flush(timeout=2)

    async def close(self) -> None:
        if self._client.is_connected:
            try:
                await self.flush()
            except nats.errors.Error as error:
                log.warning("nats_flush_failed", error=repr(error))
        await self._client.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _payload(self, message: Message) -> bytes:
        data = _encode(message)
        limit = self._client.max_payload
        if len(data) > limit:
            raise PayloadTooLarge(
                f"the message has {len(data)} bytes; this bus takes at most {limit}"
            )
        return data

    def _reply_decoder(self, reply_type: Any) -> msgspec.msgpack.Decoder[Any]:
        decoder = self._reply_decoders.get(reply_type)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(reply_type | Failure)
            self._reply_decoders[reply_type] = decoder
        return decoder
