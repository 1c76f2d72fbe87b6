"""What receives a stream's tokens. Its exceptions end its own stream.

Its text is made of what a model sends and a client asks for, and one message carries tokens of many
streams: the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import structlog

from services.gateway.streams.try_record import TryRecord
from shared.background import item_error
from shared.errors import HearthError
from shared.messages import Finish, Served, TokenLogprobs

log = structlog.get_logger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The outcome of a stream, reported once. `error` is None when every choice has finished."""

    error: HearthError | None
    worker_id: str | None
    num_resubmissions: int
    tries: tuple[TryRecord, ...] = field(default=(), compare=False)


class Receiver(Protocol):
    """Receives a stream's tokens. Methods are called immediately, in order; must not block."""

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        """`logprobs`: of all tokens, or empty. Returns False once the text met a stop string."""
        ...

    def on_served(self, choice_index: int, served: Served) -> None:
        """Called once per placement, before its first tokens."""
        ...

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Called before the first tokens, and again for each new placement."""
        ...

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        """`finish` has a failure if the choice ended before its time beside others that did not."""
        ...

    def on_end(self, end: StreamEnd) -> None: ...


class GuardedReceiver:
    """`failure`: after the first exception; nothing but the end is passed on from then on."""

    def __init__(self, receiver: Receiver, request_id: str) -> None:
        self.failure: HearthError | None = None
        self._receiver = receiver
        self._request_id = request_id

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        return self._try(self._receiver.on_tokens, choice_index, token_ids, logprobs) is not False

    def on_served(self, choice_index: int, served: Served) -> None:
        self._try(self._receiver.on_served, choice_index, served)

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._try(self._receiver.on_prompt_logprobs, logprobs)

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        self._try(self._receiver.on_finish, choice_index, finish)

    def on_end(self, end: StreamEnd) -> None:
        if end.error is None and self.failure is not None:
            end = replace(end, error=self.failure)
        try:
            self._receiver.on_end(end)
        except BaseException as raised:
            self._fail(item_error(raised))

    def _try(self, call: Callable[..., Result], *args: Any) -> Result | None:
        """None if it raises, and after a failure."""
        try:
            return call(*args) if self.failure is None else None
        except BaseException as raised:
            self._fail(item_error(raised))
            return None

    def _fail(self, error: Exception) -> None:
        log.error("output_failed", request=self._request_id, exc_info=error)
        self.failure = HearthError("the output of the model could not be shown")
