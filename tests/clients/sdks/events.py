"""The events of a stream as an outside client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

DONE = "[DONE]"


def data_of(lines: Iterable[str]) -> list[str]:
    """Returns the data of every server-sent event; the last one must be [DONE]."""
    lines = [each for each in lines if each and not each.startswith(":")]
    assert all(each.startswith("data: ") for each in lines), lines
    data = [each.removeprefix("data: ") for each in lines]
    assert data.count(DONE) == 1 and data[-1] == DONE, data[-2:]
    return data[:-1]


def frames_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the frames of a stream of Workers AI: each has text, the last one alone has usage."""
    frames = [json.loads(each) for each in data_of(lines)]
    assert all(type(each["response"]) is str for each in frames), frames
    assert ["usage" in each for each in frames] == [False] * (len(frames) - 1) + [True]
    return frames


def text_of(frames: Iterable[dict[str, Any]]) -> str:
    return "".join(each["response"] for each in frames)
