"""The stored result of a child process that compiled, or that failed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest

from kernels.cpu import probe
from kernels.cpu.codec import try_frame


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    probe.failure.cache_clear()
    probe.frames_failure.cache_clear()


def test_llvm_abort_is_a_permanent_failure() -> None:
    probe.record(-signal.SIGABRT, "LLVM ERROR: Cannot select: intrinsic %llvm.x86.x\nstack dump\n")
    assert probe.known_failure() == probe.failure()
    assert "signal 6: LLVM ERROR: Cannot select" in (probe.failure() or "")


def test_killed_child_is_not_recorded() -> None:
    probe.record(-signal.SIGKILL, "")
    assert probe.known_failure() is None
    assert list(Path(str(numba.config.CACHE_DIR)).iterdir()) == []


def test_successful_compilation_is_not_repeated() -> None:
    probe.record(0, "")
    assert probe.failure() is None


def test_frames_are_tried_alone_unless_a_result_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a child of their own, once."""
    monkeypatch.setattr(probe, "FRAMES_CHILD", "no_such_module")
    assert "exit status 1: " in (probe.frames_failure() or "")
    monkeypatch.setattr(probe, "FRAMES_CHILD", "this")
    probe.frames_failure.cache_clear()
    assert "no_such_module" in (probe.frames_failure() or "")
    probe.record(0, "")
    probe.frames_failure.cache_clear()
    assert probe.frames_failure() is None


def test_child_of_frames_codes_one() -> None:
    assert try_frame.main() == 0
