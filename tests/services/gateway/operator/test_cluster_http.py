"""The cluster's state over HTTP: for the operator alone, one computation for all readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest_asyncio

from services.gateway.operator.cluster.kept_history import KEY, HistoryKeeper
from services.gateway.operator.cluster.state import ClusterView
from shared.clock import MonotonicClock
from shared.lifecycle.health import Fleet, Loss
from tests.services.gateway.conftest import API_KEY, Beside, Cluster, SharedCluster
from tests.support.waiting import LIMIT_S, until

TOKEN = "of-the-operator"
PATHS = ("/v1/cluster", "/v1/cluster/events")


@asynccontextmanager
async def operated_gateway(cluster: Cluster) -> AsyncIterator[Beside]:
    async with cluster.beside(operator_token=TOKEN) as beside:
        beside.http.headers["authorization"] = f"Bearer {TOKEN}"
        yield beside


class SharedGateway:
    """One gateway for the tests of this module; a test that needs its name closes it."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._opened: Beside | None = None

    async def open(self, cluster: Cluster) -> Beside:
        if self._opened is None:
            self._opened = await self._stack.enter_async_context(operated_gateway(cluster))
        return self._opened

    async def close(self) -> None:
        self._opened = None
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def operated(shared_cluster: SharedCluster) -> AsyncIterator[SharedGateway]:
    found = SharedGateway()
    yield found
    await found.close()


@pytest_asyncio.fixture(loop_scope="session")
async def opened(cluster: Cluster, operated: SharedGateway) -> Beside:
    """The module's gateway, which knows all processes of a cluster in its first state."""
    found = await operated.open(cluster)
    fleet, shown = found.gateway._health_monitor.fleet, found.gateway._operator.feed.state
    names = {"gateway-1", "scheduler-1", *(each.worker_id for each in cluster.decodes)}
    await until(lambda: all(fleet.is_live(each) and each in shown._view for each in names))
    return found


async def read(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The events of a stream."""
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, msgspec.json.decode(line.removeprefix("data: "))


async def test_cluster_is_closed_without_operator_token(cluster: Cluster) -> None:
    for path in PATHS:
        for given in ("Bearer", "", "Bearer x", f"Bearer {API_KEY}"):
            response = await cluster.http.get(path, headers={"authorization": given})
            assert response.status_code == 401, (path, given)


async def test_only_the_operator_reads_the_cluster(opened: Beside) -> None:
    for path in PATHS:
        for given in (f"Bearer {API_KEY}", f"Bearer {TOKEN}x", f"Basic {TOKEN}", ""):
            response = await opened.http.get(path, headers={"authorization": given})
            assert response.status_code == 401, (path, given)
            assert "decode-1" not in response.text
    names = (await opened.http.get("/ready")).json()
    assert names["workers"] == {"prefill": [], "decode": ["decode-1", "decode-2"]}
    assert (names["scheduler"], names["kv_index"]) == (["scheduler-1"], [])
    given = {"authorization": f"Bearer {API_KEY}"}
    public = (await opened.http.get("/ready", headers=given)).json()
    assert public == {"ready": True, "reason": None, "redis": "ok"}
    peers, view = ("gateway-1", "decode-1", "decode-2"), opened.gateway._operator.feed.state._view
    await until(lambda: all(each in view for each in peers))
    snapshot = (await opened.http.get("/v1/cluster")).json()
    assert snapshot["gateway_id"] == "gateway-2"
    assert snapshot["processes"].keys() >= {*peers}
    assert snapshot["processes"]["decode-1"]["role"] == "decode"
    assert "joined" in {event["kind"] for event in snapshot["events"]}
    assert snapshot["lists"].keys() >= {"figures", "rejected", "hosts", "models", "demands"}


async def test_rejected_requests_of_a_client_leave_a_loss_in_sight(
    opened: Beside, cluster: Cluster
) -> None:
    opened.gateway._operator.feed.lose("decode-1", Loss.DISCONNECTED)
    given = {"authorization": f"Bearer {API_KEY}"}
    for _ in range(65):
        body = {"model": "tiny", "messages": []}
        assert (
            await opened.http.post("/v1/chat/completions", json=body, headers=given)
        ).status_code == 400

    async def has_counted() -> bool:
        lists = (await opened.http.get("/v1/cluster")).json()["lists"]
        counts = {each["code"]: each["count"] for each in lists["rejected"]}
        return counts.get("invalid_request", 0) >= 65

    await until(has_counted)
    snapshot = (await opened.http.get("/v1/cluster")).json()
    assert ("gone", "decode-1") in {
        (each["kind"], each["process_id"]) for each in snapshot["events"]
    }


async def test_faults_are_for_the_gateway_of_hearth_up_alone(opened: Beside) -> None:
    kill = {"worker_id": "decode-1", "fault": "kill"}
    assert (await opened.http.get("/v1/cluster/faults")).json()["worker_ids"] == []
    assert (await opened.http.post("/v1/cluster/faults", json=kill)).status_code == 404
    for method, body in (("GET", None), ("POST", kill)):
        given = {"authorization": f"Bearer {API_KEY}"}
        response = await opened.http.request(method, "/v1/cluster/faults", json=body, headers=given)
        assert response.status_code == 401


async def test_events_start_with_a_snapshot_and_go_on_with_deltas(
    opened: Beside, cluster: Cluster
) -> None:
    async with opened.http.stream("GET", "/v1/cluster/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        events = read(response)
        name, snapshot = await anext(events)
        assert name == "snapshot"
        await cluster.decodes[1].stop()
        lost: dict[str, Any] = {}
        async with asyncio.timeout(LIMIT_S):
            while "decode-2" not in lost:
                name, delta = await anext(events)
                assert name == "delta"
                snapshot["number"] += 1
                assert delta["number"] == snapshot["number"]
                lost |= delta.get("changed", {})
        assert lost["decode-2"]["state"] == "stopped"
        assert delta["events"][-1]["process_id"] == "decode-2"
        assert delta["events"][-1]["kind"] == "stopped"


async def test_readers_share_one_computation_that_ends_with_the_last(opened: Beside) -> None:
    feed = opened.gateway._operator.feed
    async with (
        opened.http.stream("GET", "/v1/cluster/events") as first,
        opened.http.stream("GET", "/v1/cluster/events") as second,
    ):
        one, other = read(first), read(second)
        seen: list[dict[int, Any]] = [{}, {}]
        async with asyncio.timeout(LIMIT_S):
            while not set(seen[0]) & set(seen[1]):
                feed._urgent.set()
                for found, events in zip(seen, (one, other), strict=True):
                    name, data = await anext(events)
                    found |= {data["number"]: data} if name == "delta" else {}
        for number in set(seen[0]) & set(seen[1]):
            assert seen[0][number] == seen[1][number]
        assert feed._num_readers == 2
        assert len(feed._background._tasks) == 1
    await until(lambda: feed._num_readers == 0 and not feed._background._tasks)


async def test_next_gateway_has_the_history(opened: Beside) -> None:
    opened.gateway._operator.feed.lose("decode-9", Loss.STUCK)
    opened.gateway._operator.feed.state.rejected_day.add("model_overloaded", 7)
    await opened.gateway._operator.history.save()
    store, clock = opened.gateway.tenancy.stores.slow, MonotonicClock()
    view = ClusterView(Fleet("gateway-3"), clock.now, time.time)
    await HistoryKeeper(store, view, clock, is_on=True).restore()
    assert ("stuck", "decode-9") in {(each.kind, each.process_id) for each in view.events.all}
    assert {each.code: each.count for each in view.rejected_day.totals}["model_overloaded"] == 7
    await store.write([("SET", KEY, "{")])
    other = ClusterView(Fleet("gateway-3"), clock.now, time.time)
    await HistoryKeeper(store, other, clock, is_on=True).restore()
    assert other.events.all == ()


async def test_closed_feed_ends_its_streams(cluster: Cluster, operated: SharedGateway) -> None:
    await operated.close()
    async with (
        operated_gateway(cluster) as opened,
        opened.http.stream("GET", "/v1/cluster/events") as response,
    ):
        events = read(response)
        await anext(events)
        await opened.gateway._operator.feed.close()
        async with asyncio.timeout(LIMIT_S):
            assert [name async for name, _ in events] in ([], ["delta"])
