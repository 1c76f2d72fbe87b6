"""Commands to a group of ranks and its answers, on the leader's event loop.

Several commands may be under way; they are answered in order. Token masks are computed in this
process: the rank that samples asks for them, and a thread waits for those that are not ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from shared.clock import Clock
from shared.engine.executors.group.channel import Channel, ChannelClosed
from shared.engine.executors.group.messages import Command, Masks, MasksWanted
from shared.engine.executors.group.remote_masks import mask_words
from shared.engine.parallel.processes.group import RankGroup
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.engine.step import TokenMask
from shared.errors import DeviceFailed

COMMAND_TIMEOUT_S = 30.0  # limit of a check, a copy, or zeroing
RESIZE_TIMEOUT_S = 300.0  # limit of a park, which may lock memory for the weights: 1 GiB in 0.5 s


class GroupSteps:
    """Sends steps to a group of ranks. `masks` is a channel to the answering rank. `parent_thread`
    has started the group, which ends with that thread.
    """

    def __init__(
        self, group: RankGroup, masks: Channel, parent_thread: ThreadPoolExecutor, clock: Clock
    ) -> None:
        self.group = group
        self._masks_channel = masks
        self._parent_thread = parent_thread
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._masks_of: dict[int, Sequence[TokenMask]] = {}
        self._mask_thread = ThreadPoolExecutor(1, "group-masks")

    def submit(
        self,
        command: Command,
        budget_s: float = COMMAND_TIMEOUT_S,
        masks: Sequence[TokenMask] = (),
    ) -> int:
        """Returns the number of the command. The watchdog ends a group that takes longer than
        `budget_s` for it. Raises DeviceFailed if the group is lost.
        """
        answer = self._watching_loop().create_future()
        try:
            number = self.group.submit(msgspec.msgpack.encode(command), budget_s)
        except GroupLost as error:
            raise _lost(error) from error
        self._answers[number] = answer
        if masks:
            self._masks_of[number] = masks
        return number

    async def answer(self, number: int) -> bytes:
        """Returns the answering rank's output. Raises DeviceFailed if the group is lost."""
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]
            self._masks_of.pop(number, None)

    async def command(self, command: Command, budget_s: float) -> bytes:
        return await self.answer(self.submit(command, budget_s))

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            self._ignore(self._loop)
        await asyncio.to_thread(self._mask_thread.shutdown)
        await asyncio.to_thread(self.group.close)
        await asyncio.to_thread(self._parent_thread.shutdown)
        self._masks_channel.close()

    def _watching_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the running loop, which watches for answers from the first command on."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            loop.add_reader(self.group.fileno(), self._take_answers)
            loop.add_reader(self._masks_channel.fileno(), self._give_masks)
            self._loop = loop
        return loop

    def _ignore(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.group.fileno())
        loop.remove_reader(self._masks_channel.fileno())
        self._loop = None

    def _take_answers(self) -> None:
        try:
            while (record := self.group.take()) is not None:
                answer = self._answers.get(record.step)
                if answer is not None and not answer.done():  # its task may have been cancelled
                    answer.set_result(record.data)
        except GroupLost as error:
            for each in self._answers.values():
                if not each.done():
                    each.set_exception(_lost(error))

    def _give_masks(self) -> None:
        try:
            wanted: MasksWanted = self._masks_channel.receive(MasksWanted, COMMAND_TIMEOUT_S)
        except (ChannelClosed, TimeoutError, msgspec.DecodeError):
            if self._loop is not None:  # the rank has ended, so the group ends
                self._loop.remove_reader(self._masks_channel.fileno())
            return
        if wanted.timeout_s > 0:
            self._mask_thread.submit(self._send_masks, wanted)
        else:
            self._send_masks(wanted)

    def _send_masks(self, wanted: MasksWanted) -> None:
        masks = self._masks_of.get(wanted.step, ())
        words = mask_words(masks, wanted.timeout_s, self._clock)
        try:
            self._masks_channel.send(Masks(words))
        except ChannelClosed:
            return


def _lost(error: Exception) -> DeviceFailed:
    return DeviceFailed(f"a rank of this worker is lost: {error}")
