"""Renders chat templates in a killable process: python -m … [frames on stdin, stdout].

A template is a program from a checkpoint: on some messages it may loop almost forever or allocate
all memory. This process has a memory limit and an alarm that kills it when a template uses too
much CPU time, even if the request was cancelled.

    TemplateSource ──▶          once
    RenderJob ───────▶          ◀── Rendered, Refused or Late
"""

from __future__ import annotations

import math
import resource
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.gateway.text.chat_template import ChatTemplate, LiteralText, TemplateSource
from shared.errors import HearthError

LIMIT_S = 2.0  # CPU time, so that a busy or frozen machine does not matter
MAX_MEMORY_BYTES = 1 << 30
MAX_PROMPT_CHARS = 64 * 1024 * 1024
SIZE = struct.Struct("!I")


class RenderJob(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render. The job is skipped if it has not started by `latest_start`, in
    seconds of this host's monotonic clock.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    latest_start: float = math.inf


class Rendered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The parts of the prompt, each with a flag for literal text."""

    parts: list[tuple[bool, str]]


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    reason: str


class Late(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The job was skipped: `latest_start` had passed."""


Reply = Rendered | Rejected | Late
encode = msgspec.msgpack.Encoder().encode


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process after draining
    source = _read()
    if source is None:
        return
    template = msgspec.msgpack.decode(source, type=TemplateSource).compiled()
    while (order := _read()) is not None:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        reply = encoded_reply(template, order)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(reply)


def encoded_reply(template: ChatTemplate, order: bytes) -> bytes:
    """Rejects a job on any error: an end of the process would delay the jobs of other clients."""
    try:
        return encode(reply_to(template, msgspec.msgpack.decode(order, type=RenderJob)))
    except Exception as error:  # of a template, which may raise anything, or of a client's data
        name = type(error).__name__
        return encode(Rejected(f"the chat template fails on these messages: {name}"))


def reply_to(template: ChatTemplate, order: RenderJob) -> Reply:
    if time.monotonic() > order.latest_start:
        return Late()
    try:
        parts = template.render(order.messages, order.tools)
    except HearthError as error:
        return Rejected(error.message)
    if sum(map(len, parts)) > MAX_PROMPT_CHARS:
        return Rejected(f"the rendered prompt has more than {MAX_PROMPT_CHARS} characters")
    return Rendered([(isinstance(part, LiteralText), str(part)) for part in parts])


def _read() -> bytes | None:
    head = sys.stdin.buffer.read(SIZE.size)
    return sys.stdin.buffer.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(SIZE.pack(len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
