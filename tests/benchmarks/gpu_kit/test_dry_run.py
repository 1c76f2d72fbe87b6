"""Every part of the kit runs without a GPU, behind a hook that hides what a bare machine lacks; in
short runs one of kernels and one of a model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_kit.parts import NAMES
from benchmarks.gpu_kit.session import read_rows
from kernels.device import IS_INTERPRETED
from tests.benchmarks.gpu_kit.dry_parts import FILE, launches_in

ROOT = Path(__file__).parents[3]
SHORT = ("lanes", "handoff")
ELSEWHERE = {"serve", "serve_apart"}  # workers of a cluster launch
RECORD = "record the launches: python -m tests.benchmarks.gpu_kit.dry_parts --write"

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter launches nothing")


@pytest.fixture(
    scope="module", params=[SHORT, pytest.param(NAMES, marks=pytest.mark.long)], ids=["few", "all"]
)
def parts(request: pytest.FixtureRequest) -> tuple[str, ...]:
    names: tuple[str, ...] = request.param
    return names


@pytest.fixture(scope="module")
def rows(parts: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the parts."""
    found = tmp_path_factory.mktemp("dry") / "rows.jsonl"
    command = [sys.executable, "-m", "tests.benchmarks.gpu_kit.dry_parts", str(found), *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return found


def test_each_part_launches_what_is_recorded(parts: tuple[str, ...], rows: Path) -> None:
    """One launch less, or one more, is another count."""
    recorded = json.loads(FILE.read_text())
    assert list(recorded) == list(NAMES)
    found = launches_in(rows)
    assert set(found) == set(parts)
    for part, launches in found.items():
        assert launches == recorded[part], f"part {part} launches something else: {RECORD}"
        assert bool(launches) == (part not in ELSEWHERE), f"part {part} launches nothing"


def test_rows_of_a_dry_run_say_so(rows: Path) -> None:
    found = read_rows(rows)
    assert {row["dry"] for row in found} == {"dry"}
    figures = {"measured_ms", "gb_s", "seconds", "of_roofline", "cost"}
    assert [row for row in found if figures & set(row)] == [], "nothing was measured"


def test_script_runs_a_part(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "gpu_kit"), "out", "--dry-run", "--only", "facts"]
    done = subprocess.run(
        [*command, "--work", "work"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(each["part"], each["status"]) for each in summary["parts"]] == [("facts", "ok")]
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert (rows[0]["part"], rows[0]["case"]) == ("kit", "run")
    begun = [row for row in rows if row["case"] == "begun"]
    assert [row["part"] for row in begun] == ["carried", "facts"]
    assert not any(row["has_torch"] for row in begun)
