"""The receiver of a stream's tokens. Its exceptions end its own stream.

A message has tokens of many streams: an exception caused by the output or the options of one stream
must not affect the others.
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
from shared.telemetry.timeline import Move

log = structlog.get_logger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The outcome of a stream, reported once. `error` is None if every choice has finished.
    `outputs` are the tokens that arrived, of each choice: there may be some after a stop string.
    """

    error: HearthError | None
    worker_id: str | None
    num_resubmissions: int
    tries: tuple[TryRecord, ...] = field(default=(), compare=False)
    outputs: tuple[Sequence[int], ...] = field(default=(), compare=False)


class Receiver(Protocol):
    """Receives a stream's tokens. Methods are called immediately and in order, and must
    not block.
    """

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        """Receives new tokens. `logprobs` has one entry a token, or is empty. Returns False once
        the text contains a stop string.
        """
        ...

    def on_served(self, choice_index: int, served: Served) -> None:
        """Called once per placement, before its first tokens."""
        ...

    def on_moved(self, move: Move) -> None:
        """Called before the first tokens of a placement that continues the request."""
        ...

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Called before the first tokens, and again for each new placement."""
        ...

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        """Called once per finished choice. `finish` has a failure if the choice failed and others
        did not.
        """
        ...

    def on_end(self, end: StreamEnd) -> None: ...


class GuardedReceiver:
    """A receiver whose exceptions are stored: after the first one, `failure` is set and only the
    end is passed on.
    """

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

    def on_moved(self, move: Move) -> None:
        self._try(self._receiver.on_moved, move)

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
        """Calls the function. Returns None if it raises or a call before has failed."""
        try:
            return call(*args) if self.failure is None else None
        except BaseException as raised:
            self._fail(item_error(raised))
            return None

    def _fail(self, error: Exception) -> None:
        log.error("output_failed", request=self._request_id, exc_info=error)
        self.failure = HearthError("the output of the model could not be shown")
