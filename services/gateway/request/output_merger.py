"""Merges the outputs of one response: each prompt of an HTTP request is a separate request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from services.gateway.output.events import Event, Finished, TextDelta, Usage
from services.gateway.request.request_output import MAX_TAKEN_TOKENS, RequestOutput
from services.gateway.request.unsent_output import UnsentOutput, UnsentResponse
from shared.errors import HearthError
from shared.telemetry.timeline import Move

MAX_OUTPUTS = 64  # outputs whose events `next` returns: 5 ms of encoding
# Tokens with logprobs in those events and echoed prompts, unless one output has more.
MAX_TOKENS = MAX_TAKEN_TOKENS


class OutputMerger:
    """`next` returns the events of some outputs, and other streams continue before the next ones.
    Choice indices continue across the prompts.
    """

    def __init__(
        self,
        outputs: Sequence[RequestOutput],
        *,
        num_choices: int = 1,
        headers: Mapping[str, str] | None = None,
        unsent: UnsentResponse | None = None,
        on_close: Callable[[], None] = lambda: None,
        on_send: Callable[[float, float], None] = lambda began_at, ended_at: None,
    ) -> None:
        """`num_choices`: choices per prompt. `headers`: the state of the tenant's limits.
        `unsent`: counts the response's bytes (default: without the tenant's other responses).
        `on_close`: called by `close`. `on_send`: called with the times before and after each part
        of the response is sent.
        """
        self.outputs = tuple(outputs)
        self.headers = {} if headers is None else headers
        self.num_choices = num_choices
        self._fresh = dict.fromkeys(self.outputs)
        self._echoed: set[int] = set()  # choices
        self._num_open = len(self.outputs)
        self._has_returned = False
        self._usage: Usage | None = None  # until an output changes
        self._waiter: asyncio.Future[None] | None = None
        self._error: HearthError | None = None
        self.unsent = UnsentOutput().open("") if unsent is None else unsent
        self._on_close = on_close
        self.on_send = on_send
        self._num_counted_bytes = dict.fromkeys(self.outputs, 0)
        for index, output in enumerate(self.outputs):
            output.first_choice_index = index * num_choices
            output.on_update = partial(self._wake, output)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Schema keywords that the grammar does not enforce."""
        return tuple(dict.fromkeys(text for each in self.outputs for text in each.warnings))

    def take_moves(self) -> list[Move]:
        """Returns the moves to other workers since the last call."""
        return [move for each in self.outputs for move in each.take_moves()]

    @property
    def is_complete(self) -> bool:
        """Whether `next` has returned all events and none of the requests failed."""
        return not self._num_open

    def fail(self, error: HearthError) -> None:
        """Makes the next call of `next` raise the error."""
        self._error = error
        self._wake_waiter()

    def close(self) -> None:
        """Ends the response: its last byte has left, or its client has. Idempotent. Drops the
        references back to this object, since a cycle is freed only by a full collection.
        """
        self.unsent.close()
        for each in self.outputs:
            each.on_update = _ignore
            if each.end is not None and each.end.error is not None:
                each.end.error.__traceback__ = None
        on_close, self._on_close = self._on_close, lambda: None
        on_close()

    async def next(self) -> list[Event]:
        """Waits for the next events, of which the last is `Usage`; then returns an empty list.

        Raises the HearthError that ended one of the requests, once the events of this request have
        been returned, or that of `fail`.
        """
        if self._has_returned and self._fresh:
            await asyncio.sleep(0)
        self._has_returned = True
        while True:
            if self._error is not None:
                raise self._error
            events = self._take()
            if events or not self._num_open:
                return events
            if self._fresh:  # not polled yet: one of them may have events
                await asyncio.sleep(0)
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _take(self) -> list[Event]:
        was_complete = self.is_complete
        taken, events = self._take_some()
        for output in taken:
            self._count(output)
            if output.has_more:
                self._fresh[output] = None
            elif output.end is not None:
                self._end(output, has_events=bool(events))
        if self.is_complete and not was_complete:
            events.append(self.usage)
        return events

    def _take_some(self) -> tuple[list[RequestOutput], list[Event]]:
        taken: list[RequestOutput] = []
        events: list[Event] = []
        num_tokens = 0
        while self._fresh and len(taken) < MAX_OUTPUTS and num_tokens < MAX_TOKENS:
            output = next(iter(self._fresh))
            del self._fresh[output]
            fresh = output.take()
            taken.append(output)
            events += fresh
            num_tokens += sum(len(each.tokens) for each in fresh if isinstance(each, TextDelta))
            if output.echo is not None:
                num_tokens += self._num_echoes(fresh) * len(output.prompt_logprobs)
        return taken, events

    def _num_echoes(self, events: Sequence[Event]) -> int:
        """Counts the choices whose first events these are, with which the prompt is echoed."""
        own = {each.choice_index for each in events if isinstance(each, TextDelta | Finished)}
        first = own - self._echoed
        self._echoed |= first
        return len(first)

    def _end(self, output: RequestOutput, *, has_events: bool) -> None:
        assert output.end is not None
        error = output.end.error
        if error is None:
            self._num_open -= 1
        elif not has_events:
            raise error
        elif self._error is None:
            self._error = error  # the next `next` raises it

    @property
    def usage(self) -> Usage:
        """The usage of the events that `next` has returned so far."""
        if self._usage is None:
            self._usage = self._counted_usage()
        return self._usage

    def _counted_usage(self) -> Usage:
        cached = [each.num_cached_tokens for each in self.outputs]
        known = [each for each in cached if each is not None]
        return Usage(
            prompt=sum(each.num_prompt_tokens for each in self.outputs),
            cached=sum(known) if len(known) == len(cached) else None,
            output=sum(each.num_output_tokens for each in self.outputs),
            reasoning=sum(each.num_reasoning_tokens for each in self.outputs),
        )

    def _wake(self, output: RequestOutput) -> None:
        self._fresh[output] = None
        self._usage = None
        self._count(output)
        self._wake_waiter()

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count(self, output: RequestOutput) -> None:
        num_bytes = output.num_buffered_bytes
        num_more = num_bytes - self._num_counted_bytes[output]
        if num_more:
            self._num_counted_bytes[output] = num_bytes
            self.unsent.add(num_more)


def _ignore() -> None:
    """Ignores an update of a response that has ended."""
