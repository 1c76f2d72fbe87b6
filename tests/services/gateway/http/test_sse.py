from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http import sse
from services.gateway.openai.chat import ChatCompletionChunk, ChunkChoice, Delta


def chunk(model: str, text: str) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id="chatcmpl-1",
        object="chat.completion.chunk",
        created=1,
        model=model,
        choices=(ChunkChoice(index=3, delta=Delta(content=text)),),
    )


@given(st.text(), st.lists(st.text()))
def test_text_event_equals_the_encoded_chunk(model: str, texts: list[str]) -> None:
    event = sse.TextEvent(lambda text: chunk(model, text))
    texts = ["", '"\n\n\x00', "\ufdd0text\ufdd1", *texts]
    events = [sse.event(chunk(model, text)) for text in texts]
    assert [event.of([text]) for text in texts] == events
    assert event.of(texts) == b"".join(events)


def test_fields_before_the_text_may_contain_the_mark() -> None:
    model = "\ufdd0text\ufdd1"
    encoded = sse.TextEvent(lambda text: chunk(model, text)).of(["x"])
    body = msgspec.json.decode(encoded.removeprefix(b"data: "), type=ChatCompletionChunk)
    assert (body.model, body.choices[0].delta.content) == (model, "x")
