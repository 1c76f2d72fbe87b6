"""The states of models: by hand, and against random workers that are slow, die and never answer."""

import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from services.host.budget import ModelKey, ModelMemory
from services.host.host_load import host_load
from services.host.hosted_model import (
    FIRST_START_LIMIT_S,
    MAX_FAILURES,
    Action,
    KillAction,
    ParkAction,
    ResizeAction,
    StartAction,
    StopAction,
    WakeAction,
)
from services.host.hosted_revisions import HostedRevision
from services.host.model_states import HostStates
from shared.errors import HearthError, NoCapacity, UnknownModel, WorkerBusy
from shared.model_registry.record import RegisteredModel, RegisteredRevision

BUDGET = 100


def key(name: str) -> ModelKey:
    return ModelKey(name, "r1")


def memory(name: str, fixed: int = 10, floor: int = 20, **fields: object) -> ModelMemory:
    options = {"weights_bytes": fixed, "process_bytes": 0, "kv_floor_bytes": floor} | fields
    return ModelMemory(key=key(name), **options)  # type: ignore[arg-type]


def host(*names: str, budget: int = BUDGET, **fields: object) -> HostStates:
    states = HostStates({"cpu": budget})
    for name in names:
        states.put(memory(name, **fields), 0.0)  # type: ignore[arg-type]
    return states


def in_standby(*names: str, budget: int = BUDGET) -> HostStates:
    states = host(*names, budget=budget)
    for _ in names:
        (start,) = states.next_actions(0.0)
        assert isinstance(start, StartAction) and start.kv_bytes is None
        states.standby(start.key, 0.0)
        states.put(memory(start.key.name), 0.0, is_known=True)
    assert states.next_actions(0.0) == []
    return states


def state_of(states: HostStates, name: str) -> str:
    found = states.find(key(name))
    assert found is not None
    return found.state


def make_hot(states: HostStates, name: str, now: float) -> None:
    states.wake(key(name), now)
    (wake,) = states.next_actions(now)
    assert isinstance(wake, WakeAction)
    states.hot(wake.key, now)


def test_all_models_that_fit_are_started_into_standby_one_at_a_time() -> None:
    states = in_standby("a", "b", "c", "d", "e")
    assert {each.state for each in states.models()} == {"standby"}


def test_wake_is_idempotent_and_serialised() -> None:
    states = in_standby("a", "b")
    first = states.wake(key("a"), 1.0)
    assert states.wake(key("a"), 1.0) == first and first.ready_in_s == 0.5
    assert states.wake(key("b"), 1.0).ready_in_s == 1.0  # after a
    assert states.next_actions(1.0) == [WakeAction(key("a"), 20)]
    assert states.wake(key("a"), 1.2).ready_in_s == pytest.approx(0.3)
    assert states.next_actions(1.2) == []
    states.hot(key("a"), 1.5)
    assert states.next_actions(1.5) == [WakeAction(key("b"), 20)]
    assert states.wake(key("a"), 1.5).ready_in_s == 0.0


def test_cache_grows_when_alone_and_shrinks_before_another_wakes() -> None:
    states = in_standby("a", "b")
    make_hot(states, "a", 1.0)
    assert states.next_actions(3.0) == [ResizeAction(key("a"), 80)]
    states.wake(key("b"), 4.0)
    assert states.next_actions(4.0) == [ResizeAction(key("a"), 40)]
    states.resized(key("a"), 70)  # running requests hold the rest
    assert states.next_actions(4.5) == []
    states.resized(key("a"), 40)
    assert states.next_actions(5.0) == [WakeAction(key("b"), 20)]
    states.hot(key("b"), 5.0)
    assert states.next_actions(9.0) == [ResizeAction(key("b"), 40)]


def test_wake_that_needs_a_hot_models_place_is_refused_with_a_time() -> None:
    states = in_standby("a", "b", budget=45)
    make_hot(states, "a", 1.0)
    with pytest.raises(NoCapacity, match="lacks 15 B for model b") as raised:
        states.wake(key("b"), 1.0)
    assert raised.value.retry_after_s == 1.0
    assert states.park(key("a"), 2.0) == [ParkAction(key("a"))]
    assert states.park(key("a"), 2.0) == []  # parks already
    states.wake(key("b"), 2.0)
    assert states.next_actions(2.0) == []  # a still has its cache
    states.standby(key("a"), 3.0)
    assert states.next_actions(3.0) == [WakeAction(key("b"), 20)]


def test_wake_is_dropped_if_the_other_one_does_not_park_after_all() -> None:
    states = in_standby("a", "b", budget=45)
    make_hot(states, "a", 1.0)
    states.park(key("a"), 2.0)
    states.wake(key("b"), 2.0)
    states.hot(key("a"), 3.0)
    assert states.next_actions(3.0) == [ResizeAction(key("a"), 25)]
    assert state_of(states, "b") == "standby" and state_of(states, "a") == "hot"
    with pytest.raises(NoCapacity):
        states.wake(key("b"), 3.0)


def test_cold_wake_stops_a_standby_model_first() -> None:
    states = in_standby("a", "b", budget=45)
    states.put(memory("c", is_standby_wanted=True), 1.0, is_known=True)
    assert states.wake(key("c"), 1.0).ready_in_s == 10.0
    with pytest.raises(NoCapacity):  # d would not fit beside c
        states.put(memory("d"), 1.0)
        states.wake(key("d"), 1.0)
    assert states.next_actions(1.0) == [StopAction(key("a"))]
    states.ended(key("a"), "exit status 0", 1.5)
    assert state_of(states, "a") == "cold"
    assert states.next_actions(1.5) == [StartAction(key("c"), "cpu", 20)]


def test_busy_models_do_not_park() -> None:
    states = in_standby("a")
    states.wake(key("a"), 1.0)
    states.next_actions(1.0)
    with pytest.raises(WorkerBusy, match=r"model a \(r1\) is waking"):
        states.park(key("a"), 1.0)


def test_wake_that_never_ends_is_given_up_and_tried_again() -> None:
    states = in_standby("a")
    states.wake(key("a"), 1.0)
    states.next_actions(1.0)
    assert states.next_actions(30.9) == []
    assert states.next_actions(31.1) == [KillAction(key("a"), "waking for 30 s")]
    assert states.next_actions(31.2) == []
    states.ended(key("a"), "SIGKILL", 31.3)
    assert states.next_actions(31.3) == []  # a pause
    assert states.next_actions(31.6) == [StartAction(key("a"), "cpu", 20)]


def test_workers_of_a_host_that_was_frozen_are_not_given_up() -> None:
    states = in_standby("a")
    states.wake(key("a"), 1.0)
    states.next_actions(1.0)
    states.stalled(40.0)
    assert states.next_actions(41.0) == []
    assert states.next_actions(71.1) == [KillAction(key("a"), "waking for 30 s")]


def test_wake_of_a_model_that_was_never_started_ends_in_standby_first() -> None:
    states = host("a")
    states.wake(key("a"), 0.0)
    assert states.next_actions(0.0) == [StartAction(key("a"), "cpu", None)]
    assert states.next_actions(1.0) == []
    states.standby(key("a"), 2.0)
    assert states.next_actions(2.0) == [WakeAction(key("a"), 20)]


def test_first_start_may_take_long() -> None:
    states = host("a")
    states.next_actions(0.0)
    assert states.next_actions(FIRST_START_LIMIT_S) == []
    assert isinstance(states.next_actions(FIRST_START_LIMIT_S + 1)[0], KillAction)


def test_worker_that_keeps_dying_is_failed_and_says_why() -> None:
    states, now = host("a"), 0.0
    for attempt in range(MAX_FAILURES):
        (start,) = states.next_actions(now)
        assert isinstance(start, StartAction)
        states.ended(key("a"), "exit status 2: no such tensor", now)
        assert state_of(states, "a") == ("failed" if attempt == MAX_FAILURES - 1 else "cold")
        found = states.find(key("a"))
        assert found is not None and found.failure == "exit status 2: no such tensor"
        now += 30.0
    with pytest.raises(
        NoCapacity, match="the model 'a' cannot be served: its worker keeps ending"
    ) as raised:
        states.wake(key("a"), 60.1)
    assert raised.value.retry_after_s is not None
    assert states.next_actions(now + 30.0) == [StartAction(key("a"), "cpu", None)]  # still tried
    states.standby(key("a"), now + 31.0)
    assert state_of(states, "a") == "standby"


def test_hot_worker_that_dies_becomes_hot_again() -> None:
    states = in_standby("a")
    make_hot(states, "a", 1.0)
    states.ended(key("a"), "SIGKILL", 2.0)
    assert state_of(states, "a") == "cold"
    assert states.next_actions(2.3) == [StartAction(key("a"), "cpu", 20)]


def test_lost_device_pauses_all_its_models() -> None:
    states = in_standby("a", "b")
    states.ended(key("a"), "exit status 3", 1.0, lost_device=True)
    assert states.next_actions(5.9) == []
    with pytest.raises(NoCapacity, match="device cpu was lost") as raised:
        states.wake(key("a"), 5.0)
    assert raised.value.retry_after_s == pytest.approx(1.0 + 10.0)
    assert isinstance(states.next_actions(6.1)[0], StartAction)


def test_model_that_never_fits_is_failed_for_good() -> None:
    states = host("a", fixed=90)
    with pytest.raises(
        NoCapacity, match="its memory of 110 B is over the budget of 100 B"
    ) as raised:
        states.wake(key("a"), 0.0)
    assert raised.value.retry_after_s is None
    states.put(memory("a"), 1.0)
    states.restore(key("a"), 1.0)
    assert states.next_actions(1.0) == [StartAction(key("a"), "cpu", None)]


def test_removed_model_stops_and_is_unknown() -> None:
    states = in_standby("a")
    make_hot(states, "a", 1.0)
    states.remove(key("a"))
    assert states.next_actions(1.0) == [StopAction(key("a"))]
    with pytest.raises(UnknownModel):
        states.wake(key("a"), 1.0)
    states.ended(key("a"), "exit status 0", 2.0)
    assert list(states.models()) == []


def test_measured_sizes_beyond_the_budget_are_corrected() -> None:
    states = in_standby("a", "b")
    make_hot(states, "a", 1.0)
    states.put(memory("b", fixed=75), 2.0)
    assert states.next_actions(2.0)[0] == StopAction(key("b"))


def test_caches_shrink_by_what_measured_sizes_are_beyond_the_budget() -> None:
    """Also by less than other changes are worth."""
    states = in_standby("a", "b")
    make_hot(states, "a", 1.0)
    (grown,) = states.next_actions(3.0)
    assert grown == ResizeAction(key("a"), 80)
    states.resized(key("a"), 80)
    states.put(memory("b", fixed=14), 4.0)
    assert states.next_actions(5.0) == [ResizeAction(key("a"), 76)]
    states.resized(key("a"), 76)
    assert states.devices["cpu"].used_bytes == BUDGET


def test_cold_model_wakes_on_the_device_with_room() -> None:
    states = HostStates({"cuda:0": 40, "cuda:1": 40})
    for name in ("a", "b", "c"):
        states.put(memory(name), 0.0)
    on_first = [each.key for each in states.devices["cuda:0"].models.values()]
    first, last = on_first[0], on_first[-1]
    states.wake(first, 0.0)
    states.wake(last, 0.0)
    assert {each.device for each in states.models() if each.is_wake_wanted} == {"cuda:0", "cuda:1"}


def test_cache_that_is_not_elastic_gets_its_size_with_the_wake() -> None:
    states = HostStates({"cuda:0": BUDGET})
    for name in ("a", "b"):
        states.put(memory(name), 0.0, is_known=True)
        (start,) = states.next_actions(0.0)
        states.standby(start.key, 0.0)
    states.wake(key("a"), 1.0)
    assert states.next_actions(1.0) == [WakeAction(key("a"), 20 + 60 // 2)]
    states.hot(key("a"), 1.0)
    assert states.next_actions(9.0) == []
    states.wake(key("b"), 9.0)
    assert states.next_actions(9.0) == [WakeAction(key("b"), 20 + 10 // 2)]
    states.hot(key("b"), 9.0)
    states.put(memory("c"), 9.0)
    with pytest.raises(NoCapacity):
        states.wake(key("c"), 9.0)


# ── weights in memory of the host ────────────────────────────────────────────────────────────────


def with_offload(*names: str, offload_bytes: int = 80) -> HostStates:
    """Returns a host with the models in standby that fit there."""
    states = HostStates({"cuda:0": BUDGET}, offload_bytes)
    for name in names:
        states.put(memory(name, 40, 10, process_bytes=5), 0.0, is_known=True)
    for _ in names:
        for start in states.next_actions(0.0):
            states.standby(start.key, 0.0)
    return states


def test_parked_models_take_the_device_of_their_processes_alone() -> None:
    """The third model finds no memory of the host, and its weights no room on the device."""
    states = with_offload("a", "b", "c")
    assert [each.state for each in states.models()] == ["cold", "standby", "standby"]
    assert states.devices["cuda:0"].used_bytes == 2 * 5
    states.wake(key("c"), 1.0)
    assert states.next_actions(1.0) == [WakeAction(key("c"), 10 + (100 - 10 - 50) // 2)]
    states.hot(key("c"), 2.0)
    assert states.devices["cuda:0"].used_bytes == 5 + 45 + 30
    with pytest.raises(NoCapacity, match="lacks 30 B for model b"):
        states.wake(key("b"), 2.0)
    states.park(key("c"), 3.0)
    states.wake(key("b"), 3.0)
    assert states.next_actions(3.0) == []  # c still has its weights there
    states.standby(key("c"), 4.0)
    assert states.next_actions(4.0) == [WakeAction(key("b"), 30)]


def test_schedulers_learn_what_parking_frees() -> None:
    """Caches of CUDA devices do not shrink: the present size is the least."""
    states = with_offload("a")
    states.wake(key("a"), 1.0)
    (wake,) = states.next_actions(1.0)
    states.hot(wake.key, 1.0)
    model = RegisteredModel(name="a", revisions=(RegisteredRevision(name="r1", source="a"),))
    hosted = HostedRevision(key("a"), model, model.revisions[0])
    (found,) = host_load(states, [hosted], 1.0).models
    assert found.kv_floor_bytes == found.kv_bytes == 10 + (100 - 55) // 2
    assert (found.weights_bytes, found.offloaded_bytes) == (45, 40)


def test_weights_that_stay_after_all_count() -> None:
    """What is too much then ends."""
    states = with_offload("a", "b")
    states.offloaded(key("a"), 0)
    assert states.devices["cuda:0"].used_bytes == 45 + 5
    states.put(memory("b", 60, 10, process_bytes=5), 1.0)
    states.offloaded(key("b"), 0)
    assert states.next_actions(1.0) == [StopAction(key("a"))]


def test_wake_without_memory_is_tried_again_and_then_dropped() -> None:
    states, now = with_offload("a"), 1.0
    states.wake(key("a"), now)
    for attempt in range(MAX_FAILURES):
        (wake,) = states.next_actions(now)
        assert isinstance(wake, WakeAction)
        states.wake_refused(key("a"), "40 B of weights do not fit", now)
        assert state_of(states, "a") == "standby"
        assert states.devices["cuda:0"].used_bytes == 5
        assert states.next_actions(now) == []
        now += 0.3 * 2**attempt
    assert states.next_actions(now + 60.0) == []
    states.wake(key("a"), now + 60.0)
    (wake,) = states.next_actions(now + 60.0)
    states.hot(wake.key, now + 61.0)
    assert state_of(states, "a") == "hot"


def test_first_park_of_many_weights_may_take_long() -> None:
    """Pages are locked at a GiB a second."""
    states = HostStates({"cuda:0": 300 << 30}, 200 << 30)
    states.put(memory("a", 140 << 30, 1 << 30), 0.0, is_known=True)
    states.wake(key("a"), 0.0)
    (start,) = states.next_actions(0.0)
    states.hot(start.key, 1.0)
    states.park(key("a"), 2.0)
    assert states.next_actions(140.0) == []
    assert isinstance(states.next_actions(150.0)[0], KillAction)


# ── random workers ───────────────────────────────────────────────────────────────────────────────


@dataclass
class RandomWorld:
    """Carries out actions late, in any order, and with faults while `has_faults`."""

    draw: random.Random
    states: HostStates
    now: float = 0.0
    has_faults: bool = True
    pending: list[Action] = field(default_factory=list)
    kv: dict[ModelKey, int] = field(default_factory=dict)
    told: set[ModelKey] = field(default_factory=set)  # to offload in standby
    offloaded: set[ModelKey] = field(default_factory=set)

    def begin(self, actions: list[Action]) -> None:
        for each in actions:
            is_endless = self.has_faults and self.draw.random() < 0.1
            if isinstance(each, KillAction):
                self._drop(each.key)
            if isinstance(each, StartAction):
                model = self.states.find(each.key)
                assert model is not None
                (self.told.add if model.memory.offloaded_bytes else self.told.discard)(each.key)
            if not (is_endless and isinstance(each, StartAction | WakeAction | ParkAction)):
                self.pending.append(each)

    def finish_one(self) -> None:
        if not self.pending:
            return
        chosen = self.draw.choice(self.pending).key
        action = next(each for each in self.pending if each.key == chosen)  # in order for each
        self.pending.remove(action)
        model = self.states.find(action.key)
        if model is None:
            return
        if self.has_faults and self.draw.random() < 0.1:
            self.die(action.key)
            return
        match action:
            case StartAction(kv_bytes=None):
                self.offloaded |= self.told & {action.key}
                self.states.standby(action.key, self.now)
            case WakeAction() if self.has_faults and self.draw.random() < 0.2:
                self.states.wake_refused(action.key, "no memory", self.now)
            case StartAction(kv_bytes=kv_bytes) | WakeAction(kv_bytes=kv_bytes):
                self.offloaded.discard(action.key)
                self.kv[action.key] = kv_bytes or 0
                self.states.hot(action.key, self.now)
            case ParkAction():
                if self.has_faults and self.draw.random() < 0.2:
                    self.states.hot(action.key, self.now)
                else:
                    self.kv.pop(action.key, None)
                    self.offloaded |= self.told & {action.key}
                    self.states.standby(action.key, self.now)
            case ResizeAction(kv_bytes=kv_bytes):
                if action.key in self.kv:
                    self.kv[action.key] = kv_bytes
                    self.states.resized(action.key, kv_bytes)
            case StopAction() | KillAction():
                self.die(action.key)

    def die(self, model: ModelKey) -> None:
        self._drop(model)
        self.states.ended(model, "died", self.now, lost_device=self.draw.random() < 0.1)

    def _drop(self, model: ModelKey) -> None:
        self.kv.pop(model, None)
        self.offloaded.discard(model)
        self.pending = [each for each in self.pending if each.key != model]

    def step(self) -> None:
        self.now += self.draw.choice([0.0, 0.01, 0.3, 2.0, 40.0 if self.has_faults else 2.0])
        if self.has_faults:
            self._command()
        else:
            self.finish_one()
        self.begin(self.states.next_actions(self.now))
        self.finish_one()
        self.check()

    def _command(self) -> None:
        model = key(self.draw.choice("abcdef"))
        operation = self.draw.choice([self._wake, self._wake, self._park, self._change])
        with contextlib.suppress(HearthError):
            operation(model)

    def _wake(self, model: ModelKey) -> None:
        first = self.states.wake(model, self.now)
        assert self.states.wake(model, self.now) == first

    def _park(self, model: ModelKey) -> None:
        self.begin(self.states.park(model, self.now))

    def _change(self, model: ModelKey) -> None:
        if self.draw.random() < 0.3:
            self.states.remove(model)
        else:
            self.states.put(in_world(model.name, need=self.draw.uniform(0, 9)), self.now)
            self.states.set_need(model, self.draw.uniform(0, 9))

    def check(self) -> None:
        for device in self.states.devices.values():
            assert device.used_bytes <= device.budget_bytes
            assert len(device.becoming_hot()) <= 1
            real = sum(
                each.memory.fixed_bytes + self.kv.get(each.key, 0)
                for each in device.models.values()
                if each.has_process
            )
            away = self.offloaded & device.models.keys()
            real -= sum(device.models[each].memory.weights_bytes for each in away)
            assert real <= device.budget_bytes
        models = {each.key: each for each in self.states.models() if each.has_process}
        in_use = sum(models[each].memory.weights_bytes for each in self.told & models.keys())
        assert in_use <= self.states.offload_bytes


def in_world(name: str, **fields: object) -> ModelMemory:
    return memory(name, 8, process_bytes=2, **fields)  # type: ignore[arg-type]


def random_worlds(seeds: Iterable[int]) -> Iterator[RandomWorld]:
    for seed in seeds:
        draw = random.Random(seed)
        budgets = draw.choice([{"cpu": 50}, {"cpu": 90}, {"cuda:0": 60, "cuda:1": 45}])
        offload_bytes = draw.choice([0, 20, 100]) if "cuda:0" in budgets else 0
        yield RandomWorld(draw, HostStates(budgets, offload_bytes))


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.long)], ids=["some", "more"]
)
def test_random_faults_exceed_no_budget_and_all_recovers(seeds: range) -> None:
    num_hot = 0
    for world in random_worlds(seeds):
        for name in "abcdef":
            world.states.put(in_world(name), 0.0)
        for _ in range(300):
            world.step()
        world.has_faults = False
        world.now += FIRST_START_LIMIT_S
        for name in "abcdef":
            world.states.put(in_world(name), world.now)
        for _ in range(300):
            world.step()
        settled = [each for each in world.states.models() if each.has_process]
        assert {each.state for each in settled} <= {"hot", "standby"}
        assert settled and not any(each.is_wake_wanted for each in world.states.models())
        num_hot += sum(each.state == "hot" for each in settled)
    assert num_hot > len(seeds) // 2
