"""Has chat templates rendered by a process of their own (`template_process.py`), one at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import services
from services.gateway.text.chat_template import ChatTemplate, LiteralText
from services.gateway.text.template_process import LIMIT_S, SIZE, Order, Refused, Reply
from shared.child_process import send_signal
from shared.errors import InvalidRequest, NoCapacity, Overloaded

MAX_WAIT_S = 5.0  # for the turns of others
HANG_S = 30.0  # it ends by itself, long before, unless something holds it
ROOT = Path(services.__file__).resolve().parents[1]

_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_encode = msgspec.msgpack.Encoder().encode


class Renderer:
    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Not needed: the first conversation is not kept waiting."""
        async with self._turn:
            if self._template is not None:
                await self._started(self._template)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """As ChatTemplate.render. Raises InvalidRequest, also for what takes too long or too much
        memory, and Overloaded if others take that long.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("too many conversations to render", retry_after_s=1.0) from None
        try:
            reply = await self._asked(self._template, _encode(Order(messages, tools)))
        finally:
            self._turn.release()
        if isinstance(reply, Refused):
            raise InvalidRequest(reply.reason, param="messages")
        return [LiteralText(text) if is_literal else text for is_literal, text in reply.pieces]

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            send_signal(process, signal.SIGKILL)
            await process.wait()

    async def _asked(self, template: ChatTemplate, data: bytes) -> Reply:
        """A process that does not answer, or whose client left, is not asked again."""
        try:
            async with asyncio.timeout(HANG_S):
                return await _exchange(await self._started(template), data)
        except (ConnectionError, EOFError):
            await self.close()
            return Refused(f"the chat template does not end on these messages in {LIMIT_S:g} s")
        except TimeoutError:
            await self.close()
            raise NoCapacity("the process that renders hangs", retry_after_s=1.0) from None
        except BaseException:
            await asyncio.shield(self.close())
            raise

    async def _started(self, template: ChatTemplate) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway.text.template_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        await _send(self._process, _encode(template.source))
        return self._process


async def _exchange(process: asyncio.subprocess.Process, data: bytes) -> Reply:
    await _send(process, data)
    assert process.stdout is not None, "its output is a pipe"
    (size,) = SIZE.unpack(await process.stdout.readexactly(SIZE.size))
    return _decoder.decode(await process.stdout.readexactly(size))


async def _send(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None, "its input is a pipe"
    process.stdin.write(SIZE.pack(len(data)) + data)
    await process.stdin.drain()
