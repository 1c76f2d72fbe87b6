"""Snapshots, deltas and events of a cluster, on a clock that the test sets."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.operator.cluster.events import MAX_EVENTS
from services.gateway.operator.cluster.history import NUM_SAMPLES, SAMPLE_S, quantile
from services.gateway.operator.cluster.state import LINKS_S, ClusterView
from shared.fleet.fleet_view import SHOW_LOST_S
from shared.lifecycle.health import Fleet, Loss
from shared.messages import (
    LATENCY_BOUNDS_S,
    DeviceMemory,
    GatewayLoad,
    Heartbeat,
    HostedModel,
    HostLoad,
    LinkLoad,
    ProcessState,
    WorkerLoad,
)
from shared.model_registry.record import RegisteredModel, RegisteredRevision


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = Fleet("gateway-1", 1)
        self.state = ClusterView(self.fleet, lambda: self.now, lambda: 1000.0 + self.now)
        self.number = 0

    def beat(
        self,
        process_id: str = "decode-1",
        *,
        running: int | None = 0,
        gateway: GatewayLoad | None = None,
        state: ProcessState = "ready",
        **fields: Any,
    ) -> None:
        self.number += 1
        self.now += 0.25
        load = None
        if running is not None and gateway is None and "host" not in fields:
            load = WorkerLoad(step=self.number, step_budget_s=1.0, num_running=running)
        roles = ("decode",) if gateway is None else ("gateway",)
        message = Heartbeat(
            **{"process_id": process_id, "epoch": 1, "roles": roles} | fields,
            sequence_number=self.number,
            state=state,
            interval_s=0.25,
            load=load,
            gateway=gateway,
        )
        self.fleet.observe(message, self.now)
        self.state.observe(message)

    @property
    def events(self) -> list[tuple[str, str, int]]:
        return [(each.kind, each.process_id, each.count) for each in self.state.snapshot().events]


def test_delta_has_changed_fields_only() -> None:
    scene = Scene()
    scene.beat(running=1)
    assert scene.state.delta().changed["decode-1"]["num_running"] == 1
    assert scene.state.delta().changed == {}
    scene.beat(running=2)
    assert scene.state.delta().changed["decode-1"].items() >= {"num_running": 2}.items()
    assert "role" not in scene.state.delta().changed.get("decode-1", {})


def test_field_that_is_gone_is_null() -> None:
    scene = Scene()
    scene.beat(running=1)
    scene.beat(running=1)
    assert "generated_per_s" in scene.state.delta().changed["decode-1"]
    scene.state.lose("decode-1", Loss.UNRESPONSIVE)
    changed = scene.state.delta().changed["decode-1"]
    assert changed["state"] == "silent"
    assert changed["generated_per_s"] is None


def test_lost_process_is_removed_later() -> None:
    scene = Scene()
    scene.beat()
    scene.beat(state="stopped")
    assert scene.state.delta().changed["decode-1"]["state"] == "stopped"
    scene.now += SHOW_LOST_S + 1
    assert scene.state.delta().removed == ("decode-1",)
    assert scene.events == [("joined", "decode-1", 1), ("stopped", "decode-1", 1)]


def test_moved_and_lost_streams_are_events() -> None:
    scene = Scene()
    scene.beat("gateway-2", gateway=GatewayLoad(num_resubmissions=5))
    moved = GatewayLoad(num_resubmissions=9, num_lost_streams=2, moved_streams=(("decode-1", 3),))
    scene.beat("gateway-2", gateway=moved)
    assert scene.events[1:] == [
        ("moved", "decode-1", 3),
        ("moved", "gateway-2", 1),
        ("stream lost", "gateway-2", 2),
    ]
    assert {each.gateway_id for each in scene.state.snapshot().events[1:]} == {"gateway-2"}


def test_rejected_requests_push_out_no_event() -> None:
    scene = Scene()
    scene.beat("gateway-2", gateway=GatewayLoad())
    scene.state.lose("decode-1", Loss.DISCONNECTED)
    for number in range(1, 66):
        counts = {"num_refused_requests": number + 2, "rejections": (("invalid_request", number),)}
        scene.beat("gateway-2", gateway=GatewayLoad(**counts))
    assert scene.events == [("joined", "gateway-2", 1), ("gone", "decode-1", 1)]
    rows = scene.state.delta().lists["rejected"]
    assert {(each.code, each.count) for each in rows} == {("invalid_request", 65), ("unknown", 2)}
    assert rows[0].at == 1000.0 + scene.now
    later = GatewayLoad(num_refused_requests=72, rejections=(("invalid_request", 70),))
    scene.now += 14 * 60.0
    scene.beat("gateway-2", gateway=later)
    assert [each.count for each in scene.state.recent_rejections] == [70, 2]
    scene.now += 2 * 60.0
    assert [each.count for each in scene.state.recent_rejections] == [5], "15 minutes, not the row"
    scene.now += 3601.0
    assert scene.state.recent_rejections == ()
    assert scene.state.delta().lists["rejected"] == ()


def test_rejected_requests_of_the_night_are_counted_through_a_restart() -> None:
    scene = Scene()

    def reject(after_s: float, **counts: int) -> None:
        scene.now += after_s
        found = tuple(counts.items())
        load = GatewayLoad(num_refused_requests=sum(counts.values()), rejections=found)
        scene.beat("gateway-2", gateway=load)

    scene.beat("gateway-2", gateway=GatewayLoad())
    reject(0, overloaded=3)
    night = 1000.0 + scene.now
    reject(8 * 3600, overloaded=5, no_capacity=7)
    morning, before = 1000.0 + scene.now, scene.state.rejected_day
    scene.state = ClusterView(scene.fleet, lambda: scene.now, lambda: 1000.0 + scene.now)
    scene.state.restore((), (), before.hours)
    reject(0, overloaded=5, no_capacity=7)  # counted before
    reject(60, overloaded=6, no_capacity=7)
    found = [(each.code, each.count) for each in scene.state.rejected_day.totals]
    assert found == [("no_capacity", 7), ("overloaded", 6)]
    _, overloaded = scene.state.rejected_day.totals
    assert (overloaded.first_at, overloaded.last_at) == (night, 1000.0 + scene.now)
    scene.now += 16 * 3600.0  # the first three are of a day ago
    _, overloaded = sorted(scene.state.rejected_day.totals, key=lambda each: each.code)
    assert (overloaded.count, overloaded.first_at) == (3, morning)
    scene.now += 86_400.0
    assert scene.state.rejected_day.totals == ()


def test_losses_and_other_events_push_out_only_their_own_kind() -> None:
    scene = Scene()
    scene.state.lose("decode-1", Loss.STUCK)
    for index in range(MAX_EVENTS + 5):
        scene.beat(f"prefill-{index}")
    kinds = [kind for kind, _, _ in scene.events]
    assert (kinds.count("stuck"), kinds.count("joined")) == (1, MAX_EVENTS)
    for _ in range(MAX_EVENTS + 5):
        scene.state.lose("prefill-1", Loss.STUCK)
    kinds = [kind for kind, _, _ in scene.events]
    assert (kinds.count("stuck"), kinds.count("joined")) == (MAX_EVENTS, MAX_EVENTS)


def test_change_of_roles_is_an_event() -> None:
    scene = Scene()
    scene.beat()
    scene.beat(roles=("prefill",))
    scene.beat(roles=("decode",), epoch=2)
    (event,) = [each for each in scene.state.snapshot().events if each.kind == "role changed"]
    assert (event.process_id, event.detail) == ("decode-1", "decode → prefill")


def hosted(state: str, **fields: Any) -> HostLoad:
    model = HostedModel(name="m", revision="r" * 32, state=state, device="cpu", **fields)  # type: ignore[arg-type]
    device = DeviceMemory(device="cpu", budget_bytes=100, used_bytes=40)
    return HostLoad(devices=(device,), models=(model,))


def test_models_and_hosts_are_lists_and_their_changes_events() -> None:
    scene = Scene()
    scene.beat("host-1", roles=("host",), host=hosted("hot"))
    first = scene.state.delta().lists
    assert [each.state for each in first["models"]] == ["hot"]
    assert first["hosts"][0].devices[0].budget_bytes == 100
    scene.beat("host-1", roles=("host",), host=hosted("hot", hot_s=5.0))
    assert scene.state.delta().lists == {}
    scene.beat("host-1", roles=("host",), host=hosted("standby", wake_s=0.3))
    scene.beat("host-1", roles=("host",), host=hosted("failed", failure="no such file"))
    delta = scene.state.delta()
    assert delta.lists["models"][0].failure == "no such file"
    assert [(each.kind, each.detail) for each in delta.events] == [
        ("model parked", "m rrrrrrrrrrrr"),
        ("model failed", "m rrrrrrrrrrrr: no such file"),
    ]


def registered(name: str, **fields: Any) -> RegisteredModel:
    revision = RegisteredRevision(name="r1", source="/m", **fields)
    return RegisteredModel(name=name, revisions=(revision,))


def test_changes_of_the_registry_are_events() -> None:
    scene = Scene()
    for names in ({"a": registered("a")}, {"a": registered("a", digest="d"), "b": registered("b")}):
        scene.state.observe_registry(names)
    scene.state.observe_registry({"b": registered("b", weight=2.0)})
    assert [(kind, name) for kind, name, _ in scene.events] == [
        ("model added", "b"),
        ("model removed", "a"),
        ("model changed", "b"),
    ]


def test_history_sums_gateways_and_is_bounded() -> None:
    scene = Scene()
    slow = (0,) * LATENCY_BOUNDS_S.index(0.1) + (10,)
    for gateway_id in ("gateway-1", "gateway-2"):
        scene.beat(gateway_id, gateway=GatewayLoad(num_requests=100, ttft_counts=(5,)))
    scene.state.delta()
    for gateway_id in ("gateway-1", "gateway-2"):
        counts = {"num_requests": 110, "num_failed_requests": 1, "num_resubmissions": 2}
        load = GatewayLoad(**counts, ttft_counts=(5, *slow[1:]))
        scene.beat(gateway_id, gateway=load)
    scene.now += SAMPLE_S
    scene.beat("gateway-2", gateway=load)
    delta = scene.state.delta()
    (sample,) = delta.samples
    assert delta.lists["figures"].requests_per_s == sample.requests_per_s
    assert sample.requests_per_s == round(20 / (scene.now - 0.25), 2)
    assert (sample.failed_share, sample.num_moved, sample.num_lost) == (0.1, 4, 0)
    assert 0.0794 < sample.ttft_p50_s < 0.1 >= sample.ttft_p99_s > 0.099
    assert sample.itl_p50_s is None
    for _ in range(NUM_SAMPLES):
        scene.now += SAMPLE_S
        scene.beat("gateway-1", gateway=load)
    assert len(scene.state.snapshot().samples) == NUM_SAMPLES
    assert scene.state.snapshot().lists.figures.num_moved == 0


def test_restarted_gateway_counts_from_zero() -> None:
    scene = Scene()
    scene.beat("gateway-2", gateway=GatewayLoad(num_requests=100))
    scene.beat("gateway-2", gateway=GatewayLoad(num_requests=7), epoch=2)
    scene.now += SAMPLE_S
    scene.beat("gateway-1", gateway=GatewayLoad())
    (sample,) = scene.state.snapshot().samples
    assert sample.requests_per_s == round(7 / sample.duration_s, 2)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((), 0.5, None),
        ((0, 0), 0.5, None),
        ((10,), 0.5, 0.0005),
        ((1, 1), 0.5, 0.001),
        ((*(0,) * 51, 4), 0.99, 100.0),
    ],
)
def test_quantile_of_buckets(counts: tuple[int, ...], share: float, expected: float) -> None:
    assert quantile(counts, share) == expected


def test_own_gateway_is_shown() -> None:
    scene = Scene()
    scene.beat("gateway-1", gateway=GatewayLoad(num_open_streams=3))
    assert scene.state.snapshot().processes["gateway-1"]["num_open_streams"] == 3


def test_last_events_are_kept_and_each_is_sent_once() -> None:
    scene = Scene()
    for index in range(MAX_EVENTS + 5):
        scene.beat(f"decode-{index}")
    assert len(scene.state.delta().events) == MAX_EVENTS
    assert scene.state.delta().events == ()
    scene.state.lose("decode-1", Loss.STUCK)
    assert [each.kind for each in scene.state.delta().events] == ["stuck"]


def test_snapshot_of_the_last_delta_is_followed_by_the_next() -> None:
    scene = Scene()
    scene.beat(running=1)
    number = scene.state.delta().number
    scene.beat(running=2)
    last = scene.state.last()
    assert (last.number, last.processes["decode-1"]["num_running"]) == (number, 1)
    assert scene.state.delta().number == number + 1


def test_process_that_comes_back_is_an_event() -> None:
    scene = Scene()
    scene.beat()
    scene.state.lose("decode-1", Loss.UNRESPONSIVE)
    scene.beat()
    scene.beat()
    assert [kind for kind, _, _ in scene.events] == ["joined", "silent", "returned"]
    assert scene.state.snapshot().processes["decode-1"]["state"] == "ready"


def test_process_that_was_lost_for_long_returns() -> None:
    scene = Scene()
    scene.beat()
    scene.state.lose("decode-1", Loss.UNRESPONSIVE)
    scene.now += SHOW_LOST_S + 1
    scene.beat("gateway-1", gateway=GatewayLoad())
    assert "decode-1" not in scene.state.snapshot().processes
    scene.beat()
    assert [kind for kind, _, _ in scene.events] == ["joined", "silent", "joined", "returned"]


def test_restored_history_goes_on() -> None:
    before = Scene()
    before.beat()
    before.state.lose("decode-1", Loss.STUCK)
    before.beat("gateway-1", gateway=GatewayLoad())
    before.now += SAMPLE_S
    before.beat("gateway-1", gateway=GatewayLoad())
    kept = before.state.snapshot()
    scene = Scene()
    scene.state.restore(kept.events, kept.samples)
    scene.beat(uptime_s=60.0)
    scene.beat("decode-2", uptime_s=1.0)
    assert scene.events == [*before.events, ("joined", "decode-2", 1)]
    assert [each.number for each in scene.state.snapshot().events] == [1, 2, 3, 4]
    assert scene.state.snapshot().samples == kept.samples
    later = Scene()
    later.now = NUM_SAMPLES * SAMPLE_S + SAMPLE_S + 1.0
    later.state.restore(kept.events, kept.samples)
    assert later.state.snapshot().samples == ()


def test_start_of_a_process_does_not_drift() -> None:
    scene = Scene()
    for _ in range(3):
        scene.beat(uptime_s=60.4 + scene.now)
    assert scene.state.snapshot().processes["decode-1"]["started_at"] == 940
    assert len([each for each in (scene.state.delta(), scene.state.delta()) if each.changed]) == 1


def test_other_sites_are_links_and_no_processes() -> None:
    scene = Scene()
    scene.beat("b/gw/00ff")
    up, cut = LinkLoad(site="b"), LinkLoad(site="b", is_cut=True, changed_s=4.0)
    for links in ((up,), (cut,), (up,)):
        scene.beat("gateway-1", gateway=GatewayLoad(), links=links)
    assert "b/gw/00ff" not in scene.state.snapshot().processes
    assert [(each.kind, each.process_id) for each in scene.state.events.all] == [
        ("joined", "gateway-1"),
        ("link cut", "link to b"),
        ("returned", "link to b"),
    ]


def test_deltas_have_speeds_of_links_at_times_and_a_cut_at_once() -> None:
    scene = Scene()

    def links(**fields: Any) -> Any:
        link = LinkLoad(site="b", **fields)
        scene.beat("gateway-1", gateway=GatewayLoad(), links=(link,))
        return scene.state.delta().lists.get("links")

    (first,) = links(sent_bytes=1)
    assert (first.site, first.is_cut) == ("b", False)
    assert links(sent_bytes=1000) is None
    assert links(is_cut=True, changed_s=4.0)[0].loss == "link to site b: cut for 4 s"
    scene.now += LINKS_S
    assert links(is_cut=True, changed_s=9.0)[0].for_s == 9
