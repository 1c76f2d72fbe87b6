"""The rows of GPU tests, with small tests instead: each is written as its test ends."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.gpu_kit.kernels import gpu_tests, pytest_rows
from benchmarks.gpu_kit.kernels.pytest_rows import is_in_shard, kernels_of
from benchmarks.gpu_kit.session import Mode, Session
from benchmarks.gpu_kit.sources import sources_digest
from benchmarks.gpu_results.runs import Row, whole_rows
from kernels.device import IS_INTERPRETED

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.benchmarks.gpu_kit.killed_tests"]
ONE_PROCESS = ("-n", "0")
NUM_KILLS, NUM_SHORT_KILLS = 20, 3
NUM_TESTS = 200
KILLED = """
import os
import pytest

@pytest.mark.parametrize("index", range({num}))
def test_started(index):
    os.write({pipe}, b".")
"""
MIXED = """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("not closed")

def test_passes(): pass
def test_fails(record_property):
    record_property("kernels", ("linear", "lane_linear"))
    raise ValueError("1" * 1000)
def test_is_not_closed(broken): pass
def test_skips(): pytest.skip("no device")
"""
LOST = """
import os
import sys
from types import SimpleNamespace

def test_loses_the_device():
    def fail():
        raise RuntimeError("an illegal memory access")
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=fail)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)

def test_has_a_device(): assert "torch" not in sys.modules
def test_has_one_too(): assert "torch" not in sys.modules
"""


def write_tests(folder: Path, text: str) -> Path:
    path = folder / "test_small.py"
    path.write_text(text)
    return path


def rows_of(folder: Path, *arguments: str, ends: int = 1) -> dict[str, list[Row]]:
    """Runs the tests. Returns the rows by test name."""
    rows = folder / "rows.jsonl"
    done = subprocess.run([*COMMAND, rows, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == ends, done.stdout + done.stderr
    found: dict[str, list[Row]] = {}
    for row in whole_rows(rows):
        found.setdefault(row["case"].rpartition("::")[2], []).append(row)
    return found


def outcomes(rows: list[Row]) -> list[str]:
    return [row["outcome"] for row in rows]


@pytest.mark.parametrize("processes", [(), ONE_PROCESS], ids=["workers", "one process"])
def test_every_test_has_a_row(processes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    write_tests(tmp_path, MIXED)
    found = rows_of(tmp_path, str(tmp_path), *processes)
    (counts,) = found.pop("counts")
    assert counts["by_outcome"] == {"failed": 3, "passed": 1, "skipped": 1}
    assert not counts["is_late"]
    (broken,) = (rows for name, rows in found.items() if name.endswith("test_broken.py"))
    assert outcomes(broken) == ["failed"]
    assert "no_such_module" in broken[0]["message"]
    assert outcomes(found["test_passes"]) == ["passed"]
    assert found["test_passes"][0]["seconds"] >= 0
    assert outcomes(found["test_is_not_closed"]) == ["passed", "failed"]
    assert outcomes(found["test_skips"]) == ["skipped"]
    (failed,) = found["test_fails"]
    assert failed["message"] == f"ValueError: {'1' * 1000}"[:600]
    assert failed["sources"] == sources_digest(("linear", "lane_linear"))


def test_worker_that_lost_its_device_is_replaced(tmp_path: Path) -> None:
    """The tests after the one that lost it run in another process."""
    found = rows_of(tmp_path, str(write_tests(tmp_path, LOST)))
    assert outcomes(found["test_loses_the_device"]) == ["passed", "failed"]
    assert "crashed" in found["test_loses_the_device"][1]["message"]
    for name in ("test_has_a_device", "test_has_one_too"):
        assert outcomes(found[name]) == ["passed"]


def test_only_process_that_lost_its_device_stops(tmp_path: Path) -> None:
    found = rows_of(tmp_path, str(write_tests(tmp_path, LOST)), *ONE_PROCESS)
    assert set(found) == {"test_loses_the_device", "counts"}


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed < NUM_SHORT_KILLS else pytest.mark.long)
        for seed in range(NUM_KILLS)
    ],
)
def test_rows_survive_a_kill_at_any_moment(seed: int, tmp_path: Path) -> None:
    """A test writes to a pipe when it starts: the rows of those before it are written by then."""
    num_started = random.Random(seed).randrange(1, NUM_TESTS)
    reader, writer = os.pipe()
    path = write_tests(tmp_path, KILLED.format(num=NUM_TESTS, pipe=writer))
    rows = tmp_path / "rows.jsonl"
    part = subprocess.Popen(
        [*COMMAND, rows, path, *ONE_PROCESS],
        cwd=ROOT,
        pass_fds=[writer],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    os.close(writer)
    for _ in range(num_started):
        assert os.read(reader, 1) == b"."
    os.killpg(part.pid, signal.SIGKILL)
    part.wait()
    num_started += len(os.read(reader, NUM_TESTS))
    os.close(reader)
    ended = [row["case"].rpartition("::")[2] for row in whole_rows(rows)]
    assert ended == [f"test_started[{index}]" for index in range(len(ended))]
    assert num_started - 1 <= len(ended) <= num_started < NUM_TESTS


def test_tests_stop_before_the_session_ends() -> None:
    """The row of the test that ended last is added before."""
    added: list[Row] = []
    session: Any = SimpleNamespace(left_s=math.inf, add=lambda **row: added.append(row))
    plugin = pytest_rows.RowPlugin(session)
    location = ("test_a.py", 0, "test_a")
    report = pytest.TestReport("test_a.py::test_a", location, {}, "passed", None, "call")
    plugin.pytest_runtest_logreport(report)
    assert not plugin.is_late
    session.left_s = 19.9
    with pytest.raises(pytest.exit.Exception):
        plugin.pytest_runtest_logreport(report)
    assert plugin.is_late
    assert len(added) == 2


def test_each_test_is_in_one_shard() -> None:
    names = [f"tests/test_a.py::test[{index}]" for index in range(400)]
    shards = [f"{index}/4" for index in range(1, 5)]
    chosen = [[shard for shard in shards if is_in_shard(name, shard)] for name in names]
    assert {len(each) for each in chosen} == {1}
    assert min(chosen.count([shard]) for shard in shards) > 70
    with pytest.raises(pytest.UsageError, match="none of 1/4 to 4/4"):
        is_in_shard(names[0], "5/4")


def test_shard_runs_its_tests_alone(tmp_path: Path) -> None:
    names = [f"test_{index}" for index in range(8)]
    path = write_tests(tmp_path, "\n".join(f"def {name}(): pass" for name in names))
    found = rows_of(tmp_path, str(path), *ONE_PROCESS, "--shard", "1/2", ends=0)
    chosen = {row["case"] for (row,) in found.values()} - {"counts"}
    assert 0 < len(chosen) < len(names)
    assert all(is_in_shard(each, "1/2") for each in chosen)


def test_operation_under_test_is_known() -> None:
    folder = "tests/kernels/gpu/gemm"
    assert kernels_of(f"{folder}/test_lane_linear.py::test[1]", []) == ("lane_linear",)
    assert kernels_of(f"{folder}/test_first.py::test", [("kernels", ["a", "b"])]) == ("a", "b")
    assert kernels_of("tests/kernels/gpu/test_engine.py::test", []) == ()


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter computes all launches")
@pytest.mark.parametrize(
    ("mode", "chosen"), [("dry", "first"), ("compile", "first"), ("dry", "rest")]
)
def test_every_operation_is_launched_without_a_device(
    mode: Mode, chosen: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from tests.kernels.test_compiles import LAUNCHES

    session = Session("tests", tmp_path / "rows.jsonl", mode=mode)
    with patch.object(JITFunction, "run", lambda self, *args, **kwargs: None):
        gpu_tests.run(session, chosen)
    rows = whole_rows(session.rows_file)
    assert {row["case"] for row in rows} >= set(LAUNCHES)
    assert {row["dry"] for row in rows} == {mode}


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter computes all launches")
def test_kernel_that_does_not_compile_prevents_no_other(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.__name__ == "_linear_kernel":
            raise ValueError("out of registers")

    session = Session("tests", tmp_path / "rows.jsonl", mode="compile")
    expected = pytest.raises(RuntimeError, match=r"failed: linear, .*lane_linear")
    with patch.object(JITFunction, "run", run), expected:
        gpu_tests.run(session, "first")
    assert "sample" in {row["case"] for row in whole_rows(session.rows_file)}
