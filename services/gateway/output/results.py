"""The events of a response that is not streamed, collected by choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.output.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from services.gateway.text.scored_tokens import ScoredTokens


@dataclass(slots=True)
class ToolCallResult:
    id: str
    name: str
    arguments: str = ""  # JSON
    is_custom: bool = False


@dataclass(slots=True)
class ChoiceResult:
    index: int
    texts: list[str] = field(default_factory=list)
    reasoning_texts: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallResult] = field(default_factory=list)
    tokens: ScoredTokens = field(default_factory=ScoredTokens)
    finish_reason: str = ""
    stop_sequence: str | None = None  # the stop string that ended it

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_texts)


class Results:
    """The choices and usage of one response. `usage` is zero until its event, the last one, has
    been added.
    """

    def __init__(self) -> None:
        self._by_index: dict[int, ChoiceResult] = {}
        self.usage = Usage(0, None, 0)

    @property
    def choices(self) -> list[ChoiceResult]:
        """The choices sorted by index."""
        return [self._by_index[index] for index in sorted(self._by_index)]

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                choice = self._choice(event.choice_index)
                choice.texts += event.texts
                choice.tokens.extend(event.tokens)
            case ReasoningDelta():
                self._choice(event.choice_index).reasoning_texts += event.texts
            case ToolCallStart():
                call = ToolCallResult(event.id, event.name, is_custom=event.is_custom)
                self._choice(event.choice_index).tool_calls.append(call)
            case ToolArgumentsDelta():
                self._choice(event.choice_index).tool_calls[event.index].arguments += event.text
            case ToolCallEnd():
                pass
            case Finished():
                choice = self._choice(event.choice_index)
                choice.finish_reason, choice.stop_sequence = event.reason, event.stop_sequence
            case Usage():
                self.usage = event

    def _choice(self, index: int) -> ChoiceResult:
        return self._by_index.setdefault(index, ChoiceResult(index))
