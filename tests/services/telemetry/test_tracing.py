"""Traces of requests on a cluster of real services, as a collector receives them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from services.gateway.observability.telemetry.spans import SpanBatch
from services.gateway.observability.telemetry.trace_context import caller_context
from services.gateway.observability.telemetry.traced_request import TracedRequest, num_spans
from shared.telemetry.timeline import Phase, Timeline, Try
from tests.services.telemetry.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.services.live_cluster import MODEL, PROMPT, LiveCluster, live_cluster
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver
) -> AsyncIterator[LiveCluster]:
    model_dir = write_model_dir(tmp_path_factory.mktemp("models") / "tiny")
    folder = tmp_path_factory.mktemp("cluster")
    async with live_cluster(folder, model_dir, has_tls=False, security="none") as running:
        yield running


async def spans_of(
    cluster: LiveCluster, receiver: OtlpReceiver, body: dict[str, Any], header: str
) -> list[tuple[str, Any]]:
    """Of one request, once the collector has them."""
    receiver.status = 200
    receiver.spans.clear()
    response = await cluster.http.post(
        "/v1/chat/completions", json=body, headers={"traceparent": header}
    )
    assert response.status_code == (200 if body is BODY else 400)
    await until(lambda: any(span.kind == span.SPAN_KIND_SERVER for _, span in receiver.spans))
    return list(receiver.spans)


def text_of(span: Any, name: str) -> str:
    found = {pair.key: pair.value.string_value for pair in span.attributes}
    return str(found.get(name, ""))


async def test_split_request_is_one_connected_trace(
    cluster: LiveCluster, receiver: OtlpReceiver
) -> None:
    spans = await spans_of(cluster, receiver, BODY, SAMPLED)
    assert {name for name, _ in spans} == {
        f"hearth-{role}" for role in ("gateway", "scheduler", "decode", "prefill")
    }
    assert {span.trace_id.hex() for _, span in spans} == {TRACE_ID}
    ids = {span.span_id for _, span in spans}
    server = next(span for _, span in spans if span.kind == span.SPAN_KIND_SERVER)
    assert server.name == f"chat {MODEL}"
    assert server.parent_span_id.hex() == PARENT_ID
    assert all(span is server or span.parent_span_id in ids for _, span in spans)
    for _, span in spans:
        assert server.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    names = {pair.key for pair in server.attributes}
    assert {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.max_tokens",
        "gen_ai.request.stream",
        "gen_ai.response.finish_reasons",
        "gen_ai.usage.output_tokens",
    } <= names
    assert not any(PROMPT.encode() in span.SerializeToString() for _, span in spans)


async def test_commands_carry_the_trace_as_a_header(
    cluster: LiveCluster, receiver: OtlpReceiver
) -> None:
    spans = await spans_of(cluster, receiver, BODY, SAMPLED)
    server = next(span for _, span in spans if span.kind == span.SPAN_KIND_SERVER)
    header = f"traceparent: 00-{TRACE_ID}-{server.span_id.hex()}-01".encode()
    recorded = cluster.relays["nats"].recorded
    messages = re.findall(rb"HPUB (\S+) [^\r]*\r\nNATS/1.0\r\n(traceparent: [^\r]*)", recorded)
    # the last two tokens are the sender
    sent = {subject.decode().split(".")[-3] for subject, found in messages if found == header}
    assert sent == {"submit", "start", "run"}


async def test_rejected_request_has_a_span(cluster: LiveCluster, receiver: OtlpReceiver) -> None:
    spans = await spans_of(cluster, receiver, {"messages": []}, SAMPLED)
    server = next(span for _, span in spans if span.kind == span.SPAN_KIND_SERVER)
    assert "error.type" in {pair.key for pair in server.attributes}


@pytest.mark.parametrize(
    "header",
    [
        "00-zz",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        SAMPLED.upper(),
        "0" * 10_000,
    ],
)
async def test_malformed_header_begins_a_new_trace(
    cluster: LiveCluster, receiver: OtlpReceiver, header: str
) -> None:
    assert caller_context(header) is None
    spans = await spans_of(cluster, receiver, BODY, header)
    server = next(span for _, span in spans if span.kind == span.SPAN_KIND_SERVER)
    assert server.parent_span_id == b""
    assert server.trace_id.hex() != TRACE_ID


async def test_collector_that_fails_costs_no_request(
    cluster: LiveCluster, receiver: OtlpReceiver
) -> None:
    receiver.status = 400
    before = cluster.gateway.telemetry.num_dropped_spans
    await cluster.chat(PROMPT)
    await until(lambda: cluster.gateway.telemetry.num_dropped_spans > before)
    metrics = (await cluster.http.get("/metrics")).text
    assert "hearth_spans_dropped_total" in metrics
    await cluster.chat(PROMPT)


async def test_second_try_is_a_linked_sibling() -> None:
    tries = tuple(
        Try(
            number=number,
            worker_id=f"decode-{number}",
            outcome="x",
            phases=(
                Phase(name="reserve", process_id=f"decode-{number}", start_s=0, duration_s=9e-5),
                Phase(name="decode", process_id=f"decode-{number}", start_s=0, duration_s=1),
            ),
        )
        for number in (1, 2)
    )
    timeline = Timeline(
        request_id="r",
        tenant_id="t",
        gateway_id="gateway-1",
        model="m",
        outcome="stop",
        num_reasoning_tokens=3,
        started_at=0.0,
        duration_s=2.0,
        tries=tries,
    )
    encoded = msgspec.Raw(msgspec.msgpack.encode(timeline))
    batch = SpanBatch()
    batch.add(TracedRequest(encoded, b"t" * 16, b"s" * 8, b"", {}, {"decode-2": "fra"}))
    spans = [
        span
        for each in batch.request.resource_spans
        for scope in each.scope_spans
        for span in scope.spans
    ]
    assert len(spans) == batch.num_spans == num_spans(timeline) == 5
    named = {span.name: span for span in spans}
    first, second = named["try 1"], named["try 2"]
    assert first.parent_span_id == second.parent_span_id == named["chat m"].span_id == b"s" * 8
    assert [link.span_id for link in second.links] == [first.span_id]
    assert not first.links
    numbers = {pair.key: pair.value.int_value for pair in named["chat m"].attributes}
    assert numbers["gen_ai.usage.reasoning.output_tokens"] == 3
    regions = [text_of(span, "hearth.region") for span in (first, second)]
    assert regions == ["", "fra"]


async def test_exporter_is_not_imported_without_a_collector() -> None:
    """redis imports a part of the SDK by itself, where it is installed."""
    code = (
        "import sys, services.gateway.service\n"
        "from services.gateway.observability.telemetry.tracing import open_tracing\n"
        "assert open_tracing({}, 'gateway-1', bytes, None) is None\n"
        "found = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'opentelemetry.proto')\n"
        "print([name for name in sys.modules if name.startswith(found)])"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    assert (child.returncode, output.strip()) == (0, b"[]")
