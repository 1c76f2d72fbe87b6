"""Renders chat templates in a killable process: python -m … [frames on stdin, stdout].

A template is a program from a checkpoint: on some messages it may loop almost forever or allocate
all memory. This process has a memory limit and an alarm that kills it when a template uses too
much CPU time, even if the request was cancelled. `process_jobs.py` has its messages.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from services.gateway.text.chat_template import ChatTemplate, LiteralText
from services.gateway.text.process_jobs import (
    SIZE,
    BodyJob,
    CheckJob,
    Finished,
    Job,
    ProcessSetup,
    Rejected,
    Rendered,
    RenderJob,
    Reply,
    frame,
    limit_s,
)
from shared.errors import HearthError

MAX_MEMORY_BYTES = 1 << 30
MAX_PROMPT_CHARS = 64 * 1024 * 1024

BodyHandler = Callable[[BodyJob], Reply]
# Called with the setup and the template when the first body arrives.
MakeBodyHandler = Callable[[ProcessSetup, ChatTemplate | None], BodyHandler]

_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def main(make_body_handler: MakeBodyHandler | None = None) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process after draining
    data = read_frame()
    if data is None:
        return
    setup = msgspec.msgpack.decode(data, type=ProcessSetup)
    template = None if setup.template is None else setup.template.compiled()
    handle_body: BodyHandler | None = None
    while (data := read_frame()) is not None:
        job = decoded(data)
        if isinstance(job, BodyJob) and handle_body is None and make_body_handler is not None:
            handle_body = make_body_handler(setup, template)
        signal.setitimer(signal.ITIMER_PROF, limit_s(job))
        reply = encoded_reply(template, job, handle_body)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(reply)


def decoded(data: bytes) -> Job | Rejected:
    """Returns the job, or its rejection if this process cannot decode it."""
    try:
        return _decoder.decode(data)
    except Exception as error:  # of a client's data, such as RecursionError
        return Rejected(f"the chat template fails on these messages: {type(error).__name__}")


def encoded_reply(
    template: ChatTemplate | None, job: Job | Rejected, handle_body: BodyHandler | None = None
) -> bytes:
    """Returns the frame of a `Finished`. Rejects a job on any error: an end of the process would
    delay the jobs of other clients.
    """
    began_s = time.process_time()
    try:
        reply = _reply_to(template, job, handle_body)
        return frame(Finished(reply, time.process_time() - began_s))
    except Exception as error:  # of a template, which may raise anything, or of a client's data
        return frame(Finished(_failed(job, error), time.process_time() - began_s))


def _reply_to(
    template: ChatTemplate | None, job: Job | Rejected, handle_body: BodyHandler | None
) -> Reply:
    match job:
        case Rejected():
            return job
        case RenderJob():
            return _rendered(template, job)
        case BodyJob():
            return _body(handle_body, job)
        case CheckJob():
            return Rejected("this process checks no grammars", None)


def _failed(job: Job | Rejected, error: Exception) -> Rejected:
    name = type(error).__name__
    if isinstance(job, BodyJob):
        return Rejected(f"the body cannot be prepared: {name}", None)
    return Rejected(f"the chat template fails on these messages: {name}")


def _rendered(template: ChatTemplate | None, job: RenderJob) -> Reply:
    if template is None:
        return Rejected("this model has no chat template")
    try:
        parts = template.render(
            job.messages,
            job.tools,
            add_generation_prompt=job.add_generation_prompt,
            variables=job.variables,
        )
    except HearthError as error:
        return Rejected(error.message, error.param)
    if sum(map(len, parts)) > MAX_PROMPT_CHARS:
        return Rejected(f"the rendered prompt has more than {MAX_PROMPT_CHARS} characters")
    return Rendered([(isinstance(part, LiteralText), str(part)) for part in parts])


def _body(handle: BodyHandler | None, job: BodyJob) -> Reply:
    try:
        if handle is not None:
            return handle(job)
    except HearthError as error:
        return Rejected(error.message, error.param, error.code)
    return Rejected("this process prepares no bodies", None)


def read_frame() -> bytes | None:
    head = sys.stdin.buffer.read(SIZE.size)
    return sys.stdin.buffer.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


def write_frame(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
