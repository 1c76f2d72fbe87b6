"""A rank's data plane: pushes and receives the KV of its own layers and heads, on its own thread.

The leader sends what to push where, and what to expect; see kv_messages.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import msgspec
import structlog

from shared.background import Background, item_error
from shared.clock import MonotonicClock
from shared.engine.executors.group.kv.kv_channel import KvChannel
from shared.engine.executors.group.kv.kv_messages import (
    Answer,
    Call,
    CallFailed,
    CancelPush,
    CloseReceiver,
    CloseSender,
    Command,
    Computed,
    Counted,
    Expect,
    Forget,
    ForgetWorker,
    OpenReceiver,
    OpenSender,
    ReceiptEnded,
    Result,
    StartPush,
    ToRank,
)
from shared.engine.executors.group.kv.rank_memory import RankKvMemory
from shared.engine.executors.group.kv.rank_pushes import RankPushes
from shared.engine.executors.group.kv.rank_receipts import RankReceipts
from shared.errors import HearthError
from shared.kv_layout import KvShard
from shared.kv_wire.ports.nixl_port import start_nixl
from shared.lifecycle.process import die
from shared.messages import DataPlaneAddress

log = structlog.get_logger(__name__)

COUNT_S = 0.25  # interval of messages of counts, if they change
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class RankKv:
    """The leader opens each direction before it uses it."""

    def __init__(
        self, channel: KvChannel[ToRank], memory: RankKvMemory, sent: KvShard, own_host: str
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._sent = sent
        self._own_host = own_host
        self._open_pushes: RankPushes | None = None
        self._open_receipts: RankReceipts | None = None
        self._counted = Counted()
        self._background = Background()

    async def run(self) -> None:
        """Ends with the leader's end of the channel."""
        self._background.start_own(self._count())
        async for message in self._channel.messages():
            match message:
                case Call(number=number, command=command):
                    self._start(number, command)
                case Computed():
                    self._pushes.computed(message)
                case CancelPush(placement_id=placement_id):
                    self._pushes.cancel(placement_id)
                case ForgetWorker(prefill_worker_id=worker_id):
                    self._receipts.port.forget_worker(worker_id)
        await self._background.stop()

    @property
    def _pushes(self) -> RankPushes:
        assert self._open_pushes is not None, "opened by the leader"
        return self._open_pushes

    @property
    def _receipts(self) -> RankReceipts:
        assert self._open_receipts is not None, "opened by the leader"
        return self._open_receipts

    def _begin(self, command: Command) -> Coroutine[Any, Any, Result]:
        """A push is known before the next message, which may be about it."""
        match command:
            case StartPush():
                return self._pushes.run(command.placement_id, self._pushes.start(command))
            case Expect():
                return self._expect(command)
            case Forget(placement_id=placement_id):
                return self._receipts.forget(placement_id)
            case OpenReceiver():
                return self._open_receiver(command)
            case OpenSender():
                return self._open_sender(command)
            case CloseReceiver():
                return self._receipts.port.close()
            case CloseSender():
                return self._pushes.port.close()

    async def _open_receiver(self, command: OpenReceiver) -> DataPlaneAddress:
        if self._own_host:
            command = msgspec.structs.replace(
                command, bind_host=self._own_host, advertised_host=None
            )
        self._open_receipts = await RankReceipts.open(self._memory, command, self._receipt_ended)
        return self._receipts.port.targets[0].address

    async def _open_sender(self, command: OpenSender) -> None:
        nixl = await start_nixl(command.kv_transport)
        self._open_pushes = RankPushes(self._memory, self._sent, MonotonicClock(), command, nixl)

    async def _expect(self, command: Expect) -> None:
        self._receipts.expect(command)

    def _receipt_ended(self, placement_id: bytes, reason: str | None) -> None:
        self._channel.send(ReceiptEnded(placement_id, reason))

    # ── answers and counts ───────────────────────────────────────────────────────────────────────

    def _start(self, number: int, command: Command) -> None:
        """One command fails, the rank goes on."""
        fail = partial(self._fail, number)
        try:
            work = self._begin(command)
        except BaseException as raised:
            error = item_error(raised)
            log.exception("kv_command_failed")
            fail(error)
        else:
            self._background.start_item(self._answer(number, work), fail)

    async def _answer(self, number: int, work: Coroutine[Any, Any, Result]) -> None:
        try:
            result = await work
        except HearthError as error:
            self._fail(number, error)
        else:
            self._report_counts()
            self._channel.send(Answer(number, result))

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, HearthError):
            error = HearthError(f"{type(error).__name__}: {error}")
        self._report_counts()
        self._channel.send(CallFailed(number, error.code, error.message))

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            self._report_counts()

    def _report_counts(self) -> None:
        counted = self._counts()
        if counted != self._counted:
            self._counted = counted
            self._channel.send(counted)

    def _counts(self) -> Counted:
        counted = Counted()
        if self._open_receipts is not None:
            counted = Counted(replace(self._receipts.port.counts))  # a copy
        if self._open_pushes is None:
            return counted
        port = self._pushes.port
        return msgspec.structs.replace(
            counted,
            num_pushed_bytes=port.counts.num_bytes,
            num_pushed_tokens=port.counts.num_tokens,
            push_s=port.counts.busy_s,
            num_compressed_frames=port.compressed.num_frames,
            num_saved_bytes=port.compressed.num_saved_bytes,
            plans=tuple(port.plans),
        )


def start_rank_kv(descriptor: int, memory: RankKvMemory, sent: KvShard, *, own_host: str) -> None:
    """Starts a rank's data plane on a thread of its own, whose failure ends the rank, and the group
    with it. A rank on another host than the leader's receives KV at `own_host`.
    """

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(die)
        channel = await KvChannel.open(socket.socket(fileno=descriptor), _decoder)
        await RankKv(channel, memory, sent, own_host).run()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    Thread(target=run, name="rank-kv", daemon=True).start()
