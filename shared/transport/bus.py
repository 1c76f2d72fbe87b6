"""The bus seam: publish, request, subscribe and serve typed messages over NATS.

Only this module converts exceptions to replies and back. No message is read while a handler runs,
so a subscriber only enqueues, and a request handler that has to wait runs as a separate task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.subscription import Subscription

from shared.background import Background, is_logged, item_error, start_awaited
from shared.clock import Clock
from shared.errors import (
    ERROR_BY_CODE,
    ConfigError,
    DependencyUnavailable,
    HearthError,
    InvalidRequest,
    NoResponders,
    OutsideRegions,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    SenderMismatch,
    SendForbidden,
)
from shared.messages import Failure, Message
from shared.nats_urls import api_user, nats_servers, without_password
from shared.regions.region_check import RegionCheck
from shared.subjects import class_of, from_anyone, inbox_prefix, sent_by, site_addressed, site_of
from shared.telemetry.log_limit import LogLimit
from shared.tls import TlsFiles
from shared.transport.credential_files import CredentialFiles
from shared.transport.decoding.newer_values import announcement_decoder
from shared.transport.decoding.untyped_messages import UntypedMessages
from shared.transport.gathered_messages import GatheredMessages, Handle
from shared.transport.lost_connection import POLL_S, LostConnection
from shared.transport.nats_client import DirectClient, PublishDenied, Take
from shared.transport.rejected_messages import INVALID, OUTSIDE_REGIONS, RejectedMessages
from shared.transport.sender_check import SenderCheck
from shared.transport.site_bytes import RefusedSites, SiteBytes
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)
D = TypeVar("D")  # an encoded message
Unsubscribe = Callable[[], Awaitable[None]]

MAX_SERVED_AT_ONCE = 1024
MAX_REJECTIONS = 10  # takes 1 s: the server may not have read a new credential yet
MAX_DENIALS = 64  # the last ones are retained
DENIAL = "permissions violation"
_DENIED = re.compile(rf'{DENIAL} for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
TRACE_HEADER = "traceparent"
TRACE_BYTES = 128  # more than the header takes in a message
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
        """Increases after each loss of the connection, before it is established again."""
        ...

    @property
    def num_sender_mismatches(self) -> int:
        """Number of messages rejected because they named a wrong sender."""
        ...

    @property
    def site_bytes(self) -> SiteBytes: ...

    @property
    def refused_sites(self) -> RefusedSites: ...

    @property
    def server_name(self) -> str:
        """The server's own id, or the name of its cluster: all processes of a site have one."""
        ...

    @property
    def server_certificate_ends_at(self) -> float | None:
        """The end of the certificate of the server of the last connection, in Unix seconds; None
        without TLS.
        """
        ...

    @property
    def regions(self) -> RegionCheck:
        """The region classes whose data this process may send and receive."""
        ...

    async def publish(self, subject: str, message: Message) -> None:
        """Publishes a message; one with data of a region class under the subject in that class.
        Raises PayloadTooLarge and SendForbidden before sending, and DependencyUnavailable without a
        connection.
        """
        ...

    async def request(
        self,
        subject: str,
        message: Message,
        reply_type: type[M],
        *,
        timeout_s: float,
        on_late: Callable[[M | Failure | None], None] | None = None,
    ) -> M:
        """Returns the reply. Raises the error that the handler raised, NoResponders,
        RequestTimeout, DependencyUnavailable for an invalid reply, or the errors of `publish`.

        After RequestTimeout `on_late` is called once: with the reply if a valid one arrives within
        LATE_REPLY_S of the timeout, else with None.
        """
        ...

    async def subscribe(
        self,
        subject: str,
        message_type: Any,
        handler: Callable[[Any], None],
        *,
        queue: str = "",
        gather_s: float = 0.0,
    ) -> Unsubscribe:
        """Subscribes, also to the subject in each region class of this process. `handler` is called
        in the order of arrival and must not block. With `gather_s` messages that follow others
        closely wait as long, and are handed over together.
        """
        ...

    async def serve(
        self, subject: str, message_type: Any, handler: Callable[[Any], Any], *, queue: str = ""
    ) -> Unsubscribe:
        """Serves requests. `handler` (sync or async) returns the reply or raises; an async one runs
        as a task.
        """
        ...

    async def close(self) -> None: ...


def failure_of(error: Exception) -> Failure:
    """Returns the Failure for an exception; one that is no HearthError exposes no message or
    type.
    """
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


def begin_reply(
    subject: str,
    handler: Callable[[Any], Any],
    decode: Callable[[bytes], Any],
    data: bytes,
    rejections: RejectedMessages,
) -> Message | Awaitable[Message]:
    """Runs a handler on an encoded request. Returns the reply, or for an async handler an awaitable
    of it. Every exception becomes a Failure.
    """
    try:
        request = decode(data)
    except UNREADABLE as error:
        return failure_of(InvalidRequest(f"not a valid message: {error}"))
    except SenderMismatch as error:
        rejections.write("sender_mismatch", subject, error.message)
        return failure_of(error)
    except OutsideRegions as error:
        rejections.write(OUTSIDE_REGIONS, subject, error.message)
        return failure_of(error)
    try:
        reply: Message | Awaitable[Message] = handler(request)
    except BaseException as raised:
        return _failed(item_error(raised))
    return reply if isinstance(reply, Message) else _finish_reply(reply)


async def reply_to(
    subject: str,
    handler: Callable[[Any], Any],
    decode: Callable[[bytes], Any],
    data: bytes,
    rejections: RejectedMessages,
) -> Message:
    """Calls the handler with the decoded message and returns its reply, or a Failure."""
    reply = begin_reply(subject, handler, decode, data, rejections)
    return reply if isinstance(reply, Message) else await reply


async def _finish_reply(reply: Awaitable[Message]) -> Message:
    try:
        return await reply
    except BaseException as raised:
        return _failed(item_error(raised))


def _failed(error: Exception) -> Failure:
    if not isinstance(error, HearthError):  # the service boundary: log and reply
        log.error("handler_failed", exc_info=error)
    return failure_of(error)


def hand_over(
    subject: str,
    handler: Callable[[Any], None],
    decode: Callable[[D], Any],
    data: D,
    rejections: RejectedMessages,
) -> None:
    """Runs a subscriber on an encoded message. An invalid message, or one that names a wrong
    sender, is logged and dropped.
    """
    try:
        message = decode(data)
    except UNREADABLE as error:
        rejections.write(INVALID, subject, str(error))
        return
    except SenderMismatch as error:
        rejections.write("sender_mismatch", subject, error.message)
        return
    except OutsideRegions as error:
        rejections.write(OUTSIDE_REGIONS, subject, error.message)
        return
    except Overloaded as error:
        rejections.write("message_left_out", subject, error.message)
        return
    handler(message)


def late_reply(
    subject: str,
    decode: Callable[[bytes], M | Failure],
    sender_check: SenderCheck,
    reply: bytes | None,
) -> M | Failure | None:
    """Returns the decoded reply; None if there is none, or no valid one."""
    if reply is None:
        return None
    try:
        decoded = decode(reply)
        sender_check.check_reply(subject, decoded)
    except (*UNREADABLE, SenderMismatch) as error:
        log.warning("late_reply_invalid", subject=subject, error=str(error))
        return None
    return decoded


def trace_header(traceparent: bytes) -> str:
    """Formats `traceparent`, see `messages.Traceparent`."""
    trace_id, span_id, flags = traceparent[:16], traceparent[16:24], traceparent[24:]
    return f"00-{trace_id.hex()}-{span_id.hex()}-{flags.hex()}"


class NatsRejected(DependencyUnavailable):
    """The server does not know this user, or its password is another."""


class _ConnectionEvents:
    """nats-py's callbacks. Stores errors until the connection is established, then logs them.

    nats-py calls them in its read and reconnect loops, which an exception would end: none raises.
    """

    def __init__(self, client: DirectClient, files: CredentialFiles) -> None:
        self._files = files
        self.last_error: Exception | None = None
        self.rejected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_losses = 0  # of the connection
        self.denials: deque[str] = deque(maxlen=MAX_DENIALS)  # in the server's words
        self.on_denied: Callable[[str, str], None] = lambda verb, subject: None
        self._client = client
        self._num_rejections = 0
        self._lines = LogLimit()
        self.expects_gaps = False

    async def on_error(self, error: Exception) -> None:
        with contextlib.suppress(Exception):  # the error's own text may raise
            self._take_error(error)
        if not self._client.is_connected:
            self._read_files()

    def _take_error(self, error: Exception) -> None:
        if self._client.is_connected:
            denied = _DENIED.search(str(error))
            if denied is None:
                log.warning("nats_error", error=str(error))
                return
            self._lines.write(log.warning, "nats_error", str(error), error=str(error))
            self.denials.append(str(error).lower())
            self.on_denied(*denied.groups())
            return
        is_rejection = "authorization" in str(error).lower()
        self._num_rejections += is_rejection
        if is_rejection or not self._num_rejections:  # a reset after a rejection is not the cause
            self.last_error = error
        if self._num_rejections >= MAX_REJECTIONS and not self.rejected.done():
            self.rejected.set_result(None)

    async def on_disconnect(self) -> None:
        self.num_losses += 1
        if self._client.is_closed:
            return  # in order
        self._client.drop_pending_replies()
        level = logging.INFO if self.expects_gaps else logging.WARNING
        log.log(level, "nats_disconnected")
        self._read_files()

    def _read_files(self) -> None:
        try:
            found = self._files.read_changed()
        except ConfigError as error:  # half replaced: read again when they change again
            log.warning("nats_files_unreadable", reason=error.message)
            return
        if found is not None:
            self._client.use(found)
            log.info("nats_files_read")

    async def on_reconnect(self) -> None:
        if not self.reconnected.done():
            self.reconnected.set_result(None)
        log.info("nats_reconnected")


async def _accepted(
    connecting: asyncio.Task[None], client: DirectClient, events: _ConnectionEvents
) -> None:
    """Returns once a server has accepted the connection or will not. One that reads its
    configuration again may end at once what it has accepted; nats-py then reconnects.
    """
    first = asyncio.FIRST_COMPLETED
    await asyncio.wait({connecting, events.rejected}, return_when=first)
    if client.is_reconnecting:
        await asyncio.wait({events.reconnected, events.rejected}, return_when=first)


class NatsBus:
    """One NATS connection. The user name in the URL, if any, is the process's credential.

    Adds the sender to every published subject, and subscribes to each subject from any sender.
    """

    def __init__(
        self,
        client: DirectClient,
        process_id: str,
        events: _ConnectionEvents,
        regions: RegionCheck,
    ) -> None:
        self.process_id = process_id
        self.regions = regions
        self._client = client
        self._events = events
        events.on_denied = self._take_denial
        self._sender_check = SenderCheck(regions=regions)
        self._rejections = RejectedMessages()
        self._serving = Background()
        self._all_gathered: list[GatheredMessages] = []
        self._watch = Background()
        self._reply_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        process_id: str,
        timeout_s: float = 10.0,
        tls: TlsFiles | None = None,
        tls_first: bool = False,
        to_clients: bool = False,
        regions: RegionCheck | None = None,
        url_file: Path | None = None,
    ) -> NatsBus:
        """Connects to NATS. Raises DependencyUnavailable if no server accepts the connection within
        `timeout_s`, and ConfigError for an invalid URL or unreadable files. `regions` are the
        region classes of the process; None: it is in none. `url_file` is the file of the URL, whose
        password may change; None: the URL is in none.

        The servers of a comma list are tried in order. With `to_clients` it is a gateway's user in
        the account of the API clients. A tls:// URL sends its credential only to a server whose
        certificate is verified, with `tls_first` before the server has sent anything.
        """
        servers = nats_servers(url)
        user = servers.user
        if to_clients and user is not None:
            user = api_user(user)
        requires_tls = "tls://" in url
        tls_files = (tls or TlsFiles()) if requires_tls else None
        files = CredentialFiles(servers, tls_files, url_file=url_file, to_clients=to_clients)
        credential = files.read()
        key = credential.key
        client = DirectClient(requires_tls=requires_tls, key=key)
        events = _ConnectionEvents(client, files)
        connecting = start_awaited(
            client.connect(
                servers.urls,
                user=user,  # used for the servers that the first one names, too
                password=credential.password,
                signature_cb=None if key is None else key.sign,
                dont_randomize=True,
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
                tls=credential.tls,
                tls_handshake_first=tls_first and requires_tls,
            )
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _accepted(connecting, client, events)
        if client.is_connected:
            return cls(client, process_id, events, RegionCheck() if regions is None else regions)
        while not connecting.done():  # a cancellation that coincides with a timeout can be lost
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=0.1)
        (ended,) = await asyncio.gather(connecting, return_exceptions=True)
        ending = ended if isinstance(ended, Exception) else None
        await client.end()  # it may be reconnecting
        reason = str(events.last_error or ending or "") or "no answer"  # a timeout has no text
        kind = NatsRejected if events.rejected.done() else DependencyUnavailable
        raise kind(f"cannot reach NATS at {without_password(url)}: {reason}")

    def end_process_when_lost(self, clock: Clock) -> None:
        """Ends a service process when the connection is lost: see `lost_connection`."""
        self._watch.start_own(self._fail_when_lost(clock))

    async def _fail_when_lost(self, clock: Clock) -> None:
        connection = LostConnection()
        while True:
            await clock.sleep(POLL_S)
            reason = connection.reason(
                is_connected=self._client.is_connected, is_running=self._client.is_running
            )
            if reason is not None:
                raise DependencyUnavailable(reason)

    @contextlib.contextmanager
    def expecting_gaps(self) -> Iterator[None]:
        """The connection may be lost meanwhile without a warning: the process is busy, and the
        server drops who does not answer.
        """
        self._events.expects_gaps = True
        try:
            yield
        finally:
            self._events.expects_gaps = False

    @property
    def untyped(self) -> UntypedMessages:
        """Messages of other formats over this connection."""
        return UntypedMessages(self._client, inbox_prefix(self.process_id))

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
    def num_sender_mismatches(self) -> int:
        return self._sender_check.num_sender_mismatches

    @property
    def site_bytes(self) -> SiteBytes:
        return self._sender_check.site_bytes

    @property
    def refused_sites(self) -> RefusedSites:
        return self._sender_check.refused_sites

    @property
    def server_name(self) -> str:
        return self._client.server_name

    @property
    def server_certificate_ends_at(self) -> float | None:
        return self._client.server_certificate_ends_at

    def _take_denial(self, verb: str, wire_subject: str) -> None:
        """Handles that the server has refused a subject, which nats-py has in lower case."""
        self.regions.denied(wire_subject)
        if verb.lower() == "publish":
            self._client.fail_requests(wire_subject)

    def _count_sent(self, site: str | None, num_bytes: int) -> None:
        if site is not None:
            self.site_bytes.sent[site] += num_bytes

    def has_denied(self, subject: str) -> bool:
        """Whether the server has lately rejected that this credential sends to the subject or
        receives from it.
        """
        wire = (sent_by(subject, self.process_id), from_anyone(subject))
        quoted = [f'"{each.lower()}"' for each in wire]
        return any(each in denial for denial in self._events.denials for each in quoted)

    async def publish(self, subject: str, message: Message) -> None:
        subject = self.regions.subject_for(subject, message)
        try:
            data = self._payload(message)
            await self._client.publish(
                sent_by(subject, self.process_id), data, headers=self._headers(message, data)
            )
            self._count_sent(site_addressed(subject), len(data))
        except (nats.errors.Error, OSError) as error:
            raise DependencyUnavailable(f"cannot publish on NATS: {error!r}") from error

    async def request(
        self,
        subject: str,
        message: Message,
        reply_type: type[M],
        *,
        timeout_s: float,
        on_late: Callable[[M | Failure | None], None] | None = None,
    ) -> M:
        decode = self._reply_decoder(reply_type).decode

        def take_late(reply: bytes | None) -> None:
            assert on_late is not None
            on_late(late_reply(subject, decode, self._sender_check, reply))

        data, site = self._payload(message), site_addressed(subject)
        sent_to = self.regions.subject_for(subject, message)
        self._count_sent(site, len(data))
        try:
            reply = await self._client.request_bytes(
                sent_by(sent_to, self.process_id),
                data,
                timeout_s=timeout_s,
                headers=self._headers(message, data),
                on_late=None if on_late is None else take_late,
            )
        except nats.errors.NoRespondersError:
            raise NoResponders(f"nobody serves {sent_to}") from None
        except nats.errors.TimeoutError:
            raise RequestTimeout(f"no reply on {sent_to} within {timeout_s:g} s") from None
        except PublishDenied:
            reason = f"NATS does not let this process send to {sent_to}"
            kind = SendForbidden if class_of(sent_to) else DependencyUnavailable
            raise kind(reason) from None
        except (nats.errors.Error, OSError) as error:
            raise DependencyUnavailable(f"cannot request on NATS: {error!r}") from error
        if site is not None:
            self.site_bytes.received[site] += len(reply)
        try:
            decoded: M | Failure = decode(reply)
            self._sender_check.check_reply(subject, decoded)
        except (*UNREADABLE, SenderMismatch) as error:
            raise DependencyUnavailable(f"invalid reply on {subject}: {error}") from None
        if isinstance(decoded, Failure):
            raise error_of(decoded)
        return decoded

    async def subscribe(
        self,
        subject: str,
        message_type: Any,
        handler: Callable[[Any], None],
        *,
        queue: str = "",
        gather_s: float = 0.0,
    ) -> Unsubscribe:
        decode = announcement_decoder(message_type)

        def handle(wire_subject: str, data: bytes) -> None:
            checked = self._sender_check.checked(decode, wire_subject)
            try:
                hand_over(wire_subject, handler, checked, data, self._rejections)
            except BaseException as raised:  # one message must not end the subscription
                item_error(raised)
                log.exception("subscriber_failed", subject=wire_subject)

        add = self._gathered(handle, gather_s) if gather_s else handle

        async def take(wire_subject: str, reply: str, data: bytes) -> None:
            add(wire_subject, data)

        subscriptions = await self._listen(subject, take, queue)

        async def unsubscribe() -> None:
            for each in subscriptions:
                await each.unsubscribe()

        return unsubscribe

    async def _listen(self, subject: str, take: Take, queue: str) -> list[Subscription]:
        return [
            await self._client.listen(from_anyone(each), take, queue=queue)
            for each in self.regions.subjects(subject)
        ]

    def _gathered(self, handle: Handle, gather_s: float) -> Handle:
        gathered = GatheredMessages(handle, gather_s)
        self._all_gathered.append(gathered)
        return gathered.add

    async def serve(
        self, subject: str, message_type: Any, handler: Callable[[Any], Any], *, queue: str = ""
    ) -> Unsubscribe:
        decode = msgspec.msgpack.Decoder(message_type).decode

        events = self._events

        async def answer(
            reply_to: str, reply: Message | Awaitable[Message], num_losses: int, site: str | None
        ) -> None:
            message = reply if isinstance(reply, Message) else await reply
            if events.num_losses != num_losses:
                return  # the server would take it for an intrusion; whoever asked asks again
            try:
                payload = self._reply_payload(message)
                await self._client.publish(reply_to, payload)
                self._count_sent(site, len(payload))
            except (nats.errors.Error, OSError) as error:
                log.warning("reply_failed", subject=subject, error=str(error))

        async def take(wire_subject: str, reply_to: str, data: bytes) -> None:
            site = site_of(wire_subject)
            if len(self._serving) >= MAX_SERVED_AT_ONCE:
                rejection = Overloaded("too many requests at once", retry_after_s=1.0)
                await answer(reply_to, failure_of(rejection), events.num_losses, site)
                return
            checked = self._sender_check.checked(decode, wire_subject)
            reply = begin_reply(wire_subject, handler, checked, data, self._rejections)
            if isinstance(reply, Message):
                await answer(reply_to, reply, events.num_losses, site)
                return
            self._serving.start_item(answer(reply_to, reply, events.num_losses, site), is_logged)

        return partial(self._stop_serving, await self._listen(subject, take, queue))

    async def _stop_serving(self, subscriptions: list[Subscription]) -> None:
        """Unsubscribes, and still replies to requests that the server sends until then."""
        for each in subscriptions:
            try:
                await self._client.stop_listening(each)
            except (nats.errors.Error, OSError) as error:
                log.warning("unsubscribe_failed", subject=each.subject, error=repr(error))

    async def flush(self) -> None:
        """Returns when the server has processed all publications and subscriptions so far."""
        await self._client.flush_all()

    async def close(self) -> None:
        await self._watch.stop()
        for each in self._all_gathered:
            each.close()
        if self._client.is_connected:
            try:
                await self.flush()
            except nats.errors.Error as error:
                log.warning("nats_flush_failed", error=repr(error))
        await self._client.end()
        await self._serving.stop()

    def _payload(self, message: Message) -> bytes:
        data = _encode(message)
        limit = self._client.max_payload
        if len(data) > limit:
            raise PayloadTooLarge(
                f"the message has {len(data)} bytes; this bus accepts at most {limit}"
            )
        return data

    def _reply_payload(self, message: Message) -> bytes:
        """Returns the encoded reply. One that cannot be encoded, or is too large, becomes a
        Failure, as its caller waits.
        """
        try:
            return self._payload(message)
        except BaseException as raised:
            error = item_error(raised)
            log.warning("reply_not_encoded", reply=type(message).__name__, exc_info=error)
            return self._payload(failure_of(error))

    def _headers(self, message: Message, data: bytes) -> dict[str, str] | None:
        """Returns the W3C's trace context of the request to which the message belongs: others on
        the bus can follow it. None without one, or if it does not fit.
        """
        traceparent: bytes | None = getattr(message, "traceparent", None)
        if traceparent is None or len(data) + TRACE_BYTES > self._client.max_payload:
            return None
        return {TRACE_HEADER: trace_header(traceparent)}

    def _reply_decoder(self, reply_type: Any) -> msgspec.msgpack.Decoder[Any]:
        decoder = self._reply_decoders.get(reply_type)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(reply_type | Failure)
            self._reply_decoders[reply_type] = decoder
        return decoder
