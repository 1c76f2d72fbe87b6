"""The process table of `hearth status`, on a simulated clock."""

import re

import msgspec
import pytest

from services.cli.fleet.fleet_tables import tables
from services.cli.fleet.report import FleetReport
from services.cli.output import text_console
from shared.fleet.fleet_view import SHOW_LOST_S, FleetView, ProcessView
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S, TICK_S, Loss
from shared.messages import (
    DeviceHealth,
    DevicePeaks,
    GatewayLoad,
    Heartbeat,
    IndexLoad,
    KvLinks,
    ProcessState,
    Role,
    RoleDemand,
    SchedulerLoad,
    WorkerLoad,
)
from tests.support.records import model_card

CARD = model_card(
    name="org/model", revision="r", kv_format="k", max_context_tokens=64, vocab_size=9
)


def printed(view: FleetView, width: int = 160) -> str:
    console = text_console(width=width)
    with console.capture() as captured:
        console.print(tables(FleetReport.of(view, None, 0.0), width, 0.0))
    return captured.get()


class Play:
    """A decode worker and a gateway send heartbeats; the server replies at every tick."""

    def __init__(self) -> None:
        self.view = FleetView()
        self.now = 50.0
        self.number = 0
        self.load = WorkerLoad(step=0, step_budget_s=0.1)
        self.card = CARD
        self.peaks: DevicePeaks | None = None

    def send_heartbeat(
        self, process_id: str, role: Role, *, epoch: int = 1, state: ProcessState = "ready"
    ) -> None:
        is_worker = role == "decode"
        heartbeat = Heartbeat(
            process_id=process_id,
            epoch=epoch,
            sequence_number=self.number,
            roles=(role,),
            state=state,
            interval_s=HEARTBEAT_INTERVAL_S,
            region="west" if is_worker else "",
            load=self.load if is_worker else None,
            model=self.card if is_worker else None,
        )
        self.view.observe(heartbeat, self.now)

    def play(
        self,
        seconds: float,
        *,
        tokens_per_s: int = 0,
        has_worker: bool = True,
        is_stepping: bool = True,
        has_echo: bool = True,
    ) -> None:
        end, next_heartbeat = self.now + seconds, self.now
        while self.now < end:
            if self.now >= next_heartbeat:
                self._send_heartbeats(tokens_per_s, has_worker, is_stepping)
                next_heartbeat += HEARTBEAT_INTERVAL_S
            self.now += TICK_S
            if has_echo:
                self.view.echo(self.now)
            self.view.tick(self.now)

    def _send_heartbeats(self, tokens_per_s: int, has_worker: bool, is_stepping: bool) -> None:
        self.number += 1
        busy_share = min(2.0, tokens_per_s / 640)  # a long step counts when it ends
        num_tokens = int(tokens_per_s * HEARTBEAT_INTERVAL_S)
        self.load = WorkerLoad(
            step=self.load.step + is_stepping,
            step_budget_s=0.1,
            num_running=3,
            num_free_blocks=7,
            num_total_blocks=9,
            num_generated_tokens=self.load.num_generated_tokens + num_tokens,
            num_computed_prompt_tokens=self.load.num_computed_prompt_tokens + 2 * num_tokens,
            busy_s=self.load.busy_s + busy_share * HEARTBEAT_INTERVAL_S,
            traffic_bytes=self.load.traffic_bytes + num_tokens * 1e9,
            num_operations=self.load.num_operations + num_tokens * 1e11,
            peaks=self.peaks,
            num_prompt_tokens=400,
            num_cached_prompt_tokens=100,
        )
        self.send_heartbeat("gateway-1", "gateway")
        if has_worker:
            self.send_heartbeat("decode-1", "decode")

    @property
    def worker(self) -> ProcessView:
        return self.view.rows()[0]


def test_speeds_are_differences_between_heartbeats() -> None:
    play = Play()
    play.play(0.1)
    assert play.worker.generated_per_s is None  # a rate needs two heartbeats
    play.play(4.0, tokens_per_s=400)
    assert play.worker.generated_per_s == pytest.approx(400, rel=0.2)
    assert play.worker.prefilled_per_s == pytest.approx(800, rel=0.2)
    assert play.worker.busy_ratio == pytest.approx(400 / 640, rel=0.2)
    play.play(3.0, tokens_per_s=6400)
    assert play.worker.busy_ratio == 1.0
    play.play(3.0)
    assert play.worker.generated_per_s == play.worker.busy_ratio == 0
    assert play.worker.hit_ratio == 0.25


def test_work_is_shown_beside_the_peaks_of_the_device() -> None:
    play = Play()
    play.play(1.0)
    assert play.worker.traffic_bytes_per_s is None  # as of a worker that counts no work
    play.play(4.0, tokens_per_s=400)
    assert play.worker.traffic_bytes_per_s == pytest.approx(400e9, rel=0.2)
    assert play.worker.operations_per_s == pytest.approx(40e12, rel=0.2)
    assert play.worker.bandwidth_ratio is play.worker.arithmetic_ratio is None
    play.peaks = DevicePeaks(bytes_per_s=1e12, operations_per_s=400e12)
    play.play(1.0, tokens_per_s=400)
    assert play.worker.bandwidth_ratio == pytest.approx(0.4, rel=0.2)
    assert play.worker.arithmetic_ratio == pytest.approx(0.1, rel=0.2)
    play.play(3.0, tokens_per_s=4000)
    assert play.worker.bandwidth_ratio == 1.0
    play.play(3.0)
    assert play.worker.traffic_bytes_per_s == play.worker.arithmetic_ratio == 0


def test_workers_are_listed_first() -> None:
    play = Play()
    play.play(1.0)
    worker, gateway = play.view.rows()
    assert (worker.process_id, worker.role, worker.model) == ("decode-1", "decode", "org/model")
    assert (worker.region, worker.num_running, worker.num_free_blocks) == ("west", 3, 7)
    assert (gateway.role, gateway.state, gateway.is_worker) == ("gateway", "ready", False)
    assert gateway.generated_per_s is gateway.hit_ratio is None


def test_silent_worker_is_lost_until_heartbeat_or_removal() -> None:
    play = Play()
    play.play(2.0)
    play.play(SILENCE_LIMIT_S + 1.0, has_worker=False)
    assert (play.worker.state, play.worker.is_lost) == ("silent", True)
    assert play.worker.generated_per_s is None
    play.play(0.5)
    assert play.worker.state == "ready"
    play.play(SILENCE_LIMIT_S + SHOW_LOST_S + 1.0, has_worker=False)
    assert [row.process_id for row in play.view.rows()] == ["gateway-1"]


def test_lost_replica_is_shown_until_another_takes_its_place() -> None:
    play = Play()
    for name in ("decode.a", "decode.b", "prefill.a"):
        play.number += 1
        play.send_heartbeat(name, "decode")
    play.view.lose("decode.a", Loss.UNRESPONSIVE, play.now)
    play.view.lose("prefill.a", Loss.UNRESPONSIVE, play.now)
    play.now += 90.0
    play.view.forget(play.now)
    lost = [row for row in play.view.rows(play.now) if row.is_lost]
    assert [(row.process_id, row.state_age_s) for row in lost] == [
        ("decode.a", 90),
        ("prefill.a", 90),
    ]
    play.send_heartbeat("decode.c", "decode")
    assert [row.process_id for row in play.view.rows()] == ["decode.b", "decode.c", "prefill.a"]


def test_worker_without_new_steps_remains_listed_as_stuck() -> None:
    play = Play()
    play.play(2.0)
    play.play(15.0, is_stepping=False)
    assert play.worker.state == "stuck"
    play.play(0.5)
    assert play.worker.state == "ready"


def test_stopped_worker_is_starting_after_a_restart() -> None:
    play = Play()
    play.play(2.0)
    play.number += 1
    play.send_heartbeat("decode-1", "decode", state="stopped")
    play.play(1.0, has_worker=False)
    assert play.worker.state == "stopped"
    play.load = WorkerLoad(step=0, step_budget_s=0.1)
    play.number = 1
    play.send_heartbeat("decode-1", "decode", epoch=2, state="starting")
    assert (play.worker.state, play.worker.generated_per_s) == ("starting", None)


def test_rates_ignore_counters_before_a_restart() -> None:
    play = Play()
    play.play(2.0, tokens_per_s=4000)
    play.load = WorkerLoad(step=0, step_budget_s=0.1)
    play.send_heartbeat("decode-1", "decode", epoch=2)
    assert play.worker.generated_per_s is None


def test_no_process_is_lost_while_the_server_is_silent() -> None:
    play = Play()
    play.play(2.0)
    play.play(5.0, has_worker=False, has_echo=False)
    assert [row.state for row in play.view.rows()] == ["ready", "ready"]


def test_index_state_and_number_of_blocks_are_shown() -> None:
    play = Play()
    heartbeat = Heartbeat(
        process_id="kv_index-1",
        epoch=1,
        sequence_number=1,
        roles=("kv_index",),
        state="ready",
        interval_s=HEARTBEAT_INTERVAL_S,
        index=IndexLoad(state="degraded", num_blocks=812),
    )
    play.view.observe(heartbeat, play.now)
    (index,) = play.view.rows()
    assert (index.index_state, index.num_indexed_blocks) == ("degraded", 812)
    assert "degraded, 812 blocks" in printed(play.view)


def test_imbalance_of_experts_is_shown() -> None:
    play = Play()
    for imbalance, cell in ((0.0, None), (2.468, 2.47)):
        play.load = WorkerLoad(step=1, step_budget_s=0.1, expert_imbalance=imbalance)
        play.send_heartbeat("decode-1", "decode")
        (row,) = play.view.rows()
        assert row.expert_imbalance == cell
        shown = printed(play.view)
        assert ("experts" in shown) == (cell is not None)  # no empty column
    assert "2.47 x" in shown


def test_links_of_a_prefill_worker_are_shown() -> None:
    play = Play()
    links = (KvLinks("memfd", "same host", 2), KvLinks("tcp", "other host", 1, "nixl"))
    play.load = WorkerLoad(step=0, step_budget_s=0.1, kv_links=links)
    play.send_heartbeat("decode-1", "decode")
    (row,) = play.view.rows()
    assert row.kv_links == "2 memfd (same host), 1 tcp (other host, nixl failed)"


def test_health_of_gpus_is_shown_if_something_is_wrong() -> None:
    for health, shown in (
        (None, ""),
        (DeviceHealth(), ""),
        (
            DeviceHealth(throttles=("thermal",), num_xids=1, last_xid=63),
            "throttled (thermal), Xid 63",
        ),
        (DeviceHealth(row_remap="pending", unread_s=12.4), "row remap pending, not read for 12 s"),
        (
            DeviceHealth(fault="Xid 79: the GPU has fallen off the bus"),
            "Xid 79: the GPU has fallen",
        ),
    ):
        play = Play()
        play.load = WorkerLoad(step=1, step_budget_s=0.1, device_health=health)
        play.send_heartbeat("decode-1", "decode")
        found = printed(play.view)
        assert ("GPU" in found, shown in found) == (bool(shown), True)


def test_mode_and_launch_of_steps_on_gpus_are_shown() -> None:
    for launch, shown in ((msgspec.UNSET, False), ("graphs", True)):
        play = Play()
        play.card = model_card(step_launch=launch)
        play.send_heartbeat("decode-1", "decode")
        assert ("exact, graphs" in printed(play.view)) == shown
        assert b"step_launch" not in msgspec.msgpack.encode(model_card())


def test_counts_of_unequal_numerics_are_shown_beside_their_gateway() -> None:
    play = Play()
    heartbeat = Heartbeat(
        process_id="gateway-1",
        epoch=1,
        sequence_number=1,
        roles=("gateway",),
        state="ready",
        interval_s=HEARTBEAT_INTERVAL_S,
        gateway=GatewayLoad(num_unlike_prefills=6, num_numerics_changes=2),
    )
    play.view.observe(heartbeat, play.now)
    (gateway,) = play.view.rows()
    assert (gateway.num_unlike_prefills, gateway.num_numerics_changes) == (6, 2)
    header, row = printed(play.view).splitlines()[2:4]
    assert header.split()[-5:] == ["unlike", "prefills", "numerics", "changes", "state"]
    assert row.split() == ["gateway-1", "gateway", "0", "6", "2", "ready"]


def test_advice_of_live_schedulers_is_shown_by_model_and_role() -> None:
    demand = RoleDemand(
        model="m", role="decode", num_queued_requests=3, num_workers=1, num_wanted_workers=4
    )
    view, load = FleetView(), SchedulerLoad(demands=(demand,))
    for number in (1, 2):
        beat = Heartbeat(
            process_id=f"scheduler-{number}",
            epoch=1,
            sequence_number=1,
            roles=("scheduler",),
            state="ready",
            interval_s=0.25,
            scheduler=load,
        )
        view.observe(beat, 0.0)
    view.observe(msgspec.structs.replace(beat, sequence_number=2, state="stopped"), 0.1)
    assert view.demands() == [demand]
    assert re.search(r"^m +decode +1 +4 +3 +0 +0\.0", printed(view), re.MULTILINE)


def test_hits_of_the_last_minute_leave_out_earlier_prompts() -> None:
    play = Play()
    play.load = WorkerLoad(step=0, step_budget_s=0.1)

    def prompts(num_tokens: int, num_cached: int) -> None:
        play.load = msgspec.structs.replace(
            play.load,
            num_prompt_tokens=play.load.num_prompt_tokens + num_tokens,
            num_cached_prompt_tokens=play.load.num_cached_prompt_tokens + num_cached,
        )

    def beat_for(seconds: float) -> None:
        for _ in range(int(seconds / HEARTBEAT_INTERVAL_S)):
            play.number += 1
            play.now += HEARTBEAT_INTERVAL_S
            play.send_heartbeat("decode-1", "decode")

    prompts(1000, 0)
    beat_for(1)
    assert play.worker.recent_hit_ratio is None  # nothing since it is observed
    prompts(400, 100)
    beat_for(30)
    assert play.worker.recent_hit_ratio == 0.25
    beat_for(40)
    assert play.worker.recent_hit_ratio is None
    prompts(100, 90)
    beat_for(1)
    assert play.worker.recent_hit_ratio == 0.9
    assert play.worker.hit_ratio == pytest.approx(190 / 1500, abs=0.001)


def test_age_of_the_last_step() -> None:
    play = Play()
    play.play(3.0)
    assert play.view.rows(play.now)[0].step_age_s is None  # below a second
    play.play(2.5, is_stepping=False)
    assert play.view.rows(play.now)[0].step_age_s == 2
    assert play.worker.step_age_s is None
    play.play(0.5)
    assert play.view.rows(play.now)[0].step_age_s is None
