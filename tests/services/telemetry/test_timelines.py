"""The timelines of requests on a cluster of real services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from services.gateway.observability.telemetry.timeline_ring import TimelineRing
from shared.telemetry.timeline import Phase, Timeline
from tests.support.services.live_cluster import (
    MODEL,
    OPERATOR_TOKEN,
    PROMPT,
    LiveCluster,
    live_cluster,
)
from tests.support.services.model_dir import write_model_dir
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    model_dir = write_model_dir(tmp_path_factory.mktemp("models") / "tiny")
    folder = tmp_path_factory.mktemp("cluster")
    async with live_cluster(folder, model_dir, has_tls=False, security="none") as running:
        yield running


async def timeline_of(cluster: LiveCluster, content: str, num_tokens: int = 8) -> Timeline:
    response = await cluster.chat(content, max_tokens=num_tokens)
    found = cluster.gateway.telemetry.ring.get(response.headers["x-request-id"])
    assert found is not None
    return found


def until_first_token(timeline: Timeline) -> list[Phase]:
    phases = [*timeline.gateway_phases, *(p for each in timeline.tries for p in each.phases)]
    phases = [each for each in phases if each.name != "client_stall"]  # of a busy machine
    names = [phase.name for phase in phases]
    return phases[: names.index("first_token") + 1]


async def test_phases_of_a_split_request_add_up(cluster: LiveCluster) -> None:
    timeline = await timeline_of(cluster, PROMPT)
    phases = until_first_token(timeline)
    assert [(phase.name, phase.process_id) for phase in phases] == [
        ("validate", "gateway-1"),
        ("render", "gateway-1"),
        ("tokenize", "gateway-1"),
        ("submit", "gateway-1"),
        ("queue", "scheduler-1"),
        ("placement", "scheduler-1"),
        ("reserve", "decode-1"),
        ("prefill_wait", "prefill-1"),
        ("prefill", "prefill-1"),
        ("kv_push", "prefill-1"),
        ("first_token", "decode-1"),
    ]
    assert timeline.ttft_s is not None
    assert abs(sum(phase.duration_s for phase in phases) - timeline.ttft_s) < 0.002
    assert phases[-2].num_bytes > 0
    assert (phases[-2].port, phases[-2].num_copies) == ("tcp (same host)", 5)  # a relay
    assert phases[-2].predicted_s > 0
    assert timeline.tries[0].phases[-1].name == "decode"
    assert timeline.tries[0].phases[-1].num_steps == 8
    for one, following in pairwise(phases):
        assert abs(one.start_s + one.duration_s - following.start_s) < 1e-6


async def test_phases_of_a_local_prefill_add_up(cluster: LiveCluster) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 8}  # too short for a handoff
    response = await cluster.http.post("/v1/completions", json=body)
    timeline = cluster.gateway.telemetry.ring.get(response.headers["x-request-id"])
    assert timeline is not None
    phases = until_first_token(timeline)
    assert timeline.tries[0].prefill_worker_id == ""
    assert [phase.name for phase in phases[-3:]] == ["reserve", "prefill", "first_token"]
    assert timeline.ttft_s is not None
    assert abs(sum(phase.duration_s for phase in phases) - timeline.ttft_s) < 0.002


async def test_timeline_belongs_to_its_tenant(cluster: LiveCluster) -> None:
    timeline = await timeline_of(cluster, PROMPT)
    response = await cluster.http.get(f"/v1/requests/{timeline.request_id}/timeline")
    assert response.json()["request_id"] == timeline.request_id
    unknown = await cluster.http.get("/v1/requests/unknown/timeline")
    assert unknown.status_code == 404
    foreign = Timeline(
        **{**{name: getattr(timeline, name) for name in timeline.__struct_fields__}}
        | {"request_id": "r-of-another", "tenant_id": "tenant-2"}
    )
    cluster.gateway.telemetry.ring.add(foreign)
    hidden = await cluster.http.get("/v1/requests/r-of-another/timeline")
    assert (hidden.status_code, hidden.content) == (404, unknown.content)


async def test_operator_reads_the_timelines_of_all(cluster: LiveCluster) -> None:
    timeline = await timeline_of(cluster, PROMPT)
    path = f"/v1/requests/{timeline.request_id}/timeline"
    for token, status in ((OPERATOR_TOKEN, 200), ("guessed", 401)):
        headers = {"authorization": f"Bearer {token}"}
        response = await cluster.http.get(path, headers=headers)
        assert response.status_code == status


async def test_last_requests_are_listed_and_found_by_the_ids_of_their_responses(
    cluster: LiveCluster,
) -> None:
    path, body = "/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 8}
    response = await cluster.http.post(path, json=body)
    request_id = response.headers["x-request-id"]
    for name in (response.json()["id"], response.json()["output"][-1]["id"]):
        found = await cluster.http.get(f"/v1/requests/{name}/timeline")
        assert found.json()["request_id"] == request_id
    for headers in ({}, {"authorization": f"Bearer {OPERATOR_TOKEN}"}):
        listed = (await cluster.http.get("/v1/requests", headers=headers)).json()["requests"]
        assert listed[0]["request_id"] == request_id
        assert listed[0]["num_output_tokens"] == 8
    guessed = {"authorization": "Bearer guessed"}
    assert (await cluster.http.get("/v1/requests", headers=guessed)).status_code == 401


async def test_rejected_request_has_a_timeline(cluster: LiveCluster) -> None:
    response = await cluster.http.post("/v1/chat/completions", json={"messages": []})
    timeline = cluster.gateway.telemetry.ring.get(response.headers["x-request-id"])
    assert timeline is not None
    assert (timeline.status, timeline.outcome) == (400, response.json()["error"]["code"])
    assert timeline.tries == ()


async def test_ring_forgets_the_oldest(cluster: LiveCluster) -> None:
    timeline = await timeline_of(cluster, PROMPT)
    ring = TimelineRing(2)
    for name in "abc":
        fields = {each: getattr(timeline, each) for each in timeline.__struct_fields__}
        ring.add(Timeline(**fields | {"request_id": name}))
    assert ring.get("a") is None
    assert ring.get("c") is not None
    assert ring.num_bytes / len(ring) < 720


async def test_no_text_is_logged_or_kept(cluster: LiveCluster) -> None:
    canary = "the canary of the prompt sings xylophone"
    redis = cluster.relays["redis"]
    with capture_logs() as logs:
        timeline = await timeline_of(cluster, canary + PROMPT)
        await until(lambda: bool(any(each["event"] == "request_ended" for each in logs)))
    response = await cluster.chat(canary + PROMPT)
    answer = response.json()["choices"][0]["message"]["content"]
    ended = next(each for each in logs if each["event"] == "request_ended")
    assert ended["request_id"] == timeline.request_id
    assert (ended["worker"], ended["prefill_worker"]) == ("decode-1", "prefill-1")
    assert (ended["status"], ended["outcome"], ended["num_output_tokens"]) == (200, "length", 8)
    kept = (repr(logs) + msgspec.json.encode(timeline).decode()).encode() + redis.recorded
    for text in (canary, answer):
        assert len(text) > 4
        assert text.encode() not in kept
