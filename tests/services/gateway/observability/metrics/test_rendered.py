"""The text of the metrics, for many readers."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.observability.metrics.rendered import MAX_AGE_S, RenderedMetrics
from shared.errors import InvalidRequest
from tests.shared.test_store import ManualClock


async def test_text_is_rendered_once_a_second_for_all() -> None:
    clock, rendered = ManualClock(), list[str]()

    def render(names: str) -> bytes:
        rendered.append(names)
        return names.encode()

    metrics = RenderedMetrics(render, clock)
    texts = await asyncio.gather(*(metrics.text("hearth") for _ in range(8)), metrics.text("vllm"))
    assert texts == [b"hearth"] * 8 + [b"vllm"]
    clock.at += MAX_AGE_S - 0.1
    await metrics.text("hearth")
    assert sorted(rendered) == ["hearth", "vllm"]
    clock.at += 0.2
    await metrics.text("hearth")
    assert sorted(rendered) == ["hearth", "hearth", "vllm"]


async def test_unknown_names_are_not_kept() -> None:
    def render(names: str) -> bytes:
        raise InvalidRequest(names)

    metrics = RenderedMetrics(render, ManualClock())
    for name in ("a", "b", "a"):
        with pytest.raises(InvalidRequest):
            await metrics.text(name)
    assert not metrics._texts
