"""Renders chat templates in a killable process: python -m … [frames on stdin, stdout].

A template is a program from a checkpoint: on some messages it may loop almost forever or allocate
all memory. This process has a memory limit and an alarm that kills it when a template uses too
much CPU time, even if the request was cancelled. `text/process_jobs.py` has its messages.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.gateway.preparation.recently_used import RecentlyUsed
from services.gateway.text.chat_template import NO_TEMPLATE, ChatTemplate, LiteralText
from services.gateway.text.lone_surrogates import without_lone_surrogates
from services.gateway.text.named_model import named_model
from services.gateway.text.process_jobs import (
    MAX_SETUPS,
    SIZE,
    BodyJob,
    CheckJob,
    EncodeJob,
    ImageChatJob,
    Job,
    JobFinished,
    JobRejected,
    Named,
    NameJob,
    ProcessSetup,
    Rendered,
    RenderJob,
    Reply,
    SelectModel,
    Unavailable,
    frame,
    limit_s,
    template_values,
    without_pixels,
)
from shared.errors import ConfigError, HearthError

MAX_MEMORY_BYTES = 1 << 30
# Those of the last models with large bodies. One of a large vocabulary takes 100 MB and more.
MAX_TOKENIZERS = 4
MAX_PROMPT_CHARS = 4 << 20  # characters of a small conversation; a large one has more for each byte
MAX_CHARS_PER_BYTE = 4

FileJob = BodyJob | ImageChatJob | EncodeJob  # those that need a model's files
BodyHandler = Callable[[FileJob], Reply]
# Called with the setup and the template when the first body of a model arrives.
MakeBodyHandler = Callable[[ProcessSetup, ChatTemplate | None], BodyHandler]
Message = ProcessSetup | SelectModel | Job

_FRAMES = sys.stdout.buffer
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class _TemplateOfModel:
    """A model's template. `failure`: why it does not compile here, though it compiled once."""

    def __init__(self, setup: ProcessSetup) -> None:
        self.setup = setup
        self.template, self.failure = None, ""
        try:
            self.template = None if setup.template is None else setup.template.compiled()
        except ConfigError as error:
            self.failure = error.message


class _TemplateModels:
    """Holds the models of this process: their templates, and the tokenizers of a few."""

    def __init__(self, make_body_handler: MakeBodyHandler | None) -> None:
        self._make = make_body_handler
        self._models: RecentlyUsed[str, _TemplateOfModel] = RecentlyUsed(MAX_SETUPS)
        self._handlers: RecentlyUsed[str, BodyHandler] = RecentlyUsed(MAX_TOKENIZERS)
        self._selected: _TemplateOfModel | None = None

    def add(self, setup: ProcessSetup) -> None:
        self._selected = _TemplateOfModel(setup)
        self._models.put(setup.key, self._selected)

    def select(self, key: str) -> None:
        self._selected = self._models.get(key)

    @property
    def template(self) -> ChatTemplate | None:
        """Returns the template of the selected model. Raises ConfigError if it does not compile."""
        if self._selected is not None and self._selected.failure:
            raise ConfigError(self._selected.failure)
        return None if self._selected is None else self._selected.template

    def body_handler(self) -> BodyHandler | None:
        """Returns the function for bodies of the selected model. Raises ConfigError for files that
        can no longer be read.
        """
        if self._make is None or self._selected is None:
            return None
        setup = self._selected.setup
        handler = self._handlers.get(setup.key)
        if handler is None:
            handler = self._make(setup, self.template)
            self._handlers.put(setup.key, handler)
        return handler


@contextmanager
def loading() -> Iterator[None]:
    """Lifts the memory limit, if there is one, for files that another process has loaded before."""
    limit, most = resource.getrlimit(resource.RLIMIT_AS)
    if limit == most:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        yield
    finally:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        num_bytes = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, most))


def main(make_body_handler: MakeBodyHandler | None = None) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, most))
    sys.stdout = sys.stderr  # a line of the log among the frames would be read as one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process after draining
    models = _TemplateModels(make_body_handler)
    while (data := read_frame()) is not None:
        match decoded(data):
            case ProcessSetup() as setup:
                signal.setitimer(signal.ITIMER_PROF, limit_s(setup))
                models.add(setup)
                signal.setitimer(signal.ITIMER_PROF, 0.0)
            case SelectModel(key):
                models.select(key)
            case job:
                reply, *pixels = _answered(models, job)
                write_frame(reply)
                for each in pixels:
                    write_frame(each)
                    each[:] = bytes(len(each))  # nothing of an image stays here


def _answered(models: _TemplateModels, job: Job | JobRejected) -> list[bytearray]:
    try:
        is_tokenized = isinstance(job, FileJob)
        handle_body = models.body_handler() if is_tokenized else None
        template = models.template
    except ConfigError as error:
        return [frame(JobFinished(Unavailable(error.message), 0.0))]
    signal.setitimer(signal.ITIMER_PROF, limit_s(job))
    reply = encoded_reply(template, job, handle_body)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return reply


def decoded(data: bytes) -> Message | JobRejected:
    """Returns the message, or the rejection of a job that this process cannot decode."""
    try:
        return _decoder.decode(data)
    except Exception as error:  # a client's data may raise it, such as RecursionError
        return JobRejected(f"the chat template fails on these messages: {type(error).__name__}")


def encoded_reply(
    template: ChatTemplate | None, job: Job | JobRejected, handle_body: BodyHandler | None = None
) -> list[bytearray]:
    """Returns the frame of a `JobFinished`, and the pixels of images that follow it. Rejects a job
    on any error: an end of the process would delay the jobs of other clients.
    """
    began_s = time.process_time()
    try:
        reply, pixels = without_pixels(_reply_to(template, job, handle_body))
        return [frame(JobFinished(reply, time.process_time() - began_s)), *pixels]
    except BaseException as error:  # a template, a panic of a tokenizer, a client's data
        return [frame(JobFinished(_failed(job, error), time.process_time() - began_s))]


def _reply_to(
    template: ChatTemplate | None, job: Job | JobRejected, handle_body: BodyHandler | None
) -> Reply:
    match job:
        case JobRejected():
            return job
        case NameJob(body, kind):
            return Named(named_model(without_lone_surrogates(body), kind))
        case RenderJob():
            return _rendered(template, job)
        case BodyJob(body=body):
            job = msgspec.structs.replace(job, body=without_lone_surrogates(body))
            return _body(handle_body, job)
        case EncodeJob() | ImageChatJob():
            return _body(handle_body, job)
        case CheckJob():
            return JobRejected("this process checks no grammars", None)


def _failed(job: Job | JobRejected, error: BaseException) -> JobRejected:
    name = type(error).__name__
    if isinstance(job, EncodeJob):
        return JobRejected(f"the tokenizer fails on this text: {name}", None)
    if isinstance(job, BodyJob | NameJob | ImageChatJob):
        return JobRejected(f"the body cannot be prepared: {name}", None)
    return JobRejected(f"the chat template fails on these messages: {name}")


def _rendered(template: ChatTemplate | None, job: RenderJob) -> Reply:
    if template is None:
        return JobRejected(NO_TEMPLATE)
    given = template_values(job.values)
    try:
        parts = template.render(
            given.messages,
            given.tools,
            add_generation_prompt=given.add_generation_prompt,
            variables=given.variables,
        )
    except HearthError as error:
        return JobRejected(error.message, error.param)
    most = max(MAX_PROMPT_CHARS, MAX_CHARS_PER_BYTE * len(job.values))
    if sum(map(len, parts)) > most:
        return JobRejected(f"the rendered prompt has more than {most} characters")
    return Rendered([(isinstance(part, LiteralText), str(part)) for part in parts])


def _body(handle: BodyHandler | None, job: FileJob) -> Reply:
    try:
        if handle is not None:
            return handle(job)
    except HearthError as error:
        return JobRejected(error.message, error.param, error.code)
    return JobRejected("this process prepares no bodies", None)


def read_frame() -> bytes | None:
    head = sys.stdin.buffer.read(SIZE.size)
    return sys.stdin.buffer.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


def write_frame(data: bytearray) -> None:
    """Writes a frame, or pixels."""
    _FRAMES.write(data)
    _FRAMES.flush()


if __name__ == "__main__":
    main()
