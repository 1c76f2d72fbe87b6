"""Buffers one request's output for the client.

Tokens are detokenized on arrival, so a stop string is detected at once however slowly the client
reads. Text is buffered per token until `take`, and logprobs are packed. A long backlog is joined
and taken in parts, so that no event becomes large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.output.choice_output import MAX_DELTA_TOKENS, ChoiceOutput
from services.gateway.output.events import EndReason, Event, Finished, TextDelta, bytes_of_event
from services.gateway.receipts.draft import ChoiceEnd
from services.gateway.request.request_builder import PreparedRequest
from services.gateway.streams.receiver import StreamEnd
from services.gateway.structured.tools.parsing.output_assembler import OutputAssembler
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import Finish, Served, TokenLogprobs
from shared.output.packed_logprobs import PackedLogprobs
from shared.telemetry.timeline import Move

MAX_TAKEN_TOKENS = 4 * MAX_DELTA_TOKENS  # tokens of all choices together


class ClientDisconnected(HearthError):
    """Ends a request whose client has disconnected: no client receives it, its code is in the
    metrics.
    """

    code = "client_gone"
    http_status = 499


class ClientSlow(ClientDisconnected):
    """Ends a request whose client stopped reading, so that the gateway closed its connection."""

    code = "client_slow"


class _ChoiceState:
    """The decoding state of one choice, and the output that its client has not taken."""

    def __init__(self, assembler: OutputAssembler) -> None:
        self.assembler = assembler
        self.output = ChoiceOutput()
        self.finish_reason: EndReason | None = None
        self.is_taken = False  # including the finish reason
        self.served: Served | None = None
        self.last_token_at: float | None = None

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int:
        """Returns the bytes that the new output occupies until it is taken."""
        fresh = self.assembler.feed(token_ids, logprobs)
        scored = self.assembler.take_scored() if logprobs else ()
        return self.output.add(fresh, scored) if fresh or scored else 0

    def flush(self) -> int:
        """Ends the choice's text. Returns bytes as `feed` does."""
        return self.output.add(self.assembler.flush(), self.assembler.take_scored())

    def take(self, choice_index: int) -> list[Event]:
        """Returns the events of the output, its end last."""
        events = self.output.take(choice_index)
        if self.finish_reason is not None and not self.is_taken and not self.output:
            self.is_taken = True
            stop_sequence = self.assembler.stop_sequence
            events.append(Finished(choice_index, self.finish_reason, stop_sequence))
        return events


class RequestOutput:
    """A `stream.Receiver` that buffers the output until `take()`.

    `first_choice_index`: index of its first choice in a response of several requests.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        assemblers: Sequence[OutputAssembler],
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        dialect: str = "openai",
        on_end: Callable[[RequestOutput], None] = lambda output: None,
    ) -> None:
        sampling = prepared.request.sampling
        self.request_id = prepared.request.request_id
        self._model = prepared.request.model
        self._tenant = prepared.request.tenant_id
        self._dialect = dialect
        self.num_prompt_tokens = len(prepared.prompt_token_ids)
        self.echo = prepared.echo
        self.warnings = prepared.warnings
        self.end: StreamEnd | None = None
        self.embedding: bytes | None = None
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.first_choice_index = 0
        self.on_update: Callable[[], None] = lambda: None
        self.num_buffered_bytes = 0  # bytes of the texts that `take` would return
        self._moves: list[Move] = []
        self._texts = [_ChoiceState(each) for each in assemblers]
        self.has_more = False
        self._first_taken = 0  # the choice that `take` returns first
        self._shows_output = prepared.generation.shows_output
        self._awaits_prompt_logprobs = (
            sampling.num_prompt_logprobs is not None and self.num_prompt_tokens > 1
        )
        self._metrics = metrics
        self._ttft, self._itl = metrics.ttft_of(self._model), metrics.itl_of(self._model)
        self._clock = clock
        self._on_end = on_end
        self._opened_at = clock.now()

    @property
    def outcome(self) -> str:
        """The finish reason of the first choice once it has ended, or an error code."""
        if self.end is not None and self.end.error is not None:
            return self.end.error.code
        return self._texts[0].finish_reason or "stop"

    @property
    def choice_ends(self) -> list[ChoiceEnd]:
        return [
            ChoiceEnd(each.assembler.num_tokens, each.finish_reason or "") for each in self._texts
        ]

    @property
    def num_output_tokens(self) -> int:
        return sum(text.assembler.num_tokens for text in self._texts)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(text.assembler.num_reasoning_tokens for text in self._texts)

    @property
    def served(self) -> Served | None:
        """`Served` of the choice whose prompt was computed; the other choices share that prompt."""
        known = [text.served for text in self._texts if text.served is not None]
        return min(known, key=lambda served: served.num_cached_tokens, default=None)

    @property
    def num_cached_tokens(self) -> int | None:
        """The number that the worker reported; None if it was stopped before."""
        served = self.served
        return None if served is None else min(served.num_cached_tokens, self.num_prompt_tokens)

    @property
    def has_delivered(self) -> bool:
        """Whether the request succeeded, or returned output tokens before it failed."""
        has_succeeded = self.end is not None and self.end.error is None
        return has_succeeded or self.num_output_tokens > 0

    def take(self) -> list[Event]:
        """Returns the next events, at most one text for each choice; empty while prompt logprobs
        are outstanding. `has_more` tells whether texts are left, because they are too many.
        """
        if self._awaits_prompt_logprobs and self.end is None:
            return []
        taken: list[Event] = []
        self.has_more = False
        num_tokens, num_choices = 0, len(self._texts)
        first = self._first_taken
        for place in range(first, first + num_choices):
            index = place % num_choices
            if num_tokens >= MAX_TAKEN_TOKENS:
                self.has_more, self._first_taken = True, index
                break
            text = self._texts[index]
            events = text.take(self.first_choice_index + index)
            taken += events
            num_tokens += sum(len(e.tokens) for e in events if isinstance(e, TextDelta))
            self.has_more = self.has_more or bool(text.output)
        self._count_taken(taken)
        return taken

    def take_moves(self) -> list[Move]:
        """Returns the moves to other workers since the last call."""
        moves, self._moves = self._moves, []
        return moves

    # ── stream.Receiver ──────────────────────────────────────────────────────────────────────────

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        text = self._texts[choice_index]
        self._observe_gap(text)
        if not self._shows_output:
            return True
        num_bytes = text.feed(token_ids, logprobs)
        if num_bytes:
            self.num_buffered_bytes += num_bytes
            self.on_update()
        if text.assembler.is_stopped:
            text.finish_reason = "tool_calls" if text.assembler.num_calls else "stop"
            self.on_update()
            return False
        return True

    def on_served(self, choice_index: int, served: Served) -> None:
        self._texts[choice_index].served = served

    def on_moved(self, move: Move) -> None:
        self._moves.append(move)

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        if self._awaits_prompt_logprobs:
            self.prompt_logprobs = PackedLogprobs(logprobs)
            self._awaits_prompt_logprobs = False
            self.on_update()

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        text = self._texts[choice_index]
        self.num_buffered_bytes += text.flush()
        text.finish_reason = self._finish_reason(text, finish)
        text.served = finish.served
        if finish.failure is not None:
            place = f"choices[{self.first_choice_index + choice_index}]"
            self.warnings += (f"{place} is cut: {finish.failure.message}",)
        self.embedding = finish.embedding
        self.on_update()

    def on_end(self, end: StreamEnd) -> None:
        self.end = end
        try:
            self._count()
        finally:
            try:
                on_end, self._on_end = self._on_end, lambda output: None  # refers to this output
                on_end(self)
            finally:
                self.on_update()

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self) -> None:
        error = None if self.end is None else self.end.error
        is_cut = error is not None and self.num_output_tokens > 0
        self._metrics.count_ended(
            self.outcome,
            model=self._model,
            dialect=self._dialect,
            tenant=self._tenant,
            is_failed=error is not None and error.is_of_cluster,
            is_lost=is_cut and not isinstance(error, ClientDisconnected),
            worker_id=None if self.end is None else self.end.worker_id,
        )
        self._metrics.count_tokens(
            model=self._model,
            tenant=self._tenant,
            prompt=self.num_prompt_tokens,
            cached=self.num_cached_tokens or 0,
            output=self.num_output_tokens,
            reasoning=self.num_reasoning_tokens,
        )
        num_calls = sum(text.assembler.num_calls for text in self._texts)
        self._metrics.count_tool_calls(num_calls)

    def _count_taken(self, taken: Sequence[Event]) -> None:
        if self.has_more:
            self.num_buffered_bytes -= sum(map(bytes_of_event, taken))
        else:
            self.num_buffered_bytes = 0

    def _finish_reason(self, text: _ChoiceState, finish: Finish) -> EndReason:
        if not self._shows_output:  # the client requested no tokens
            return "length"
        if text.assembler.is_stopped or finish.reason == "stop":
            return "tool_calls" if text.assembler.num_calls else "stop"
        return "length"  # a choice that failed beside others has it, too: its output is cut

    def _observe_gap(self, text: _ChoiceState) -> None:
        """Observes TTFT at the request's first token, ITL between two tokens of a choice."""
        now = self._clock.now()
        if text.last_token_at is not None:
            self._itl.observe(now - text.last_token_at)
        elif all(each.last_token_at is None for each in self._texts):
            self._ttft.observe(now - self._opened_at)
        text.last_token_at = now
