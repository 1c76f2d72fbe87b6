"""The GPU kit without a GPU: isolation of its parts, limits, rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kit.__main__ import PROBE, Kit, arguments, exit_status
from benchmarks.gpu_kit.kernels.tools import findings, metrics
from benchmarks.gpu_kit.outputs import LOG_BYTES, Outputs
from benchmarks.gpu_kit.parts import CALLS, PARTS, RESERVED_S, Part, parts_named
from benchmarks.gpu_kit.session import MAX_BYTES, Session, read_rows
from kernels.device import IS_INTERPRETED

MODULE = "tests.benchmarks.gpu_kit.behaviours"


def part(
    behaviour: str, *arguments: str, deadline_s: int = 60, needs: tuple[str, ...] = ()
) -> Part:
    return Part(behaviour, deadline_s, "", MODULE, needs, (behaviour, *arguments))


HEALTHY = part("probed")  # no process that imports torch


def kit(folder: Path, *parts: Part, budget_s: float = 540, probe: Part = HEALTHY) -> dict[str, Any]:
    """Runs the parts. Returns the entries of summary.json by part name."""
    outputs = Outputs(folder / "out")
    Kit(outputs, folder / "work", folder / "pack", is_dry=False, probe=probe).run(parts, budget_s)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return {each["part"]: each for each in summary["parts"]}


def rows_of(folder: Path, case: str) -> list[dict[str, Any]]:
    found = read_rows(folder / "out" / "rows.jsonl")
    return [row for row in found if row["case"] == case]


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_rows_of_another_call_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit):
        arguments([str(tmp_path / "out"), "--work", str(tmp_path / "work")])
    assert "has the rows of another call" in capsys.readouterr().err


def test_folder_of_work_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(SystemExit):
        arguments([str(tmp_path / "out"), "--work", str(tmp_path / "home" / "work")])
    assert f"--work {tmp_path}/home/work: Not a directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_part_that_timed_out_fails_the_call() -> None:
    statuses = ("ok", "unavailable", "not built", "not run")
    assert exit_status([{"status": each} for each in statuses]) == 0
    assert exit_status([{"status": each} for each in (*statuses, "timed out")]) == 1


def test_failed_part_does_not_stop_other_parts(tmp_path: Path) -> None:
    names = ("raise", "crash", "not built", "lacks", "flood", "talk")
    missing = part("fine", needs=("torch", "no_such_module"))
    found = kit(tmp_path, *map(part, names), missing, part("last"))
    assert {name: (each["status"], each["reason"]) for name, each in found.items()} == {
        "raise": ("failed", "ValueError: three is not four"),
        "crash": ("failed", "its process ended with status -11"),
        "not built": ("not built", "no such feature"),
        "lacks": ("unavailable", "no such tool"),
        "flood": ("failed", "RuntimeError: the rows of part flood exceed 1048576 bytes"),
        "talk": ("ok", ""),
        "fine": ("unavailable", "not installed: no_such_module"),
        "last": ("ok", ""),
    }
    ran = [row["part"] for row in rows_of(tmp_path, "ran")]
    assert [each for each in ran if each != HEALTHY.name] == [*names, "last"]
    assert ran.count(HEALTHY.name) == 3
    assert not any(row["has_torch"] for row in rows_of(tmp_path, "begun"))
    log = (tmp_path / "out" / "log.txt").read_bytes()
    assert b"Traceback" in log
    assert len(log) < LOG_BYTES + (64 << 10)


def test_deadline_ends_part_and_its_child_processes(tmp_path: Path) -> None:
    found = kit(tmp_path, part("hang", str(tmp_path), deadline_s=3), part("last"), probe=PROBE)
    assert (found["hang"]["status"], found["hang"]["num_rows"]) == ("timed out", 3)
    assert found["last"]["status"] == "ok"
    ids = [int(each) for each in (tmp_path / "ids").read_text().split()]
    assert [each for each in ids if is_running(each)] == []


def test_programs_of_carried_packages_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "packages" / "bin" / "carried-program"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert kit(tmp_path, part("start"))["start"]["status"] == "ok"


def test_no_part_starts_without_time_left(tmp_path: Path) -> None:
    found = kit(tmp_path, part("fine"), budget_s=RESERVED_S + 1)
    assert (found["fine"]["status"], found["fine"]["reason"]) == ("not run", "no time left")


def test_sick_device_ends_the_call(tmp_path: Path) -> None:
    """The probe runs after each failure; once it fails, no further part is failed in silence."""
    found = kit(tmp_path / "sick", part("raise"), part("last"), probe=part("crash"))
    reason = "its process ended with status -11"
    assert found["last"]["status"] == "not run"
    assert found["last"]["reason"] == f"the device is sick: {reason}"
    (row,) = rows_of(tmp_path / "sick", "probe")
    assert (row["is_sick"], row["reason"]) == (True, reason)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_kernels_of_other_keys_are_compiled_before_their_part(tmp_path: Path) -> None:
    """Without a pack, or with one of another machine; for parts that launch kernels."""
    kit(tmp_path, part("fine", needs=("triton",)), part("last"))
    ran = [(row["part"], row.get("dry")) for row in rows_of(tmp_path, "ran")]
    assert ran == [("fine", "compile"), ("fine", None), ("last", None)]


@pytest.mark.parametrize("name", CALLS)
def test_parts_of_a_call_fit_its_limit(name: str) -> None:
    call = CALLS[name]
    assert sum(each.deadline_s for each in parts_named(call.parts)) + RESERVED_S <= call.limit_s


def test_results_are_few_and_small() -> None:
    """At most 8 files of 16 MiB, two folders deep: three files, in one folder."""
    num_parts = max(len(call.parts) for call in CALLS.values()) + 1
    assert num_parts * max(LOG_BYTES + 100, MAX_BYTES) <= 16 << 20


def test_part_names_are_unique() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_rows_carry_the_sources_of_their_kernels(tmp_path: Path) -> None:
    session = Session("bits", tmp_path / "rows.jsonl")
    one, other, both = (
        session.add(case="x", kernels=ops)["sources"]
        for ops in (("linear",), ("rms_norm",), ("linear", "rms_norm"))
    )
    assert len({one, other, both}) == 3
    with pytest.raises(ValueError, match="no kernel 'lineer'"):
        session.add(case="x", kernels=("lineer",))


def test_row_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"part": "a", "case": "whole"}\n{"part": "a", "ca')
    assert [row["case"] for row in read_rows(rows)] == ["whole"]
    Session("b", rows).add(case="next")
    assert [row["case"] for row in read_rows(rows)] == ["whole", "next"]


def test_tool_outputs_are_parsed() -> None:
    output = "launched linear\n========= Invalid read\n========= ERROR SUMMARY: 1 error\nbye"
    assert findings(output) == ["========= Invalid read", "========= ERROR SUMMARY: 1 error"]
    table = (
        '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","_linear_kernel","DRAM Throughput","%","81.5"\n"0","_linear_kernel","","",""\n'
    )
    assert metrics(table) == [
        {
            "case": "_linear_kernel",
            "launch": "0",
            "metric": "DRAM Throughput",
            "unit": "%",
            "value": "81.5",
        }
    ]
