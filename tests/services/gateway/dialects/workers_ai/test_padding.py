from __future__ import annotations

import json
import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.dialects.workers_ai.padding import DRAWN_BYTES, WIDTH, PaddedTextEvent
from services.gateway.output.framing import LINES, SSE, Framing


def frames_of(events: PaddedTextEvent, texts: list[str], framing: Framing = SSE) -> list[bytes]:
    encoded = events.of(texts)
    assert encoded.endswith(framing.after)
    frames = encoded.removesuffix(framing.after).split(framing.after)
    return [each.removeprefix(framing.before) for each in frames]


@given(st.lists(st.text(), min_size=1))
@pytest.mark.parametrize("framing", [SSE, LINES])
def test_events_hold_the_texts(framing: Framing, texts: list[str]) -> None:
    texts = ["1", '"\n\n\x00', "\ufdd0text\ufdd1", "\ufdd0padding\ufdd1", *texts]
    events = PaddedTextEvent(framing, os.urandom)
    frames = [json.loads(each) for each in frames_of(events, texts, framing)]
    assert [list(each) for each in frames] == [["response", "p"]] * len(texts)
    assert [each["response"] for each in frames] == texts


def test_no_text_is_no_event() -> None:
    assert PaddedTextEvent(SSE, bytes).of([]) == b""


def test_sizes_do_not_depend_on_the_length_of_a_token() -> None:
    """For each random byte, all texts of up to WIDTH encoded bytes have one size."""
    sizes_of: dict[str, Counter[int]] = {}
    for text in ("", "a", " the", "😀", "\n", "x" * (WIDTH - 2)):
        events = PaddedTextEvent(SSE, lambda num_bytes: bytes(range(256)) * (num_bytes // 256))
        sizes_of[text] = Counter(map(len, frames_of(events, [text] * 256)))
    (sizes,) = {frozenset(each.items()) for each in sizes_of.values()}
    assert len(sizes) == WIDTH and {count for _, count in sizes} == {256 // WIDTH}


def test_every_random_byte_is_used_once() -> None:
    drawn: list[int] = []

    def random_bytes(num_bytes: int) -> bytes:
        drawn.append(num_bytes)
        return bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)

    events = PaddedTextEvent(SSE, random_bytes)
    sizes = [len(events.of([""])) for _ in range(DRAWN_BYTES)]
    assert drawn == [DRAWN_BYTES]
    assert Counter(Counter(sizes).values()) == {DRAWN_BYTES // WIDTH: WIDTH}
    events.of([""] * (DRAWN_BYTES + 1))  # more than are drawn at once
    events.of([""])
    assert drawn == [DRAWN_BYTES, DRAWN_BYTES + 1, DRAWN_BYTES]
