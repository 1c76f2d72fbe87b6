"""When a run of tests that has passed is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.support.passed_runs import PassedRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PassedRun:
    monkeypatch.delenv("HEARTH_COMPILE_AGAIN", raising=False)
    for name in ("kernel.py", "unrelated.py", "tests/test_kernel.py", "shared/modes.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    run = PassedRun([tmp_path / "tests"], tmp_path / "records", root=tmp_path)
    assert not run.is_current()
    run.record(["kernel.py", "tests/test_kernel.py"])
    assert run.is_current()
    return run


@pytest.mark.parametrize(
    "name", ["kernel.py", "tests/test_kernel.py", "tests/test_new.py", "shared/modes.json"]
)
def test_change_of_a_source_or_a_new_test_runs_it(
    run: PassedRun, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("changed")
    assert not run.is_current()


def test_deletion_of_a_source_runs_it(run: PassedRun, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").unlink()
    assert not run.is_current()


def test_change_of_another_file_does_not_run_it(run: PassedRun, tmp_path: Path) -> None:
    (tmp_path / "unrelated.py").write_text("changed")
    assert run.is_current()


def test_a_variable_runs_it(run: PassedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_COMPILE_AGAIN", "1")
    assert not run.is_current()


def test_other_tests_have_their_own_record(run: PassedRun, tmp_path: Path) -> None:
    assert not PassedRun([tmp_path / "other"], tmp_path / "records", root=tmp_path).is_current()
