"""Renders chat templates in a separate process (`template_process.py`), in rounds of jobs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import services
from services.gateway.text.chat_template import ChatTemplate, LiteralText, TemplateSource
from services.gateway.text.template_process import LIMIT_S, SIZE, Late, Rejected, RenderJob, Reply
from shared.background import Background
from shared.errors import HearthError, InvalidRequest, NoCapacity, Overloaded
from shared.lifecycle.child_process import send_signal

Messages = Sequence[Mapping[str, Any]]

MAX_ROUND = 12  # jobs that are sent together
MAX_WAIT_S = 5.0  # in the queue; a job that has started is not timed out by this
HANG_S = 10.0  # wall time of one job: LIMIT_S ends a job earlier, unless its process hangs
RENDER_TIMEOUT = f"the chat template exceeded {LIMIT_S:g} s on these messages"
ROOT = Path(services.__file__).resolve().parents[1]

_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_encode = msgspec.msgpack.Encoder().encode


class _Waiting(NamedTuple):
    frame: bytes
    reply: asyncio.Future[Reply]


class Renderer:
    def __init__(
        self,
        template: ChatTemplate | None,
        *,
        max_wait_s: float = MAX_WAIT_S,
        hang_s: float = HANG_S,
    ) -> None:
        self.max_wait_s = max_wait_s
        self.hang_s = hang_s
        self._template = template
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: deque[_Waiting] = deque()
        self._round: deque[_Waiting] = deque()  # the first is being rendered
        self._background = Background()
        self._is_running = False

    async def start(self) -> None:
        """Optional first call: starts the process, so that the first conversation does not wait."""
        if self._template is not None:
            await self._started(self._template)

    async def render(self, messages: Messages, tools: Messages = ()) -> list[str]:
        """As ChatTemplate.render. Raises InvalidRequest, also for too much time or memory;
        Overloaded if the job is not started within `max_wait_s`; NoCapacity.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        loop = asyncio.get_running_loop()
        order = RenderJob(messages, tools, latest_start=time.monotonic() + self.max_wait_s)
        waiting = _Waiting(_frame(order), loop.create_future())
        self._waiting.append(waiting)
        if not self._is_running:
            self._is_running = True
            self._background.start(self._take_rounds(self._template))
        patience = loop.call_later(self.max_wait_s, self._give_up, waiting)
        try:
            reply = await waiting.reply
        except asyncio.CancelledError:
            self._leave(waiting)
            raise
        finally:
            patience.cancel()
        match reply:
            case Rejected(reason):
                raise InvalidRequest(reason, param="messages")
            case Late():
                raise _too_many()
        return [LiteralText(text) if is_literal else text for is_literal, text in reply.parts]

    async def close(self) -> None:
        await self._background.stop()
        self._is_running = False
        while self._waiting:
            _fail(self._waiting.popleft(), NoCapacity("the gateway stops", retry_after_s=1.0))
        await self._end_process()

    def _leave(self, waiting: _Waiting) -> None:
        """Kills the process if it renders a cancelled job, so that the next jobs need not wait."""
        if self._is_turn_of(waiting) and self._process is not None:
            process, self._process = self._process, None  # the next job starts another
            send_signal(process, signal.SIGKILL)

    def _give_up(self, waiting: _Waiting) -> None:
        """Fails a job that has not started; the process skips the job after `latest_start`."""
        if not self._is_turn_of(waiting):
            _fail(waiting, _too_many())

    def _is_turn_of(self, waiting: _Waiting) -> bool:
        return bool(self._round) and self._round[0] is waiting

    async def _take_rounds(self, template: ChatTemplate) -> None:
        """Sends the jobs that arrive during a round together in the next one: waking the other
        process takes longer than rendering.
        """
        while self._waiting:
            self._request_next()
            if self._round:
                await self._take_round(template)
        self._is_running = False

    def _request_next(self) -> None:
        while self._waiting and len(self._round) < MAX_ROUND:
            each = self._waiting.popleft()
            if not each.reply.done():
                self._round.append(each)

    async def _take_round(self, template: ChatTemplate) -> None:
        """Ends a process that does not reply and fails its current job. The jobs after that one
        are first in the next round.
        """
        jobs, process = self._round, None
        try:
            async with asyncio.timeout(self.hang_s) as hanging:
                process = await self._started(template)
                _send(process, b"".join([each.frame for each in jobs]))
                while jobs and self._process is process:
                    reply = await _reply_of(process)
                    _settle(jobs.popleft(), reply)
                    hanging.reschedule(asyncio.get_running_loop().time() + self.hang_s)
        except (ConnectionError, EOFError):
            if self._process is process:  # not killed by `_leave`
                await self._end_process()
                _settle_lost(jobs.popleft(), process)
        except (TimeoutError, OSError, RuntimeError, msgspec.DecodeError):  # uvloop: a closed pipe
            await self._end_process()
            _fail(jobs.popleft(), NoCapacity("the template process hangs", retry_after_s=1.0))
        finally:
            self._waiting.extendleft(reversed(jobs))
            jobs.clear()

    async def _started(self, template: ChatTemplate) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway.text.template_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        _send(self._process, _frame(template.source))
        return self._process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            send_signal(process, signal.SIGKILL)
            await process.wait()


def _too_many() -> Overloaded:
    return Overloaded("too many conversations to render", retry_after_s=1.0)


def _settle(waiting: _Waiting, reply: Reply) -> None:
    if not waiting.reply.done():  # done: the client disconnected
        waiting.reply.set_result(reply)


def _settle_lost(waiting: _Waiting, process: asyncio.subprocess.Process | None) -> None:
    """Ends a job whose process ended: by its own alarm, or by something else, such as a kill."""
    if process is not None and process.returncode == -signal.SIGPROF:
        _settle(waiting, Rejected(RENDER_TIMEOUT))
    else:
        _fail(waiting, NoCapacity("the template process ended", retry_after_s=1.0))


def _fail(waiting: _Waiting, error: HearthError) -> None:
    if not waiting.reply.done():
        waiting.reply.set_exception(error)


def _frame(message: RenderJob | TemplateSource) -> bytes:
    data = _encode(message)
    return SIZE.pack(len(data)) + data


def _send(process: asyncio.subprocess.Process, frames: bytes) -> None:
    """Does not drain: the other process may not read until its replies are read."""
    assert process.stdin is not None, "its input is a pipe"
    process.stdin.write(frames)


async def _reply_of(process: asyncio.subprocess.Process) -> Reply:
    assert process.stdout is not None, "its output is a pipe"
    (size,) = SIZE.unpack(await process.stdout.readexactly(SIZE.size))
    return _decoder.decode(await process.stdout.readexactly(size))
