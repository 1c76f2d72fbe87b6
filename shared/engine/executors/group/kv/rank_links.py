"""The leader's links to the data planes of its ranks: calls and their answers, and events."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
import structlog

from shared.background import start_awaited
from shared.engine.executors.group.kv.kv_channel import KvChannel
from shared.engine.executors.group.kv.kv_messages import (
    Answer,
    Call,
    CallFailed,
    Command,
    Counted,
    ReceiptEnded,
    Result,
    ToLeader,
    ToRank,
)
from shared.errors import ERROR_BY_CODE, HearthError, LinkLost
from shared.kv_layout import KvShard

log = structlog.get_logger(__name__)

_decoder: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
Listener = Callable[[int, ReceiptEnded | Counted | None], None]


class RankLinks:
    """Connections from the leader to the ranks' data planes. `shards` are the parts of the model's
    KV that the ranks hold. A rank whose link has ended is lost, and its group with it: calls to it
    fail with LinkLost.
    """

    def __init__(self, sockets: Sequence[socket.socket], shards: Sequence[KvShard]) -> None:
        self.shards = tuple(shards)
        self._sockets = sockets
        self._channels: list[KvChannel[ToLeader]] = []
        self._lost: set[int] = set()
        self._calls: list[dict[int, asyncio.Future[Result]]] = [{} for _ in shards]
        self._numbers = count()
        self._listeners: list[Listener] = []
        self._readers: list[asyncio.Task[None]] = []

    @property
    def ranks(self) -> range:
        return range(len(self.shards))

    async def open(self) -> None:
        """Opens the links on the event loop that uses them from now on. Idempotent."""
        if self._channels:
            return
        self._channels = [await KvChannel.open(each, _decoder) for each in self._sockets]
        self._readers = [start_awaited(self._read(rank)) for rank in self.ranks]

    def listen(self, listener: Listener) -> None:
        """Calls `listener(rank, event)` for each event, and with None when the rank is lost."""
        self._listeners.append(listener)

    def call(self, rank: int, command: Command) -> asyncio.Future[Result]:
        """Sends at once. The future raises the rank's HearthError, or LinkLost."""
        answered: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        answered.add_done_callback(_retrieve)  # whoever awaits several raises the first error
        if rank in self._lost:
            answered.set_exception(_lost(rank))
            return answered
        number = next(self._numbers)
        self._calls[rank][number] = answered
        self._channels[rank].send(Call(number, command))
        return answered

    async def call_all(self, command: Command) -> list[Result]:
        """Returns once all ranks have answered. Raises the first error."""
        calls = [self.call(rank, command) for rank in self.ranks]
        await asyncio.wait(calls)
        return [each.result() for each in calls]

    def send(self, rank: int, message: ToRank) -> None:
        self._channels[rank].send(message)

    async def close(self) -> None:
        """Calls under way fail."""
        for channel in self._channels:
            channel.close()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for each in self._sockets:
            each.close()

    async def _read(self, rank: int) -> None:
        try:
            async for message in self._channels[rank].messages():
                self._arrived(rank, message)
        finally:
            self._lose(rank)

    def _arrived(self, rank: int, message: ToLeader) -> None:
        match message:
            case Answer(number=number, result=result):
                if not (answered := self._calls[rank].pop(number)).done():
                    answered.set_result(result)
            case CallFailed(number=number, code=code, message=text):
                if not (answered := self._calls[rank].pop(number)).done():
                    answered.set_exception(ERROR_BY_CODE.get(code, HearthError)(text))
            case _:
                self._notify(rank, message)

    def _lose(self, rank: int) -> None:
        self._lost.add(rank)
        for answered in self._calls[rank].values():
            if not answered.done():
                answered.set_exception(_lost(rank))
        self._calls[rank].clear()
        self._notify(rank, None)

    def _notify(self, rank: int, event: ReceiptEnded | Counted | None) -> None:
        for listener in self._listeners:
            listener(rank, event)


def _retrieve(answered: asyncio.Future[Result]) -> None:
    if not answered.cancelled():
        answered.exception()


def _lost(rank: int) -> LinkLost:
    return LinkLost(f"rank {rank} of this worker is lost")
