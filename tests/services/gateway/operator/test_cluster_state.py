"""Snapshots, deltas and events of a cluster, on a clock that the test sets."""

from __future__ import annotations

from services.gateway.operator.cluster.state import MAX_EVENTS, ClusterView
from shared.fleet.fleet_view import SHOW_LOST_S
from shared.lifecycle.health import Fleet, Loss
from shared.messages import GatewayLoad, Heartbeat, ProcessState, WorkerLoad


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
    ) -> None:
        self.number += 1
        self.now += 0.25
        load = None
        if running is not None and gateway is None:
            load = WorkerLoad(step=self.number, step_budget_s=1.0, num_running=running)
        message = Heartbeat(
            process_id=process_id,
            epoch=1,
            sequence_number=self.number,
            roles=("decode",) if gateway is None else ("gateway",),
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


def test_counters_of_gateways_become_events() -> None:
    scene = Scene()
    scene.beat("gateway-2", gateway=GatewayLoad(num_refused_requests=5))
    scene.beat("gateway-2", gateway=GatewayLoad(num_refused_requests=8, num_resubmissions=1))
    assert scene.events[1:] == [("resubmitted", "gateway-2", 1), ("refused", "gateway-2", 3)]


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
