"""Buffers one request's output for the client.

Tokens are detokenized on arrival, so a stop string is detected at once however slowly the client
reads. Text is buffered per token until `take`, and logprobs are packed. A long backlog is joined
and taken in parts, so that no event becomes large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from services.gateway.metrics import GatewayMetrics
from services.gateway.request.preparation import PreparedRequest
from services.gateway.streams.stream import StreamEnd
from services.gateway.text.scored_tokens import ScoredToken, ScoredTokens
from services.gateway.text.text_assembler import TextAssembler
from shared.clock import Clock
from shared.errors import HearthError
from shared.messages import Finish, Served, TokenLogprobs
from shared.packed_logprobs import PackedLogprobs

MAX_TEXTS = 64  # buffered texts of a choice; more are joined
MAX_DELTA_TOKENS = 64  # tokens with logprobs of a delta: up to 130 KiB with 20 top tokens each
MAX_TAKEN_TOKENS = 4 * MAX_DELTA_TOKENS  # of all choices together
TEXT_BYTES = 56  # of a Python string, besides its characters


class ClientDisconnected(HearthError):
    """Reaches no client, since the client disconnected; its code appears in the metrics."""

    code = "client_gone"
    http_status = 499


class ClientSlow(ClientDisconnected):
    """The client stopped reading, and the gateway closed the connection."""

    code = "client_slow"


class OutputDelta(msgspec.Struct, frozen=True):
    """`texts`: one per token, or joined. `tokens`: the tokens of the text, if logprobs were
    requested.
    """

    choice_index: int
    texts: Sequence[str]
    finish_reason: str | None
    tokens: Sequence[ScoredToken] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_bytes(self) -> int:
        return bytes_of_texts(self.texts) + bytes_of_tokens(self.tokens)


def bytes_of_texts(texts: Sequence[str]) -> int:
    return sum(map(len, texts)) + TEXT_BYTES * len(texts)


def bytes_of_tokens(tokens: Sequence[ScoredToken]) -> int:
    return tokens.num_bytes if isinstance(tokens, ScoredTokens) else 0


class _ChoiceText:
    """The text and tokens of one choice since the last delta."""

    def __init__(self, assembler: TextAssembler) -> None:
        self.assembler = assembler
        self.finish_reason: str | None = None
        self.is_taken = False  # including the finish reason
        self.served: Served | None = None
        self.last_token_at: float | None = None
        self._texts: list[str] = []
        self._tokens = ScoredTokens()
        self._num_taken_chars = 0

    @property
    def has_output(self) -> bool:
        return bool(self._texts or self._tokens)

    def add(self, texts: Sequence[str], tokens: Sequence[ScoredToken]) -> int:
        """Returns the bytes that the output takes until it is in a delta."""
        self._texts += texts
        if tokens:
            self._tokens.extend(tokens)
        return bytes_of_texts(texts) + bytes_of_tokens(tokens)

    def take(self, choice_index: int) -> OutputDelta | None:
        """Returns at most MAX_DELTA_TOKENS tokens that have logprobs. The texts of tokens with
        logprobs are joined, since one delta holds these tokens together.
        """
        if len(self._tokens) > MAX_DELTA_TOKENS:
            return self._take_part(choice_index)
        is_ending = self.finish_reason is not None and not self.is_taken
        if not self.has_output and not is_ending:
            return None
        self.is_taken = is_ending
        texts, self._texts = self._texts, []
        tokens: Sequence[ScoredToken] = ()
        if self._tokens:
            tokens, self._tokens = self._tokens, ScoredTokens()
            self._num_taken_chars += sum(map(len, texts))
        if tokens or len(texts) > MAX_TEXTS:
            texts = ["".join(texts)]
        return OutputDelta(choice_index, texts, self.finish_reason, tokens)

    def _take_part(self, choice_index: int) -> OutputDelta:
        tokens, self._tokens = (
            self._tokens[:MAX_DELTA_TOKENS],
            self._tokens[MAX_DELTA_TOKENS:],
        )
        text = "".join(self._texts)
        num_chars = self._tokens[0].text_offset - self._num_taken_chars
        self._num_taken_chars += len(text[:num_chars])
        self._texts = [text[num_chars:]]
        return OutputDelta(choice_index, [text[:num_chars]], None, tokens)


class RequestOutput:
    """A `stream.Receiver` that buffers the output until `take()`.

    `first_choice_index`: index of its first choice in a response of several requests.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        assemblers: Sequence[TextAssembler],
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        on_end: Callable[[RequestOutput], None] = lambda output: None,
    ) -> None:
        sampling = prepared.request.sampling
        self.request_id = prepared.request.request_id
        self.num_prompt_tokens = len(prepared.prompt_token_ids)
        self.echo = prepared.echo
        self.end: StreamEnd | None = None
        self.embedding: bytes | None = None
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.first_choice_index = 0
        self.on_update: Callable[[], None] = lambda: None
        self.num_buffered_bytes = 0  # of the deltas that `take` would return
        self._texts = [_ChoiceText(each) for each in assemblers]
        self.has_more = False
        self._first_taken = 0  # the choice that `take` returns first
        self._shows_output = prepared.generation.shows_output
        self._awaits_prompt_logprobs = (
            sampling.num_prompt_logprobs is not None and self.num_prompt_tokens > 1
        )
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self._opened_at = clock.now()

    @property
    def num_output_tokens(self) -> int:
        return sum(text.assembler.num_tokens for text in self._texts)

    @property
    def served(self) -> Served | None:
        """`Served` of the choice whose prompt was computed; the other choices share that prompt."""
        known = [text.served for text in self._texts if text.served is not None]
        return min(known, key=lambda served: served.num_cached_tokens, default=None)

    @property
    def num_cached_tokens(self) -> int | None:
        """None if the worker was stopped before it reported the number."""
        served = self.served
        return None if served is None else min(served.num_cached_tokens, self.num_prompt_tokens)

    @property
    def has_delivered(self) -> bool:
        """Whether the request succeeded, or returned output tokens before it failed."""
        has_succeeded = self.end is not None and self.end.error is None
        return has_succeeded or self.num_output_tokens > 0

    def take(self) -> list[OutputDelta]:
        """Returns the next deltas, at most one for each choice; empty while prompt logprobs are
        outstanding. `has_more` tells whether deltas are left, because they are too many.
        """
        if self._awaits_prompt_logprobs and self.end is None:
            return []
        taken: list[OutputDelta] = []
        self.has_more = False
        num_tokens, num_choices = 0, len(self._texts)
        first = self._first_taken
        for place in range(first, first + num_choices):
            index = place % num_choices
            if num_tokens >= MAX_TAKEN_TOKENS:
                self.has_more, self._first_taken = True, index
                break
            text = self._texts[index]
            delta = text.take(self.first_choice_index + index)
            if delta is not None:
                taken.append(delta)
                num_tokens += len(delta.tokens)
                self.has_more = self.has_more or text.has_output
        self._count_taken(taken)
        return taken

    # ── stream.Receiver ──────────────────────────────────────────────────────────────────────────

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        text = self._texts[choice_index]
        self._observe_gap(text)
        if not self._shows_output:
            return True
        fresh = text.assembler.feed(token_ids, logprobs)
        scored = text.assembler.take_scored() if logprobs else ()
        if fresh or scored:
            self.num_buffered_bytes += text.add(fresh, scored)
            self.on_update()
        if text.assembler.is_stopped:
            text.finish_reason = "stop"
            self.on_update()
            return False
        return True

    def on_served(self, choice_index: int, served: Served) -> None:
        self._texts[choice_index].served = served

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        if self._awaits_prompt_logprobs:
            self.prompt_logprobs = PackedLogprobs(logprobs)
            self._awaits_prompt_logprobs = False
            self.on_update()

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        text = self._texts[choice_index]
        fresh = text.assembler.flush()
        scored = text.assembler.take_scored()
        self.num_buffered_bytes += text.add((fresh,) if fresh else (), scored)
        text.finish_reason = self._finish_reason(text, finish)
        text.served = finish.served
        self.embedding = finish.embedding
        self.on_update()

    def on_end(self, end: StreamEnd) -> None:
        self.end = end
        if end.error is None:
            self._metrics.count_request(self._texts[0].finish_reason or "stop")
        else:
            self._metrics.count_request(end.error.code)
        self._metrics.count_tokens(
            prompt=self.num_prompt_tokens,
            cached=self.num_cached_tokens or 0,
            output=self.num_output_tokens,
        )
        self._on_end(self)
        self.on_update()

    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def _count_taken(self, taken: Sequence[OutputDelta]) -> None:
        if self.has_more:
            self.num_buffered_bytes -= sum(each.num_bytes for each in taken)
        else:
            self.num_buffered_bytes = 0

    def _finish_reason(self, text: _ChoiceText, finish: Finish) -> str:
        if not self._shows_output:  # the client requested no tokens
            return "length"
        return "stop" if text.assembler.is_stopped else finish.reason

    def _observe_gap(self, text: _ChoiceText) -> None:
        """Observes TTFT at the request's first token, ITL between two tokens of a choice."""
        now = self._clock.now()
        if text.last_token_at is not None:
            self._metrics.observe_itl(now - text.last_token_at)
        elif all(each.last_token_at is None for each in self._texts):
            self._metrics.observe_ttft(now - self._opened_at)
        text.last_token_at = now
