"""Calls and reasoning in the output of every family, split anywhere and malformed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.output.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from services.gateway.structured.tools.families import FAMILIES, with_thinking
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens, marker_tokens
from services.gateway.structured.tools.parsing.response_parser import ResponseParser
from services.gateway.structured.tools.parsing.response_template import compiled_template
from tests.services.gateway.structured.tools.wire_formats import (
    CALLS_ONLY_FAMILIES,
    THINKING_FAMILIES,
    Call,
    Message,
    wire_text,
)

NAMES = ("get_weather", "clock")
NAMES_OF_FAMILIES = sorted(set(FAMILIES) - {"plain"})
# Text between "<" and ">", or in brackets, is a candidate for an added token.
MARKER = regex.compile(r"<[|｜/]?[\w▁|｜/\"]+[|｜]?>|\[[A-Z_]+\]")  # noqa: RUF001
SCHEMA = {"properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}, "o": {}}}


def family_of(name: str) -> Family:
    family = FAMILIES[name]
    if name in THINKING_FAMILIES and not family.think_open:
        return with_thinking(family, "<think>", "</think>")
    return family


def markers_of(family: Family) -> MarkerTokens:
    """All markers of the family as tokens."""
    text = json.dumps(family.response_template, ensure_ascii=False)
    found = sorted({*MARKER.findall(text.replace("\\", "")), '<|"|>'})
    return marker_tokens(family.response_template, {each: i for i, each in enumerate(found)})


class Parsed:
    """What a client puts together from the events."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.content = "".join(e.text for e in events if isinstance(e, TextDelta))
        self.thinking = "".join("".join(e.texts) for e in events if isinstance(e, ReasoningDelta))
        self.names: list[str] = []
        self.arguments: list[str] = []
        self.ended: list[int] = []
        for event in events:
            match event:
                case ToolCallStart():
                    assert event.index == len(self.names)
                    self.names.append(event.name)
                    self.arguments.append("")
                case ToolArgumentsDelta():
                    assert event.index == len(self.names) - 1
                    self.arguments[-1] += event.text
                case ToolCallEnd():
                    assert event.index == len(self.names) - 1
                    self.ended.append(event.index)

    @property
    def message(self) -> Message:
        pairs = zip(self.names, self.arguments, strict=True)
        calls = [Call(name, json.loads(text)) for name, text in pairs]
        return Message(self.content, calls, self.thinking)


def parse(
    family: Family,
    pieces: Sequence[str],
    markers: MarkerTokens | None = None,
    *,
    is_constrained: bool = False,
) -> Parsed:
    known = MarkerTokens() if markers is None else markers
    parser = ResponseParser(
        compiled_template(family.response_template, known),
        known,
        0,
        schemas=dict.fromkeys(NAMES, SCHEMA),
        call_id_of=lambda index, name: f"{name}-{index}",
        is_constrained=is_constrained,
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    return Parsed(events + parser.finish())


TEXT = st.sampled_from(
    ["", "a", 'quo"te', "{x}", "{test1,test2", "é😀", "it's", "a\\b", "x: y", "[1", "line\nline"]
)
VALUES = TEXT | st.integers(-9, 99) | st.booleans() | st.lists(st.integers(0, 9), max_size=2)
IMITATIONS = st.sampled_from(["</tool_call>", "<|call|>", "<tool_call>{", "[TOOL_CALLS]"])


@st.composite
def messages(draw: st.DrawFn, family: str, *, imitates: bool) -> Message:
    texts = TEXT | IMITATIONS if imitates else TEXT
    values = VALUES | IMITATIONS if imitates else VALUES
    typed = {"n": st.integers(0, 9), "b": st.booleans()}
    strings = (
        texts if family in ("qwen_xml", "glm") else values
    )  # whose other values have declared types
    arguments = st.fixed_dictionaries({}, optional={**typed, "s": strings})
    calls = draw(st.lists(st.builds(Call, st.sampled_from(NAMES), arguments), max_size=5))
    content = draw(texts).strip()
    if family in CALLS_ONLY_FAMILIES and (calls or content[:1] in "{["):
        content = ""
    thinking = draw(texts).strip() if family in THINKING_FAMILIES else ""
    return Message(content, calls, thinking)


@pytest.mark.parametrize("name", NAMES_OF_FAMILIES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_split_anywhere_the_message_is_whole(name: str, data: st.DataObject) -> None:
    family = family_of(name)
    message = data.draw(messages(name, imitates=False))
    text = wire_text(name, message)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for each in (pieces, list(text), [text]):
        assert parse(family, each).message == message


@pytest.mark.parametrize("name", NAMES_OF_FAMILIES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_constrained_answer_is_not_searched(name: str, data: st.DataObject) -> None:
    """Reasoning comes before it, or a call in its place; nothing in it is either."""
    family = family_of(name)
    message = data.draw(messages(name, imitates=False))
    thought = Message("", [], message.thinking)
    thinking = wire_text(name, thought).rstrip("\n") if message.thinking else ""
    start = "<|start|>assistant<|channel|>final<|message|>" if name == "harmony" else ""
    answer = f'"{wire_text(name, message)}" '
    for pieces in (list(thinking + start + answer), [thinking + start + answer]):
        found = parse(family, pieces, is_constrained=True)
        assert (found.content, found.thinking) == (answer, message.thinking)
    if message.calls and name != "harmony":
        called = thinking + wire_text(name, Message("", message.calls)).lstrip()
        found = parse(family, list(called), is_constrained=True)
        assert found.message == Message("", message.calls, message.thinking)


@pytest.mark.parametrize("name", NAMES_OF_FAMILIES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_text_cannot_imitate_a_marker_that_is_a_token(name: str, data: st.DataObject) -> None:
    if name == "pythonic":
        return  # has no markers
    family = family_of(name)
    markers = markers_of(family)
    message = data.draw(messages(name, imitates=True))
    assert parse(family, marked(wire_text(name, guarded(message)), markers), markers).message == (
        message
    )


GUARD = "\u2060"  # keeps an imitation apart from a marker until it is tokenized


def guarded(message: Message) -> Message:
    def guard(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("<", "<" + GUARD).replace("[T", "[" + GUARD + "T")
        return value

    calls = [Call(n, {k: guard(v) for k, v in a.items()}) for n, a in message.calls]
    return Message(guard(message.content), calls, guard(message.thinking))


def marked(text: str, markers: MarkerTokens) -> list[str]:
    """The pieces that a detokenizer gives: markers as tokens, other text by character."""
    return list(markers.replaced(text).replace(GUARD, ""))


@pytest.mark.parametrize("name", NAMES_OF_FAMILIES)
def test_nothing_is_lost_of_a_malformed_output(name: str) -> None:
    family = family_of(name)
    calls = [Call("clock", {"n": 1, "s": "ab"}), Call("get_weather", {})]
    content = "" if name in CALLS_ONLY_FAMILIES else "hi"
    text = wire_text(name, Message(content, calls))
    for cut in range(len(text)):
        for broken in (text[:cut], text[:cut] + "@" + text[cut:], text[:cut] + text):
            whole = parse(family, [broken])
            if cut % 16 == 0:
                assert vars(parse(family, list(broken))) == vars(whole)
            if not whole.names and name != "harmony":  # whose content has markers, too
                assert bare(whole.content) == bare(broken)
            for index in whole.ended:
                assert isinstance(json.loads(whole.arguments[index]), dict)


def test_part_of_a_closing_at_the_end_is_no_content() -> None:
    """An answer is cut after any token, and the closing may have several."""
    text = wire_text("hermes", Message("", [Call("clock", {"n": 1})]))
    for cut in range(text.index("}}") + 2, len(text) + 1):
        for pieces in ([text[:cut]], list(text[:cut])):
            found = parse(family_of("hermes"), pieces)
            assert (found.content, found.ended) == ("", [0]), text[:cut]


def bare(text: str) -> str:
    """Spaces beside markers are not shown, nor is the end of a section of calls."""
    for end in ("<|tool_calls_section_end|>", "<｜tool▁calls▁end｜>"):  # noqa: RUF001
        text = text.replace(end, "")
    return "".join(text.split())


@pytest.mark.parametrize("name", NAMES_OF_FAMILIES)
def test_a_tool_that_is_not_offered_is_content(name: str) -> None:
    text = wire_text(name, Message("", [Call("unknown", {"n": 1})]))
    parsed = parse(family_of(name), list(text))
    assert not parsed.names
    assert bare(parsed.content) == bare(text)


def test_arguments_stream_after_the_name() -> None:
    family = family_of("hermes")
    text = wire_text("hermes", Message("", [Call("clock", {"s": "a" * 50})]))
    markers = MarkerTokens()
    parser = ResponseParser(
        compiled_template(family.response_template, markers),
        markers,
        0,
        schemas={"clock": {}},
        call_id_of=lambda index, name: "id",
    )
    events = parser.feed(text[: text.index("aaaa") + 4])
    assert isinstance(events[0], ToolCallStart)
    assert "".join(e.text for e in events if isinstance(e, ToolArgumentsDelta)) == '{"s": "aaaa'
