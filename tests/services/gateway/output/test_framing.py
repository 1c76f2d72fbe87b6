from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.dialects.openai.chat import ChatCompletionChunk, ChunkChoice, Delta
from services.gateway.output.framing import LINES, SSE, Framing, TextEvent


def chunk(model: str, text: str) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id="chatcmpl-1",
        object="chat.completion.chunk",
        created=1,
        model=model,
        choices=(ChunkChoice(index=3, delta=Delta(content=text)),),
    )


@pytest.mark.parametrize("framing", [SSE, LINES])
@given(model=st.text(), texts=st.lists(st.text()))
def test_text_event_equals_the_encoded_chunk(
    framing: Framing, model: str, texts: list[str]
) -> None:
    event = TextEvent(framing, lambda text: chunk(model, text))
    texts = ["", '"\n\n\x00', "\ufdd0text\ufdd1", "\x85\u2028", *texts]
    events = [framing.event(chunk(model, text)) for text in texts]
    assert [event.of([text]) for text in texts] == events
    assert event.of(texts) == b"".join(events)


def test_fields_before_the_text_may_contain_the_mark() -> None:
    model = "\ufdd0text\ufdd1"
    encoded = TextEvent(SSE, lambda text: chunk(model, text)).of(["x"])
    body = msgspec.json.decode(encoded.removeprefix(b"data: "), type=ChatCompletionChunk)
    assert (body.model, body.choices[0].delta.content) == (model, "x")


@pytest.mark.parametrize("framing", [SSE, LINES])
@given(text=st.text(alphabet="a\x0b\x0c\x1c\x85\u2028\u2029é"))
def test_no_text_ends_a_line(framing: Framing, text: str) -> None:
    """Also not for clients whose lines end wherever Unicode's do."""
    event = TextEvent(framing, lambda text: chunk("model", text)).of([text])
    (line,) = filter(None, event.decode().splitlines())
    body = msgspec.json.decode(line.removeprefix("data: "), type=ChatCompletionChunk)
    assert body.choices[0].delta.content == text


def test_named_events_have_a_line_with_their_name_over_http() -> None:
    named = SSE.named("ping")
    assert named.event({"a": 1}) == b'event: ping\ndata: {"a":1}\n\n'
    assert named.done == b""
    assert TextEvent(named, lambda text: {"t": text}).of(["x", "y"]) == (
        b'event: ping\ndata: {"t":"x"}\n\nevent: ping\ndata: {"t":"y"}\n\n'
    )
    assert LINES.named("ping").event({}) == b"{}\n"
