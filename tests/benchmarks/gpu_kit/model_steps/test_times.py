"""A step's times: by replays, on the host beside an idle device, and by events of its stages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_kit.model_steps import events, times
from tests.benchmarks.gpu_kit.on_cpu import session_in


class Graph:
    """A captured graph: `replays` counts."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_device_time_is_that_of_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    monkeypatch.setattr(times, "captured", lambda call: graph)
    found = times.device_time(session_in(tmp_path), lambda: None)
    assert (found, graph.replays) == ({"measured_s": 1e-3, "is_captured": True}, 1)


def test_step_that_cannot_be_captured_names_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(times, "captured", refuse)
    found = times.device_time(session_in(tmp_path), torch.arange(3).tolist)
    assert (found["measured_s"], found["is_captured"]) == (1e-3, False)
    assert found["reason"] == "operation not permitted when stream is capturing"
    assert found["waits"] == "Tensor.tolist in no line of the engine"


def test_device_is_idle_before_each_step_that_times_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of several steps would hold the host back, whose time would be the device's."""
    happened: list[str] = []
    session = session_in(tmp_path)
    monkeypatch.setattr(session, "synchronize", lambda: happened.append("idle"))
    found = times.host_time(session, lambda: happened.append("step"), 10)
    assert happened == ["idle", "step", "idle"] * times.EAGER_STEPS
    assert 0 <= found["host_ms"] <= found["eager_ms"]  # rounded
    assert found["us_per_launch"] == pytest.approx(found["host_ms"] * 100, abs=0.2)


def test_views_and_allocations_launch_nothing() -> None:
    pytest.importorskip("triton")
    x = torch.ones(4, 4)
    found = times.count_launches(lambda: torch.empty(4).copy_(x.view(16)[:4].unflatten(0, (4,))))
    assert found == {"triton_launches": 0, "torch_launches": 1}


class Event:
    """An event of a device whose clock goes on by 1 ms an event."""

    clock = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        Event.clock += 1
        self.at = Event.clock

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def test_events_are_between_the_stages_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Method:
        def logits(self, x: str) -> str:
            Event.clock += 10
            return f"logits of {x}"

    class Model:
        def __init__(self) -> None:
            self.lm_head = SimpleNamespace(method=Method())

        def embed(self, x: str) -> str:
            return x

        def run_layers(self, x: str) -> str:
            Event.clock += 100
            return f"layers of {x}"

        def argmax_tokens(self, x: str) -> str:
            found = self.lm_head.method.logits(x)
            Event.clock += 5
            return f"ids of {found}"

    model: Any = Model()
    watched = events.StepEvents(model)
    for _ in range(2):  # the last step's times
        found = model.argmax_tokens(model.run_layers(model.embed("x")))
    assert found == "ids of logits of layers of x"
    assert watched.milliseconds() == {"forward": 101.0, "head": 11.0, "draw": 6.0}
