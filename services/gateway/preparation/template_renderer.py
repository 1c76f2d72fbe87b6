"""Renders chat templates, prepares large bodies and tokenizes, in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.text.chat_template import NO_TEMPLATE, LiteralText
from services.gateway.text.process_jobs import (
    NO_MODEL,
    BodyJob,
    Encoded,
    EncodeJob,
    ImageChatJob,
    JobRejected,
    Named,
    NameJob,
    PreparedBody,
    ProcessSetup,
    Rendered,
    Reply,
    TokenizedPrompt,
    Unavailable,
    render_job,
)
from shared.errors import HearthError, InvalidRequest, NoCapacity

Messages = Sequence[Mapping[str, Any]]
NO_VARIABLES: Mapping[str, Any] = {}


class Renderer:
    """Prepares the prompts of one model, `setup`. `pool`: the processes that all models share;
    `encoding`: the model's own process, which tokenizes prompts of up to `max_known_chars`; None:
    it has none.
    """

    def __init__(
        self,
        pool: PreparationPool,
        setup: ProcessSetup,
        encoding: PreparationPool | None = None,
        *,
        max_known_chars: int = 0,
    ) -> None:
        self._pool = pool
        self._setup = setup
        self._encoding = encoding
        self._own_setup = msgspec.structs.replace(setup, template=None, family=b"", added_ids={})
        self._max_known_chars = max_known_chars

    async def render(
        self,
        messages: Messages,
        tools: Messages = (),
        *,
        tenant_id: str = "",
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[str]:
        """Renders as ChatTemplate.render does. Raises InvalidRequest, also for too much time or
        memory, Overloaded if the tenant's turn does not come, and NoCapacity.
        """
        if self._setup.template is None:
            raise InvalidRequest(NO_TEMPLATE, param="messages")
        job = render_job(messages, tools, add_generation_prompt, variables)
        reply = await self._pool.run(tenant_id, self._setup, job)
        _check(reply)
        assert isinstance(reply, Rendered), "the reply to a RenderJob"
        return [LiteralText(text) if is_literal else text for is_literal, text in reply.parts]

    async def prepare_body(self, job: BodyJob, *, tenant_id: str) -> PreparedBody:
        """Prepares a large body. Raises the error that rejects it, as `render` does,
        PayloadTooLarge and other subclasses of InvalidRequest, and NoCapacity also for files that
        can no longer be read.
        """
        reply = await self._pool.run(tenant_id, self._setup, job)
        _check(reply)
        assert isinstance(reply, PreparedBody), "the reply to a BodyJob"
        return reply

    async def prepare_image_chat(
        self, job: ImageChatJob, *, tenant_id: str
    ) -> list[TokenizedPrompt]:
        """Renders and tokenizes conversations with images. Raises as `prepare_body` does."""
        reply = await self._pool.run(tenant_id, self._setup, job)
        _check(reply)
        assert isinstance(reply, PreparedBody), "the reply to an ImageChatJob"
        return reply.prompts

    async def encode(
        self,
        prompts: Sequence[Sequence[str]],
        *,
        tenant_id: str,
        adds_special_tokens: bool | None = None,
        has_offsets: bool = False,
    ) -> Encoded:
        """Tokenizes prompts, as `EncodeJob` says. Raises as `prepare_body` does."""
        job = EncodeJob([*map(_flagged, prompts)], adds_special_tokens, has_offsets)
        if self._encoding is not None and job.num_chars <= self._max_known_chars:
            reply = await self._encoding.run(tenant_id, self._own_setup, job)
        else:
            reply = await self._pool.run(tenant_id, self._setup, job)
        _check(reply)
        assert isinstance(reply, Encoded), "the reply to an EncodeJob"
        return reply

    async def load_tokenizer(self) -> None:
        """Loads the tokenizer, so that no prompt waits for it. Optional first call. A prompt meets
        a failure again.
        """
        if self._encoding is not None:
            with suppress(HearthError):
                await self.encode([], tenant_id="")

    async def close(self) -> None:
        if self._encoding is not None:
            await self._encoding.close()


async def model_in_body(
    pool: PreparationPool, data: bytes, kind: str, *, tenant_id: str
) -> str | None:
    """Runs `named_model` in a process of the pool. Raises as `Renderer.prepare_body` does."""
    reply = await pool.run(tenant_id, NO_MODEL, NameJob(data, kind))
    _check(reply)
    assert isinstance(reply, Named), "the reply to a NameJob"
    return reply.model


def _flagged(parts: Sequence[str]) -> list[tuple[bool, str]]:
    return [(isinstance(each, LiteralText), str(each)) for each in parts]


def _check(reply: Reply) -> None:
    """Raises the error that rejects the job, or NoCapacity."""
    if isinstance(reply, JobRejected):
        raise _error_of(reply)
    if isinstance(reply, Unavailable):
        raise NoCapacity(reply.reason, retry_after_s=1.0)


def _error_of(reply: JobRejected) -> HearthError:
    """Returns an error of the class that the process raised."""
    classes = {each.code: each for each in _subclasses(InvalidRequest)}
    return classes.get(reply.code, InvalidRequest)(reply.reason, param=reply.param)


def _subclasses(root: type[HearthError]) -> Iterator[type[HearthError]]:
    yield root
    for child in root.__subclasses__():
        yield from _subclasses(child)
