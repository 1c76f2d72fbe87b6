"""nats-py's client, with a shorter path for messages and replies.

nats-py queues each message for a task of its subscription; here the handler is called where the
message is parsed, without a queue, an object or a task switch. A request of nats-py takes two
random names and two futures; here it takes a number and one future. This is an optimisation only:
if nats-py stops calling `_process_msg`, messages reach the handler through its normal queue.

All that Hearth overrides or calls of nats-py's internals is in this file. pyproject.toml admits the
minor release that it was tested with, and a test compares the internals with `INTERNALS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import NoRespondersError, TimeoutError
from nats.js.api import Header

Take = Callable[[str, str, bytes], Awaitable[None]]  # subject, where to reply or "", data

TESTED_RELEASE = "2.16"
# Methods of nats-py's Client that are overridden or called here, with their parameters.
INTERNALS = {
    "_process_msg": ("self", "sid", "subject", "reply", "data", "headers"),
    "_process_pong": ("self",),
    "_remove_sub": ("self", "sid", "max_msgs"),
    "_send_unsubscribe": ("self", "sid", "limit"),
}
# Attributes of a Client and of a Subscription that are read or written here.
CLIENT_ATTRIBUTES = ("_subs", "_pongs", "_error_cb")
SUBSCRIPTION_ATTRIBUTES = ("_id", "pending_msgs")


class DirectClient(Client):
    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Take] = {}  # by subscription
        self._asked: dict[str, asyncio.Future[bytes]] = {}  # by the last token of the reply's
        self._num_asked = 0
        self._reply_prefix = ""

    async def listen(self, subject: str, take: Take, *, queue: str = "") -> Subscription:
        """`take` is called in the order of arrival and delays all that comes after: it awaits
        nothing but `publish`. What it raises goes to `error_cb`.
        """

        async def on_message(message: Msg) -> None:
            await take(message.subject, message.reply, message.data)

        subscription = await self.subscribe(subject, queue=queue, cb=on_message)
        self._takers[subscription._id] = take
        return subscription

    async def unsubscribe_at_server(self, subscription: Subscription) -> None:
        """The server sends nothing more; what it has sent is still handled here."""
        await self._send_unsubscribe(subscription._id)

    async def request_bytes(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """The reply. Raises NoRespondersError, or TimeoutError, or as `publish`."""
        if not self._reply_prefix:
            await self._listen_for_replies()
        loop = asyncio.get_running_loop()
        self._num_asked += 1
        token, future = str(self._num_asked), loop.create_future()
        self._asked[token] = future
        timer = loop.call_later(timeout_s, _give_up, future)
        try:
            await self.publish(subject, data, reply=self._reply_prefix + token)
            return await future
        finally:
            timer.cancel()
            del self._asked[token]

    async def _listen_for_replies(self) -> None:
        prefix = self._reply_prefix = self.new_inbox() + "."
        subscription = await self.subscribe(f"{prefix}*", cb=self._on_status)
        self._takers[subscription._id] = self._on_reply

    async def _on_reply(self, subject: str, reply: str, data: bytes) -> None:
        future = self._asked.get(subject.removeprefix(self._reply_prefix))
        if future is not None and not future.done():
            future.set_result(data)

    async def _on_status(self, message: Msg) -> None:
        """A reply that has headers, which are the server's: nobody listens."""
        if message.headers is None or message.headers.get(Header.STATUS) != NO_RESPONDERS_STATUS:
            await self._on_reply(message.subject, message.reply, message.data)
            return
        future = self._asked.get(message.subject.removeprefix(self._reply_prefix))
        if future is not None and not future.done():
            future.set_exception(NoRespondersError())

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        take, subscription = self._takers.get(sid), self._subs.get(sid)
        if take is None or subscription is None or headers or subscription.pending_msgs:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            await take(subject.decode(), reply.decode(), data)
        except Exception as error:  # as for any callback: later messages must be handled
            await self._error_cb(error)

    async def _process_pong(self) -> None:
        """nats-py also sets the result of a PONG that nobody awaits any more. That error would end
        its read loop, and no message would arrive until the connection is found stale.
        """
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._takers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)


def _give_up(future: asyncio.Future[bytes]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())
