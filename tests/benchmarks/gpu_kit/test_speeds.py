"""Times beside predictions, copies, profiles and tools, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_kit.kernels import tools
from benchmarks.gpu_kit.kernels.timed import COLD_BYTES, MOST_COPIES, add_time, at_ceilings, in_turn
from benchmarks.gpu_kit.machine import copies
from benchmarks.gpu_kit.machine.memory_links import from_json, to_json
from benchmarks.gpu_kit.model_steps import profile
from benchmarks.gpu_kit.session import Session, Unavailable
from tests.benchmarks.gpu_kit.on_cpu import session_in


def test_longer_of_bytes_and_operations_is_predicted(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    assert at_ceilings(session, 3.0e9, 0.0) == pytest.approx(1e-3)
    assert at_ceilings(session, 3.0e9, 798e9 * 2) == pytest.approx(2e-3)
    add_time(session, "op", lambda: None, num_bytes=1.5e9, flops=1e9, library=lambda: None)
    (row,) = session.rows
    assert (row["predicted_ms"], row["measured_ms"], row["of_roofline"]) == (0.5, 1.0, 0.5)
    assert (row["gb_s"], row["tflop_s"], row["library_ms"]) == (1500.0, 1.0, 1.0)
    assert row["ceiling"] == "assumed"


def test_operands_take_turns_beyond_the_cache(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    large = in_turn(session, lambda seed: seed, COLD_BYTES // 2)
    assert [large() for _ in range(4)] == [0, 1, 2, 0]
    small = in_turn(session, lambda seed: seed, 1)
    assert len({small() for _ in range(100)}) == MOST_COPIES


@contextmanager
def missing(num_bytes: int) -> Iterator[Tensor]:
    raise RuntimeError("operation not supported")
    yield torch.empty(0)


def test_memory_that_is_missing_is_unavailable(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    copies.measure_host(session, 1000, "pageable", copies.pageable)
    copies.measure_host(session, 1000, "registered", missing)
    rates, absent = session.rows
    assert (rates["h2d_gb_s"], rates["d2h_gb_s"]) == (0.0, 0.0)
    assert absent["status"] == "unavailable"
    assert "operation not supported" in absent["reason"]


def test_reader_that_dies_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "share", lambda _: [])
    monkeypatch.setattr(copies, "SIZES", (16,))
    code = "import sys; sys.stdin.read(); sys.exit('invalid device context')"
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with (
        subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as other,
        pytest.raises(RuntimeError, match="invalid device context"),
    ):
        copies.measure_shared(session_in(tmp_path), other)


def test_handles_pass_through_json() -> None:
    for part in (b"\x00\xff", 3, None, True):
        assert from_json(to_json(part)) == part


def test_kernels_of_a_step_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        SimpleNamespace(key="_small", count=10, self_device_time_total=50.0),
        SimpleNamespace(key="_large", count=5, self_device_time_total=150.0),
        SimpleNamespace(key="cudaLaunchKernel", count=15, self_device_time_total=0.0),
    ]
    kernels = profile.by_kernel(events, 5)
    monkeypatch.setattr(profile, "profiled", lambda *_: kernels)
    session = session_in(tmp_path)
    profile.add_table(session, "exact, batch 1", lambda: None)
    found = [(row.get("kernel"), row["us"], row["calls"]) for row in session.rows]
    assert found == [(None, 40.0, 3.0), ("_large", 30.0, 1.0), ("_small", 10.0, 2.0)]
    assert [row["of_step"] for row in session.rows[1:]] == [0.75, 0.25]


def test_profiler_without_kernels_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "profiled", lambda *_: [])
    with pytest.raises(Unavailable, match="profiler"):
        profile.add_table(session_in(tmp_path), "exact", lambda: None)


@pytest.mark.parametrize(
    ("output", "is_wrong"),
    [
        ("launched linear\n========= ERROR SUMMARY: 0 errors\n", False),
        ("========= Invalid __global__ read of size 2\n========= ERROR SUMMARY: 1 error\n", True),
        ("launched linear\n========= Invalid __global__ read of size 2 bytes\n", True),
        ("launched linear\n", False),  # ended before its summary
    ],
)
def test_errors_of_a_tool_are_found(output: str, is_wrong: bool) -> None:
    assert tools.has_errors(output) == is_wrong


def test_tool_is_ended_at_the_deadline() -> None:
    """What it wrote before is kept; a process that it has started may hold its output open."""
    environ = dict(os.environ)
    output, is_complete = tools.run_tool([sys.executable, "-c", "print('done')"], environ, 60.0)
    assert (output, is_complete) == ("done\n", True)
    hanging = [sys.executable, "-c", "import signal; signal.pause()"]
    assert tools.run_tool(hanging, environ, 0.0) == ("", False)


def test_tool_that_is_missing_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "need_device", lambda _: None)
    monkeypatch.setattr(tools, "find_tool", lambda _: None)
    for tool, name in (("memcheck", "compute-sanitizer"), ("ncu", "ncu")):
        with pytest.raises(Unavailable, match=f"{name} is not on the PATH"):
            tools.run(session_in(tmp_path), tool)
