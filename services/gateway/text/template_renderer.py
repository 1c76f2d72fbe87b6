"""Renders chat templates, and prepares large bodies, in the preparation processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.text.chat_template import LiteralText
from services.gateway.text.preparation_pool import PreparationPool
from services.gateway.text.process_jobs import (
    BodyJob,
    Encoded,
    EncodeJob,
    PreparedBody,
    ProcessSetup,
    Rejected,
    Rendered,
    Reply,
    Unavailable,
    render_job,
)
from shared.errors import HearthError, InvalidRequest, NoCapacity

Messages = Sequence[Mapping[str, Any]]
NO_VARIABLES: Mapping[str, Any] = {}


class Renderer:
    """Of one model, `setup`, in a pool that all models share."""

    def __init__(self, pool: PreparationPool, setup: ProcessSetup) -> None:
        self._pool = pool
        self._setup = setup

    async def render(
        self,
        messages: Messages,
        tools: Messages = (),
        *,
        tenant_id: str = "",
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> list[str]:
        """As ChatTemplate.render. Raises InvalidRequest, also for too much time or memory;
        Overloaded if the tenant's turn does not come; NoCapacity.
        """
        if self._setup.template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        job = render_job(messages, tools, add_generation_prompt, variables)
        reply = await self._pool.run(tenant_id, self._setup, job)
        _check(reply)
        assert isinstance(reply, Rendered), "the reply to a RenderJob"
        return [LiteralText(text) if is_literal else text for is_literal, text in reply.parts]

    async def prepare_body(self, job: BodyJob, *, tenant_id: str) -> PreparedBody:
        """Raises the error that rejects the body, as `render`, and PayloadTooLarge or another
        subclass of InvalidRequest; NoCapacity also for files that cannot be read any more.
        """
        reply = await self._pool.run(tenant_id, self._setup, job)
        _check(reply)
        assert isinstance(reply, PreparedBody), "the reply to a BodyJob"
        return reply

    async def encode(
        self,
        parts: Sequence[str],
        *,
        tenant_id: str,
        adds_special_tokens: bool | None = None,
    ) -> Encoded:
        """Tokenizes texts, as `EncodeJob`, of a model whose tokenizer may not run elsewhere. Raises
        as `prepare_body`.
        """
        given = [(isinstance(part, LiteralText), str(part)) for part in parts]
        job = EncodeJob(given, adds_special_tokens)
        reply = await self._pool.run(tenant_id, self._setup, job)
        _check(reply)
        assert isinstance(reply, Encoded), "the reply to an EncodeJob"
        return reply


def _check(reply: Reply) -> None:
    """Raises the error that rejects the job, or NoCapacity."""
    if isinstance(reply, Rejected):
        raise _error_of(reply)
    if isinstance(reply, Unavailable):
        raise NoCapacity(reply.reason, retry_after_s=1.0)


def _error_of(reply: Rejected) -> HearthError:
    """An error of the class that the process raised."""
    classes = {each.code: each for each in _subclasses(InvalidRequest)}
    return classes.get(reply.code, InvalidRequest)(reply.reason, param=reply.param)


def _subclasses(root: type[HearthError]) -> Iterator[type[HearthError]]:
    yield root
    for child in root.__subclasses__():
        yield from _subclasses(child)
