"""Halves of characters in JSON become U+FFFD; all else stays as it is."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.lone_surrogates import MAX_ESCAPES, without_lone_surrogates

# `\` before a half may be an escaped backslash; "ud83d" then only looks like an escape.
TEXTS = st.lists(st.sampled_from(["\ud83d", "\ude00", "😀", "\\", "ud83d", '"', "é", "dc00"]))


@given(TEXTS.map("".join))
def test_what_a_strict_decoder_reads(text: str) -> None:
    replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for is_ascii in (True, False):
        if not is_ascii and replaced != text:
            continue  # no UTF-8 has them
        data = json.dumps({text: [text]}, ensure_ascii=is_ascii).encode()
        for written in (data, data.replace(b"\\ud", b"\\uD") if b"\\\\" not in data else data):
            read = without_lone_surrogates(written)
            assert msgspec.json.decode(read) == {replaced: [replaced]}
            assert read is written or b"\\ufffd" in read


@pytest.mark.parametrize(
    "data", [b"", b"\xff", rb'"\ud8"', rb'"\\ud83d"', rb'"\ud83d' + b"\\\\" * 40 + rb'\ud83d"']
)
def test_other_bytes_stay(data: bytes) -> None:
    read = without_lone_surrogates(data)
    assert len(read) == len(data) and read.endswith(data[-4:])


def test_work_is_bounded() -> None:
    most = rb"\ud83d" * MAX_ESCAPES
    assert without_lone_surrogates(most) == rb"\ufffd" * MAX_ESCAPES
    assert without_lone_surrogates(most + rb"\uD83D") == most + rb"\uD83D"
