"""Encodes the response of a text completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import msgspec

from services.gateway.dialects.openai.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionRequest,
)
from services.gateway.dialects.openai.errors import OpenAIEncoder
from services.gateway.dialects.openai.logprobs import (
    ListedToken,
    check_prompt_logprobs,
    completion_logprobs,
    completion_logprobs_parts,
    mean_logprob,
    output_tokens,
    prompt_tokens,
)
from services.gateway.dialects.openai.usage import (
    ending,
    hearth_info_of,
    to_usage,
    usage_so_far,
)
from services.gateway.http.json_parts import with_list, with_value
from services.gateway.output.events import Event, Finished, TextDelta, Usage, with_ends
from services.gateway.output.framing import TextEvent
from services.gateway.output.results import ChoiceResult, Results
from services.gateway.request.endpoint import ResponseContext
from services.gateway.request.prompt import Echo
from services.gateway.request.request_output import RequestOutput
from services.gateway.text.scored_tokens import ScoredToken

_encode = msgspec.json.Encoder().encode
ECHO_TOKENS = 256  # tokens of a prompt with logprobs in one chunk


@dataclass(frozen=True, slots=True)
class CompletionEncoder(OpenAIEncoder):
    """Returns the best `num_shown` of the choices sampled for a prompt. A text completion has no
    reasoning and no tool calls.
    """

    has_usage: bool
    has_logprobs: bool
    num_shown: int
    has_running_usage: bool = False
    _echoed: set[int] = field(default_factory=set)  # choices whose prompt was sent
    _text_events: dict[int, TextEvent] = field(default_factory=dict)  # by choice

    @classmethod
    def of(cls, body: CompletionRequest, context: ResponseContext) -> CompletionEncoder:
        return cls(
            context,
            has_usage=body.has_usage,
            has_logprobs=body.logprobs is not None,
            num_shown=body.num_choices,
            has_running_usage=body.has_running_usage,
        )

    def keep_alive(self) -> bytes:
        return self.context.framing.event(self._empty_chunk())

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Returns one chunk per text; a choice's last has the finish reason."""
        for event, end in with_ends(events):
            match event:
                case TextDelta():
                    yield from self._long_echo(event.choice_index)
                    yield self._texts(event, None if end is None else end.reason)
                case Finished():
                    yield from self._long_echo(event.choice_index)
                    yield self._texts(TextDelta(event.choice_index, ()), event.reason)
                case Usage():
                    yield self._ending(event)

    def body(self, results: Results) -> Iterator[bytes]:
        """Returns the response in parts. Raises HearthError if a worker sent a wrong number of
        prompt logprobs.
        """
        if self.has_logprobs:
            for each in self.context.merger.outputs:
                _check_echo(each)
        completion = Completion(
            id=self._id,
            created=self.context.created,
            model=self.context.model,
            choices=(),
            usage=to_usage(results.usage),
            hearth=hearth_info_of(self.context),
        )
        best = enumerate(self._best(results.choices))
        shown = (self._choice_parts(each, index) for index, each in best)
        return with_list(_encode(completion), b"choices", shown)

    def _texts(self, delta: TextDelta, finish_reason: str | None) -> bytes:
        index, is_echo_due, last = delta.choice_index, self._is_echo_due(delta.choice_index), b""
        texts = [delta.text] if is_echo_due else list(delta.texts)
        if is_echo_due or self.has_logprobs or finish_reason is not None:
            text = texts.pop() if texts else ""
            choice = self._choice(index, text, delta.tokens, finish_reason)
            last = self.context.framing.event(self._chunk(choice))
        return self._plain_texts(index, texts) + last

    def _long_echo(self, index: int) -> Iterator[bytes]:
        """Returns the chunks of a prompt whose logprobs are too long for one chunk, except the
        last.
        """
        output = self._output_of(index)
        if output.echo is None or not self.has_logprobs or not self._is_echo_due(index):
            return
        _check_echo(output)
        tokens = prompt_tokens(output.echo, output.prompt_logprobs)
        for first in range(0, self._last_echo(output.echo), ECHO_TOKENS):
            begin, end = output.echo.offsets[first], output.echo.offsets[first + ECHO_TOKENS]
            logprobs = completion_logprobs(
                list(islice(tokens, ECHO_TOKENS)), self.context.token_bytes
            )
            text = output.echo.text[begin:end]
            choice = CompletionChoice(index=index, text=text, logprobs=logprobs)
            yield self.context.framing.event(self._chunk(choice))

    def _last_echo(self, echo: Echo) -> int:
        """Returns the place in the prompt from which the first output's chunk echoes it."""
        if not self.has_logprobs or not echo.token_ids:
            return 0
        return (len(echo.token_ids) - 1) // ECHO_TOKENS * ECHO_TOKENS

    def _plain_texts(self, index: int, texts: Sequence[str]) -> bytes:
        if not self.has_running_usage:
            return self._text_event(index).of(texts)
        if not texts:
            return b""
        choice = CompletionChoice(index=index, text="".join(texts))
        return self.context.framing.event(self._chunk(choice))

    def _ending(self, usage: Usage) -> bytes:
        chunk = msgspec.structs.replace(self._chunk(), usage=to_usage(usage))
        return ending(self.context, chunk if self.has_usage else None, self._empty_chunk())

    def _empty_chunk(self) -> CompletionChunk:
        return self._chunk(CompletionChoice(index=0, text=""))

    def _best(self, results: list[ChoiceResult]) -> list[ChoiceResult]:
        shown: list[ChoiceResult] = []
        num_sampled = self.context.merger.num_choices
        for start in range(0, len(results), num_sampled):
            sampled = results[start : start + num_sampled]
            if self.num_shown < num_sampled:
                sampled.sort(key=lambda each: mean_logprob(each.tokens), reverse=True)
            shown += sampled[: self.num_shown]
        return shown

    def _choice_parts(self, result: ChoiceResult, index: int) -> Iterable[bytes]:
        echo = self._output_of(result.index).echo
        text = result.text if echo is None else echo.text + result.text
        choice = CompletionChoice(index=index, text=text, finish_reason=result.finish_reason)
        encoded = _encode(choice)
        if not self.has_logprobs:
            return (encoded,)
        tokens = partial(self._listed, result.index, result.tokens, has_echo=echo is not None)
        logprobs = completion_logprobs_parts(tokens, self.context.token_bytes)
        return with_value(encoded, b"logprobs", logprobs)

    def _choice(
        self, index: int, text: str, tokens: Sequence[ScoredToken], finish_reason: str | None
    ) -> CompletionChoice:
        """Returns a choice, with the rest of the prompt if it is echoed and this is the choice's
        first output.
        """
        output = self._output_of(index)
        is_echo_due, first = self._is_echo_due(index), 0
        if output.echo is not None and is_echo_due:
            self._echoed.add(index)
            first = self._last_echo(output.echo)
            text = output.echo.text[output.echo.offsets[first] if first else 0 :] + text
        logprobs = None
        if self.has_logprobs:
            if is_echo_due:
                _check_echo(output)
            listed = list(self._listed(index, tokens, has_echo=is_echo_due, first=first))
            logprobs = completion_logprobs(listed, self.context.token_bytes)
        return CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=finish_reason
        )

    def _listed(
        self, index: int, tokens: Sequence[ScoredToken], *, has_echo: bool, first: int = 0
    ) -> Iterator[ListedToken]:
        """Lists a choice's tokens. `first`: the place in the prompt from which it is echoed."""
        output = self._output_of(index)
        first_offset = 0 if output.echo is None else len(output.echo.text)
        if output.echo is not None and has_echo:
            yield from prompt_tokens(output.echo, output.prompt_logprobs, first)
        yield from output_tokens(tokens, first_offset=first_offset)

    def _is_echo_due(self, index: int) -> bool:
        return self._output_of(index).echo is not None and index not in self._echoed

    def _output_of(self, index: int) -> RequestOutput:
        return self.context.merger.outputs[index // self.context.merger.num_choices]

    def _text_event(self, index: int) -> TextEvent:
        known = self._text_events.get(index)
        if known is None:
            known = TextEvent(
                self.context.framing,
                lambda text: self._chunk(CompletionChoice(index=index, text=text)),
            )
            self._text_events[index] = known
        return known

    def _chunk(self, *choices: CompletionChoice) -> CompletionChunk:
        return CompletionChunk(
            id=self._id,
            object="text_completion",
            created=self.context.created,
            model=self.context.model,
            choices=choices,
            usage=usage_so_far(
                self.context, is_asked=self.has_usage, is_running=self.has_running_usage
            ),
        )

    @property
    def _id(self) -> str:
        return f"cmpl-{self.context.request_id}"


def _check_echo(output: RequestOutput) -> None:
    if output.echo is not None:
        check_prompt_logprobs(output.echo, output.prompt_logprobs)
