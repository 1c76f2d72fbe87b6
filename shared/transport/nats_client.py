"""nats-py's client, with a shorter path for messages and replies.

nats-py queues each message for its subscription's task; here the handler is called where the
message is parsed, without a queue, an object or a task switch. A request of nats-py takes two
random names and two futures; here it takes a number and one future. This is an optimisation only:
if nats-py stops calling `_process_msg`, messages reach the handler through nats-py's normal queue.

All overrides and uses of nats-py's internals are in this file. pyproject.toml admits only the minor
release that was tested, and a test compares the internals with `INTERNALS`.
"""

from __future__ import annotations

import asyncio
import builtins
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, FlushTimeoutError, NoRespondersError, TimeoutError
from nats.js.api import Header
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION

from shared.background import item_error
from shared.transport.credential_files import ConnectionCredential
from shared.transport.nkeys import UserKey

FLUSH_S = 2
LATE_REPLY_S = 2.0  # how long after its timeout a reply is still taken, if the caller wants it
REPLIES = (b"PUB _INBOX.", b"HPUB _INBOX.")  # commands; nothing else is sent to an inbox
Take = Callable[[str, str, bytes], Awaitable[None]]  # subject, reply subject or "", data
# subject, reply subject or "", data, the encoded headers or b""
TakeWithHeaders = Callable[[str, str, bytes, bytes], Awaitable[None]]

TESTED_RELEASE = "2.16"
# Methods of nats-py's Client that are overridden or called here, with their parameters.
INTERNALS = {
    "_connect_command": ("self",),
    "_process_err": ("self", "err_msg"),
    "_process_msg": ("self", "sid", "subject", "reply", "data", "headers"),
    "_process_op_err": ("self", "e"),
    "_process_pong": ("self",),
    "_remove_sub": ("self", "sid", "max_msgs"),
    "_send_ping": ("self", "future"),
    "_send_unsubscribe": ("self", "sid", "limit"),
}
# Attributes of a Client and of a Subscription that are read or written here.
CLIENT_ATTRIBUTES = (
    *("_subs", "_pongs", "_error_cb", "_transport", "_public_nkey", "_signature_cb", "options"),
    *("_reading_task", "_reconnection_task", "_flusher_task", "_pending", "_pending_data_size"),
)
SUBSCRIPTION_ATTRIBUTES = ("_id", "pending_msgs")


class PublishDenied(Error):
    """The server does not permit this credential to send to the subject of a request."""


class TlsRequired(Exception):
    """The connection has no TLS, without which a credential is not sent."""


class DirectClient(Client):
    def __init__(self, *, requires_tls: bool = False, key: UserKey | None = None) -> None:
        super().__init__()
        self._public_nkey = None if key is None else key.public
        self._requires_tls = requires_tls
        self._takers: dict[int, Take] = {}  # key: subscription
        self._header_takers: dict[int, TakeWithHeaders] = {}  # key: subscription
        self._replies: dict[str, asyncio.Future[bytes]] = {}  # key: last token of the reply subject
        self._requested: dict[str, str] = {}  # subjects, by the same
        self._num_requests = 0
        self._reply_prefix = ""
        self._replies_id: int | None = None  # the subscription to replies

    def use(self, credential: ConnectionCredential) -> None:
        """Makes the next connection with these files of TLS, and this key or password."""
        if credential.tls is not None:
            self.options["tls"] = credential.tls
        if credential.key is not None:
            self._public_nkey = credential.key.public
            self._signature_cb = credential.key.sign
        if credential.password is not None:
            self.options["password"] = credential.password

    @property
    def server_name(self) -> str:
        """The id of the server of the last connection, or the name of its cluster."""
        info = self._server_info
        # a server with leaf nodes and without a cluster gives it its own name
        cluster = info.get("cluster", "")
        is_own = cluster in ("", info.get("server_name"), info.get("server_id"))
        return str(info.get("server_id", "") if is_own else cluster)

    @property
    def server_certificate_ends_at(self) -> float | None:
        """The end of the certificate that the server has shown, in Unix seconds; None: no TLS."""
        tls = None if self._transport is None else _tls_of(self._transport)
        ends = (tls.getpeercert() or {}).get("notAfter") if tls is not None else None
        return None if ends is None else float(ssl.cert_time_to_seconds(str(ends)))

    @property
    def is_running(self) -> bool:
        """Whether it reads or reconnects. After an error that nats-py does not expect it does
        neither, and stays connected.
        """
        tasks = (self._reading_task, self._reconnection_task)
        return any(task is not None and not task.done() for task in tasks)

    def drop_pending_replies(self) -> None:
        """Removes the replies that wait to be sent: the server lets nobody reply over another
        connection than the one that has received the request.
        """
        self._pending = [each for each in self._pending if not each.startswith(REPLIES)]
        self._pending_data_size = sum(map(len, self._pending))

    async def end(self) -> None:
        """Closes the connection. Without one, what waits to be sent is dropped: nats-py would write
        it to the closed transport, for which uvloop raises.
        """
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0
        await self.close()

    async def listen(self, subject: str, take: Take, *, queue: str = "") -> Subscription:
        """Subscribes. `take` is called in the order of arrival and delays all later messages, so it
        may await only `publish`. Its exceptions go to `error_cb`. Headers are ignored.
        """

        async def on_message(message: Msg) -> None:
            await take(message.subject, message.reply, message.data)

        subscription = await self.subscribe(subject, queue=queue, cb=on_message)
        self._takers[subscription._id] = take
        return subscription

    async def listen_with_headers(
        self, subject: str, take: TakeWithHeaders, *, queue: str = ""
    ) -> Subscription:
        """Subscribes to messages with and without headers.

        The headers are passed on encoded, because their sender decides on their size.
        """

        async def on_message(message: Msg) -> None:
            await take(message.subject, message.reply, message.data, _encoded(message.headers))

        subscription = await self.subscribe(subject, queue=queue, cb=on_message)
        self._header_takers[subscription._id] = take
        return subscription

    async def flush_all(self) -> None:
        """Returns when the server has processed all publications and subscriptions so far.

        nats-py writes a flush's PING before its buffered data, but sends that buffer before the
        PONG returns: the second PING follows the buffer.
        """
        for _ in range(2):
            await self._flush()

    async def _flush(self) -> None:
        """Returns when the server has answered a PING. Raises FlushTimeoutError.

        nats-py's `flush` waits with `wait_for`, which in Python 3.11 swallows a cancellation that
        coincides with the PONG: the cancelled task would go on.
        """
        loops = (self._reading_task, self._flusher_task)
        if self.is_closed or any(each is None or each.done() for each in loops):
            await self.flush(FLUSH_S)
            return
        pong = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._send_ping(pong)
                await pong
        except builtins.TimeoutError:
            pong.cancel()
            raise FlushTimeoutError from None

    async def stop_listening(self, subscription: Subscription) -> None:
        """Unsubscribes, and still handles the messages that the server sends until then."""
        # nats-py's drain removes the subscription here before the server does (see `flush_all`)
        await self.unsubscribe_at_server(subscription)
        try:
            await self.flush_all()
        finally:  # needed without a connection, too: nats-py would subscribe again
            await subscription.drain()

    async def unsubscribe_at_server(self, subscription: Subscription) -> None:
        """Stops delivery at the server; messages already sent are still handled here."""
        await self._send_unsubscribe(subscription._id)

    async def request_bytes(
        self,
        subject: str,
        data: bytes,
        *,
        timeout_s: float,
        on_late: Callable[[bytes | None], None] | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        """Returns the reply. Raises NoRespondersError, TimeoutError, PublishDenied, or the errors
        of `publish`.

        After TimeoutError `on_late` is called with the reply, or with None if there is none within
        LATE_REPLY_S.
        """
        if not self._reply_prefix:
            await self._listen_for_replies()
        loop = asyncio.get_running_loop()
        self._num_requests += 1
        token, future = str(self._num_requests), loop.create_future()
        self._replies[token], self._requested[token] = future, subject
        timer = loop.call_later(timeout_s, _give_up, future)
        try:
            await self.publish(subject, data, reply=self._reply_prefix + token, headers=headers)
            return await future
        except TimeoutError:
            if on_late is not None:
                self._await_late(token, on_late)
            raise
        finally:
            timer.cancel()
            del self._requested[token]
            if self._replies[token] is future:
                del self._replies[token]

    def fail_requests(self, subject: str) -> None:
        """Ends the requests to a subject to which the server lets nobody of this credential send.
        `subject` is in lower case, as nats-py has it.
        """
        for token, each in self._requested.items():
            future = self._replies[token]
            if each.lower() == subject and not future.done():
                future.set_exception(PublishDenied(subject))

    def _await_late(self, token: str, on_late: Callable[[bytes | None], None]) -> None:
        loop = asyncio.get_running_loop()
        late = self._replies[token] = loop.create_future()
        timer = loop.call_later(LATE_REPLY_S, _give_up, late)

        def end(ended: asyncio.Future[bytes]) -> None:
            timer.cancel()
            del self._replies[token]
            on_late(None if ended.exception() is not None else ended.result())

        late.add_done_callback(end)

    async def _listen_for_replies(self) -> None:
        prefix = self._reply_prefix = self.new_inbox() + "."
        subscription = await self.subscribe(f"{prefix}*", cb=self._on_status)
        self._replies_id = subscription._id
        self._takers[subscription._id] = self._on_reply

    async def _on_reply(self, subject: str, reply: str, data: bytes) -> None:
        future = self._replies.get(subject.removeprefix(self._reply_prefix))
        if future is not None and not future.done():
            future.set_result(data)

    async def _on_status(self, message: Msg) -> None:
        """Handles a reply with headers, with which the server reports a lack of responders."""
        if message.headers is None or message.headers.get(Header.STATUS) != NO_RESPONDERS_STATUS:
            await self._on_reply(message.subject, message.reply, message.data)
            return
        future = self._replies.get(message.subject.removeprefix(self._reply_prefix))
        if future is not None and not future.done():
            future.set_exception(NoRespondersError())

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        subscription = self._subs.get(sid)
        take, take_all = self._takers.get(sid), self._header_takers.get(sid)
        is_queued = subscription is None or subscription.pending_msgs
        try:
            if take_all is not None and not is_queued:
                await take_all(subject.decode(), reply.decode(), data, headers or b"")
            elif take is not None and not is_queued and not (headers and sid == self._replies_id):
                await take(subject.decode(), reply.decode(), data)
            else:
                await super()._process_msg(sid, subject, reply, data, headers)
        except BaseException as raised:  # like nats-py for any callback: later messages are handled
            await self._error_cb(item_error(raised))

    def _connect_command(self) -> bytes:
        """Returns the command with the credential. nats-py uses TLS only if the server asks for it,
        and whoever is on the path can remove that. Raises TlsRequired.
        """
        if self._requires_tls and _tls_of(self._transport) is None:
            raise TlsRequired("the server does not offer TLS, which its URL requires")
        return super()._connect_command()

    async def _process_err(self, err_msg: str) -> None:
        """Connects again after an error with which the server ends the connection, as when the
        credential has been replaced. nats-py would close the client for good.
        """
        if PERMISSIONS_ERR in err_msg or STALE_CONNECTION in err_msg:
            await super()._process_err(err_msg)
            return
        error = Error(f"nats: {err_msg.strip(chr(39))}")
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _process_pong(self) -> None:
        """Replaces a PONG future that is already done. nats-py would set its result again, and that
        error would end its read loop: no message would arrive until the connection is found stale.
        """
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._takers.pop(sid, None)
        self._header_takers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)


def _tls_of(transport: Any) -> ssl.SSLObject | None:
    """Returns the connection's TLS, whose handshake has verified the server."""
    found: ssl.SSLObject | None = transport._io_writer.get_extra_info("ssl_object")
    return found


def _encoded(headers: dict[str, str] | None) -> bytes:
    """Returns the headers as the server sends them, with a status in the first line."""
    fields = dict(headers or {})
    status = fields.pop(Header.STATUS, "")
    lines = [f"NATS/1.0 {status}".rstrip(), *(f"{name}: {text}" for name, text in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() if headers else b""


def _give_up(future: asyncio.Future[bytes]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())
