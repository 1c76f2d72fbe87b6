"""Splits the text of one choice into content, reasoning and calls while it arrives. Pure.

                ┌──── close ◀── thinking ◀── open ──┐
outside (content) ◀── close ◀── content  ◀── open ──┤ outside
                └──── close ◀── a call   ◀── open ──┘

A text may be split anywhere: a possible part of a delimiter is held back. A call that cannot be
parsed, or of a tool that is not offered, becomes content as written. If its arguments have already
begun, the call ends if they are complete, else it has no end; the remaining text becomes content.

Under a constraint, delimiters are recognised only before the answer, where the grammar has them.
From its first text on, the answer is literal content: a delimiter in it is a part of a string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from services.gateway.output.events import (
    Event,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from services.gateway.structured.tools.parsing.call_bodies import ArgumentsBody, CallsBody, body_of
from services.gateway.structured.tools.parsing.delimiter import Delimiter
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_template import (
    Kind,
    ResponseTemplate,
    TemplateRegion,
)
from services.gateway.structured.tools.parsing.shown_text import ShownText
from services.gateway.structured.tools.parsing.whole_bodies import MAX_BODY_CHARS, whole_calls

CallIdOf = Callable[[int, str], str]  # call's index, name → id


class ResponseParser:
    """The parser of one choice. `schemas` are those of the offered tools' arguments, by name.
    `custom` are the names of tools whose input is text. `is_thinking` means that the prompt ends
    inside reasoning. `num_calls` counts complete calls. `is_constrained` means that a grammar
    applies to the answer, which is then no call; reasoning may open before it only if
    `opens_reasoning`.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        markers: MarkerTokens,
        choice_index: int,
        *,
        schemas: Mapping[str, Mapping[str, Any]],
        call_id_of: CallIdOf,
        custom: Set[str] = frozenset(),
        is_thinking: bool = False,
        is_constrained: bool = False,
        opens_reasoning: bool = True,
    ) -> None:
        self.num_calls = 0
        self._choice = choice_index
        self._schemas = schemas
        self._custom = custom
        self._call_id_of = call_id_of
        self._openings = [
            each
            for each in template.regions
            if each.open is not None and (opens_reasoning or each.kind != "thinking")
        ]
        self._region = template.first("thinking") if is_thinking else None
        self._events: list[Event] = []
        self._buffer = ""
        self._is_at_start = True
        self._call_index = -1
        self._body: ArgumentsBody | CallsBody | None = None
        self._raw = ""  # text of a call, while it can become content
        self._captures: dict[str, str] = {}
        self._is_closing = False
        self._is_call_open = False
        self._num_searched = 0  # characters of the buffer in which no closing starts
        self._text = ShownText(choice_index, markers, skips_spaces=is_thinking)
        self._is_ended = False
        self._is_constrained = is_constrained
        self._awaits_answer = is_constrained
        self._is_literal = False  # the constrained answer has begun

    @property
    def is_reasoning(self) -> bool:
        return self._region is not None and self._region.kind == "thinking"

    @property
    def is_in_content(self) -> bool:
        """Whether text is, or may be, shown as content."""
        return self._region is None or self._region.kind == "content"

    @property
    def holds_text(self) -> bool:
        """Whether text is held back until more follows."""
        return bool(self._buffer) or self._text.holds_spaces

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """Parses the end of the text, and returns all that was held back."""
        self._is_ended = True
        while self._step():
            pass
        if self._region is None or self._region.kind != "calls":
            self._add(self._text.rest("content" if self._region is None else self._region.kind))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Each step returns whether another one can do more.

    def _step(self) -> bool:
        if self._is_literal:
            self._add(self._text.literal(self._advance(len(self._buffer))))
            return False
        if self._region is None:
            return self._step_before_answer() if self._awaits_answer else self._step_outside()
        if self._is_closing:
            return self._step_closing()
        if self._region.kind != "calls":
            return self._step_text(self._region)
        return self._step_streamed() if self._body is not None else self._step_whole(self._region)

    def _step_outside(self) -> bool:
        if not self._buffer:
            return False
        best, held = self._find(self._openings)
        if best is None:
            if held > 0:
                self._is_at_start = False
            self._show("content", self._advance(held))
            return False
        region, found = best
        before = self._advance(found.start())
        self._show("content", before)
        self._open(region, found)
        return True

    def _step_before_answer(self) -> bool:
        """Opens a region, or begins the constrained answer."""
        if not self._buffer:
            return False
        found = [(each, *self._match(each.open)) for each in self._openings]
        if any(is_pending for _, _, is_pending in found):
            return False
        opened = [(region, match) for region, match, _ in found if match is not None]
        if not opened:
            self._is_literal = True
            return True
        region, match = max(opened, key=lambda each: each[1].end())
        self._awaits_answer = region.kind == "thinking"
        self._is_literal = region.kind == "content"
        self._open(region, match)
        return True

    def _match(self, delimiter: Delimiter | None) -> tuple[Any, bool]:
        assert delimiter is not None
        return delimiter.match(self._buffer, is_ended=self._is_ended)

    def _find(self, regions: list[TemplateRegion]) -> tuple[tuple[TemplateRegion, Any] | None, int]:
        """Returns the first opening, or None and the number of characters before what may become
        one.
        """
        best: tuple[TemplateRegion, Any] | None = None
        held = len(self._buffer)
        for region in regions:
            assert region.open is not None
            if region.open.is_at_start and not self._is_at_start:
                continue
            found, is_pending = self._search(region.open)
            if found is None:
                continue
            if is_pending:
                held = min(held, found.start())
            elif best is None or (found.start(), -found.end()) < (
                best[1].start(),
                -best[1].end(),
            ):
                best = region, found
        if best is not None and best[1].start() >= held:
            best = None
        return best, held

    def _search(self, delimiter: Delimiter, start: int = 0) -> tuple[Any, bool]:
        return delimiter.search(self._buffer, start, is_ended=self._is_ended)

    def _open(self, region: TemplateRegion, found: Any) -> None:
        spaces = self._text.open(region)
        self._region, self._raw = region, spaces + self._advance(len(found[0]))
        self._is_closing = self._is_call_open = False
        self._num_searched = 0
        self._captures = {k: v for k, v in found.groupdict().items() if v is not None}
        if region.kind != "calls":
            return
        name = self._captures.get(region.name[0])
        if name is not None and name not in self._schemas:
            self._fail()
        elif region.is_streamed:
            self._body = body_of(region, name, self, self._schemas.__contains__)

    def _step_text(self, region: TemplateRegion) -> bool:
        if region.close is None:
            self._show(region.kind, self._advance(len(self._buffer)))
            return False
        found, is_pending = self._search(region.close)
        if found is not None and not is_pending:
            self._show(region.kind, self._advance(found.start()))
            self._advance(len(found[0]))
            self._leave()
            self._is_at_start = region.kind == "thinking"
            return True
        end = len(self._buffer) if found is None else found.start()
        self._show(region.kind, self._advance(end))
        return False

    def _step_streamed(self) -> bool:
        body = self._body
        assert body is not None
        end = body.feed(self._buffer, 0)
        taken = self._advance(end)
        if not self._is_call_open:
            self._raw += taken
        if self._is_ended and isinstance(body, CallsBody):
            body.finish()
        if body.is_complete:
            self._body, self._is_closing = None, True
            return True
        if isinstance(body, CallsBody) and body.has_ended_call:
            self._raw = ""
            if self._buffer:
                return True
        if body.is_bad or self._is_ended:
            if isinstance(body, CallsBody) and self._is_call_open and body.has_whole_arguments:
                self.end()
                self._body, self._is_closing = None, True
            else:
                self._fail()
            return True
        return False

    def _step_closing(self) -> bool:
        region = self._region
        assert region is not None
        if region.close is None:
            self._leave()
            return True
        stripped = self._buffer.lstrip()
        if not stripped and not self._is_ended:
            return False
        found, is_pending = region.close.match(stripped, is_ended=False)
        if is_pending and not self._is_ended:
            return False
        if found is not None:  # at the end of the text also the first part of a closing
            self._buffer = stripped[found.end() :]
        self._leave()
        return True

    def _step_whole(self, region: TemplateRegion) -> bool:
        """Parses a body once it is complete. Returns whether another step is possible."""
        found, is_pending = None, False
        if region.close is not None:
            found, is_pending = self._search(region.close, self._num_searched)
            self._num_searched = len(self._buffer) if found is None else found.start()
        is_closed = found is not None and not is_pending
        if is_closed or self._is_ended:
            body = self._buffer[: found.start()] if found is not None else self._buffer
            close = found[0] if found is not None else ""
            if found is None and region.close is not None and region.content != "python-calls":
                self._fail(len(self._buffer))
            elif self._read_whole(region, body):
                self._advance(len(body) + len(close))
                self._leave()
            else:
                self._fail(len(body) + len(close))
            return True
        if len(self._buffer) > MAX_BODY_CHARS:
            self._fail(len(self._buffer))
            return True
        return False

    def _read_whole(self, region: TemplateRegion, body: str) -> bool:
        try:
            calls = whole_calls(region, body, self._captures, self._schemas)
        except ValueError:
            return False
        for name, arguments in calls:
            self.start(name)
            self.arguments(arguments)
            self.end()
        return bool(calls)

    def _fail(self, num_chars: int = 0) -> None:
        """Turns the current call and `num_chars` of the buffer into content."""
        raw = self._raw + self._advance(num_chars)
        self._leave()
        self._text.skips_spaces = False
        if self._is_constrained:
            self._is_literal = True
            self._add(self._text.literal(raw))
        else:
            self._show("content", raw)

    def _leave(self) -> None:
        self._text.leave()
        self._region, self._body, self._raw = None, None, ""
        self._is_closing = self._is_call_open = False
        self._is_at_start = False

    def _advance(self, num_chars: int) -> str:
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return taken

    def _show(self, kind: Kind, text: str) -> None:
        self._add(self._text.of(kind, text))

    def _add(self, event: Event | None) -> None:
        if event is not None:
            self._events.append(event)

    # ── CallReceiver ─────────────────────────────────────────────────────────────────────────────

    def start(self, name: str) -> None:
        self._call_index += 1
        self._is_call_open = True
        self._raw = ""
        call_id = self._call_id_of(self._call_index, name)
        is_custom = name in self._custom
        self._events.append(ToolCallStart(self._choice, self._call_index, call_id, name, is_custom))

    def arguments(self, text: str) -> None:
        self._events.append(ToolArgumentsDelta(self._choice, self._call_index, text))

    def end(self) -> None:
        self._is_call_open = False
        self.num_calls += 1
        self._events.append(ToolCallEnd(self._choice, self._call_index))
