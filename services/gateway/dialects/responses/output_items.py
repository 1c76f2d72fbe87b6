"""Converts the output of a request to items, and to the events of a stream, without I/O.

item: added ──▶ (delta)* ──▶ done          one item is open at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from services.gateway.dialects.openai.logprobs import ContentLogprob
from services.gateway.dialects.openai.tool_calls import input_of
from services.gateway.dialects.responses import items
from services.gateway.dialects.responses.ids import item_id
from services.gateway.dialects.responses.items import Item, ItemStatus, StreamEvent
from services.gateway.output.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from services.gateway.text.scored_tokens import ScoredToken

Score = Callable[[Sequence[ScoredToken]], list[ContentLogprob]]


class OutputItems:
    """`namespaces`: the namespace and name of tools, by the name that the model sees. `score`:
    converts tokens to logprobs. `seal`: encrypts the text of reasoning; None: it is not encrypted.
    """

    def __init__(
        self,
        response_id: str,
        *,
        namespaces: Mapping[str, tuple[str, str]],
        score: Score,
        seal: Callable[[str], str | None] | None,
    ) -> None:
        self.done: list[Item] = []
        self.numbers = count()  # the sequence numbers of the stream
        self._response_id = response_id
        self._namespaces = namespaces
        self._score = score
        self._seal = seal
        self._open: Item | None = None
        self._texts: list[str] = []  # the texts of the open item
        self._logprobs: list[ContentLogprob] = []

    @property
    def open_message(self) -> str | None:
        """The id of the message that has not ended."""
        return self._open.id if isinstance(self._open, items.ResponsesMessage) else None

    @property
    def output_index(self) -> int:
        """The index of the open item, or of the next one."""
        return len(self.done)

    def add(self, event: Event) -> Iterator[StreamEvent]:
        """Adds an event of the output. A text is added without its delta: see `add_text`."""
        match event:
            case ReasoningDelta():
                yield from self._reasoning("".join(event.texts))
            case ToolCallStart():
                yield from self._start_call(event)
            case ToolArgumentsDelta():
                yield from self._arguments(event.text)
            case ToolCallEnd():
                yield from self._close("completed")
            case Finished():
                yield from self._finish(event)
            case TextDelta():
                yield from self.start_message()
                self.add_text(event.texts, event.tokens)

    def start_message(self) -> Iterator[StreamEvent]:
        """Returns no events if a message is open."""
        if self.open_message is not None:
            return
        yield from self._close("completed")
        made = items.ResponsesMessage(id=self._new_id("msg"), status="in_progress", content=())
        yield self._added(made)
        yield items.PartAdded(**self._place(made), part=items.OutputText())

    def add_text(self, texts: Sequence[str], tokens: Sequence[ScoredToken]) -> list[ContentLogprob]:
        """Adds to the open message. Returns the logprobs of the tokens."""
        self._texts += texts
        scored = self._score(tokens) if tokens else []
        self._logprobs += scored
        return scored

    def _reasoning(self, text: str) -> Iterator[StreamEvent]:
        if not isinstance(self._open, items.ReasoningItem):
            yield from self._close("completed")
            yield self._added(items.ReasoningItem(id=self._new_id("rs"), status="in_progress"))
        assert self._open is not None, "it was opened"
        self._texts.append(text)
        yield items.ResponsesReasoningDelta(**self._place(self._open), delta=text)

    def _start_call(self, event: ToolCallStart) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        namespace, name = self._namespaces.get(event.name, (msgspec.UNSET, event.name))
        if event.is_custom:
            yield self._added(
                items.ResponsesCustomCall(
                    id=self._new_id("ctc"),
                    call_id=event.id,
                    name=name,
                    input="",
                    status="in_progress",
                    namespace=namespace,
                )
            )
        else:
            yield self._added(
                items.ResponsesFunctionCall(
                    id=self._new_id("fc"),
                    call_id=event.id,
                    name=name,
                    arguments="",
                    status="in_progress",
                    namespace=namespace,
                )
            )

    def _arguments(self, text: str) -> Iterator[StreamEvent]:
        """Returns the deltas of arguments. The input of a custom tool is sent at the end, since it
        is decoded from all arguments.
        """
        self._texts.append(text)
        if isinstance(self._open, items.ResponsesFunctionCall):
            yield items.ArgumentsDelta(**self._place(self._open), delta=text)

    def _finish(self, event: Finished) -> Iterator[StreamEvent]:
        """Ends the output. One without an item gets an empty message."""
        is_cut = event.reason == "length"
        if self._open is None and not self.done:
            yield from self.start_message()
        yield from self._close("incomplete" if is_cut else "completed")

    def _close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """Returns no events if no item is open."""
        opened, text = self._open, "".join(self._texts)
        if opened is None:
            return
        place, logprobs = self._place(opened), self._logprobs
        match opened:
            case items.ResponsesMessage():
                part = items.OutputText(text=text, logprobs=logprobs)
                yield items.TextDone(**place, text=text, logprobs=logprobs)
                yield items.PartDone(**self._place(opened), part=part)
                changes: dict[str, Any] = {"content": (part,)}
            case items.ReasoningItem():
                yield items.ReasoningDone(**place, text=text)
                sealed = None if self._seal is None else self._seal(text)
                content = (items.ReasoningText(text=text),)
                changes = {"content": content, "encrypted_content": sealed}
            case items.ResponsesFunctionCall():
                yield items.ArgumentsDone(**place, name=opened.name, arguments=text)
                changes = {"arguments": text}
            case items.ResponsesCustomCall():
                given = input_of(text)
                yield items.InputDelta(**place, delta=given)
                yield items.InputDone(**self._place(opened), input=given)
                changes = {"input": given}
        closed = msgspec.structs.replace(opened, status=status, **changes)
        index = self.output_index
        self.done.append(closed)
        self._open, self._texts, self._logprobs = None, [], []
        yield items.ItemDone(sequence_number=next(self.numbers), output_index=index, item=closed)

    def _added(self, item: Item) -> StreamEvent:
        self._open = item
        return items.ItemAdded(
            sequence_number=next(self.numbers), output_index=self.output_index, item=item
        )

    def _place(self, item: Item) -> dict[str, Any]:
        """Returns the fields that place an event of the open item."""
        return {
            "sequence_number": next(self.numbers),
            "item_id": item.id,
            "output_index": self.output_index,
        }

    def _new_id(self, prefix: str) -> str:
        return item_id(prefix, self._response_id, self.output_index)
