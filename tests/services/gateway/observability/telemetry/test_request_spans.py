"""The spans of cancelled and resumed requests, as a collector receives them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT, events_of
from tests.services.gateway.observability.telemetry.test_resumed_timeline import killed_after
from tests.services.telemetry.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.waiting import LIMIT_S, until

WAIT_S = LIMIT_S


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


def attributes_of(span: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in span.attributes}


async def taken(receiver: OtlpReceiver) -> list[Any]:
    """The spans of one request: they are sent together."""
    await until(lambda: receiver.spans)
    found = [span for _, span in receiver.spans]
    receiver.spans.clear()
    ids = {span.span_id for span in found}
    servers = [span for span in found if span.kind == span.SPAN_KIND_SERVER]
    assert len(servers) == 1
    assert len({span.trace_id for span in found}) == 1
    assert all(span in servers or span.parent_span_id in ids for span in found)
    return [*servers, *(span for span in found if span not in servers)]


async def cancel(cluster: Cluster) -> None:
    cluster.decodes[0].hold_at = 5
    async with cluster.http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        async for _ in response.aiter_lines():
            break
    await until(lambda: not len(cluster.gateway._driver))
    await cluster.reset()


@pytest.mark.own_cluster
async def test_cancelled_and_resumed_requests_are_connected_traces(
    receiver: OtlpReceiver, cluster: Cluster
) -> None:
    await cancel(cluster)
    server, *others = await taken(receiver)
    assert attributes_of(server)["error.type"] == "client_gone"
    assert "try 1" in {span.name for span in others}

    cluster.decodes[0].hold_at = 5
    running = asyncio.create_task(events_of(cluster))
    await killed_after(cluster.decodes[0], 5)
    await running
    server, *others = await taken(receiver)
    assert "error.type" not in attributes_of(server)
    first, second = (span for span in others if span.name.startswith("try"))
    workers = [attributes_of(each)["hearth.worker.id"] for each in (first, second)]
    assert workers == ["decode-1", "decode-2"]
    assert [link.span_id for link in second.links] == [first.span_id]
    under_first = {span.name for span in others if span.parent_span_id == first.span_id}
    assert "recovery" in under_first
