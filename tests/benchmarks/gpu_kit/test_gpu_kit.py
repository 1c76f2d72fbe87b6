"""The GPU kit without a GPU: isolation of its parts, and a dry run of all parts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.__main__ import run_kit
from benchmarks.gpu_kit.gpu_tests import add_rows, status_of
from benchmarks.gpu_kit.outputs import LOG_BYTES, Outputs
from benchmarks.gpu_kit.parts import BUDGET_S, PARTS, Part
from benchmarks.gpu_kit.session import Session
from benchmarks.gpu_kit.tools import findings, metrics
from kernels.device import IS_INTERPRETED

ROOT = Path(__file__).parents[3]
MODULE = "tests.benchmarks.gpu_kit.behaviours"


def part(
    behaviour: str, *arguments: str, deadline_s: int = 60, needs: tuple[str, ...] = ()
) -> Part:
    return Part(behaviour, deadline_s, "", MODULE, needs, (behaviour, *arguments))


def kit(folder: Path, *parts: Part, budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Runs the parts. Returns the entries of summary.json by part name."""
    outputs = Outputs(folder / "out", folder / "work")
    run_kit(parts, outputs, budget_s=budget_s, is_dry=False)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return {each["part"]: each for each in summary["parts"]}


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_failed_part_does_not_stop_other_parts(tmp_path: Path) -> None:
    names = ("raise", "crash", "not built", "lacks", "flood", "talk")
    missing = part("fine", needs=("torch", "no_such_module"))
    found = kit(tmp_path, *map(part, names), missing, Part("future", 0, ""), part("last"))
    assert {name: (each["status"], each["reason"]) for name, each in found.items()} == {
        "raise": ("failed", "ValueError: three is not four"),
        "crash": ("failed", "its process ended with status -11"),
        "not built": ("not built", "no such feature"),
        "lacks": ("unavailable", "no such tool"),
        "flood": ("failed", "RuntimeError: the rows of part flood exceed 1048576 bytes"),
        "talk": ("ok", ""),
        "fine": ("unavailable", "not installed: no_such_module"),
        "future": ("not built", "no future to measure"),
        "last": ("ok", ""),
    }
    rows = [json.loads(row) for row in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    ran = [*names, "last"]
    assert rows == [{"part": name, "case": "begun"} for name in ran]
    log = (tmp_path / "out" / "log.txt").read_bytes()
    assert b"Traceback" in log
    assert len(log) < LOG_BYTES + (64 << 10)


def test_deadline_ends_part_and_its_child_processes(tmp_path: Path) -> None:
    found = kit(tmp_path, part("hang", str(tmp_path), deadline_s=3), part("last"))
    assert (found["hang"]["status"], found["hang"]["num_rows"]) == ("timed out", 1)
    assert found["last"]["status"] == "ok"
    ids = [int(each) for each in (tmp_path / "ids").read_text().split()]
    assert [each for each in ids if is_running(each)] == []


def test_no_part_starts_without_time_left(tmp_path: Path) -> None:
    found = kit(tmp_path, part("fine"), budget_s=20)
    assert found["fine"]["status"] == "timed out"
    assert found["fine"]["reason"] == "no time left"


def test_compiled_kernels_are_packed_in_one_archive(tmp_path: Path) -> None:
    first = Outputs(tmp_path / "out", tmp_path / "work")
    kernel = first.cache / "HASH"
    kernel.mkdir(parents=True)
    for name in ("k.cubin", "k.json", "k.ttgir", "launcher.so"):
        (kernel / name).write_text(name)
    first.pack_cache()
    second = Outputs(tmp_path / "out", tmp_path / "other")
    assert second.unpack_cache()
    unpacked = sorted(path.name for path in second.cache.rglob("*") if path.is_file())
    assert unpacked == ["k.cubin", "k.json", "launcher.so"]


def test_invalid_archive_is_ignored(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path / "out", tmp_path / "work")
    (tmp_path / "out" / "triton_cache.tar.gz").write_bytes(b"no archive")
    assert not outputs.unpack_cache()


def test_part_names_are_unique() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_passes"/>
<testcase classname="tests.a" name="test_fails[1]"><failure message="1 is not 2"/></testcase>
<testcase classname="tests.a" name="test_breaks"><error message="no fixture">at</error></testcase>
<testcase classname="tests.a" name="test_skips"><skipped message="no device"/></testcase>
</testsuite></testsuites>"""


def test_failed_test_becomes_a_row(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    session = Session("tests", tmp_path / "rows.jsonl")
    assert add_rows(session, tmp_path / "report.xml") == 3
    assert session.rows_of("tests") == [
        {"part": "tests", "case": "tests.a.test_fails[1]", "message": "1 is not 2"},
        {"part": "tests", "case": "tests.a.test_breaks", "message": "no fixture"},
        {"part": "tests", "case": "tests", "passed": 1, "failed": 2, "skipped": 1},
    ]


def test_tests_are_interrupted_at_deadline() -> None:
    """Interrupts with SIGINT: pytest then stops and writes its report."""
    code = "import signal; print(flush=True); signal.pause()"
    tests = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert tests.stdout is not None
    tests.stdout.readline()
    assert status_of(tests, 0.0) == -signal.SIGINT


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


def test_roofline_of_8b() -> None:
    """15.0 GB of weights per step, 128 KiB of KV per token, 132 TFLOP for 8,192 prompt tokens."""
    config = roofline.CONFIG
    assert roofline.kv_bytes_per_token(config) == 128 << 10
    assert roofline.decode_bytes(config, 1, 0) == pytest.approx(15.0e9, rel=0.005)
    assert roofline.prefill_flops(config, 8192) == pytest.approx(132e12, rel=0.06)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter launches nothing")
def test_dry_run(tmp_path: Path) -> None:
    """Runs the script. Launches go to a fake driver; no part that needs a GPU fails."""
    pytest.importorskip("triton")
    command = [str(ROOT / "scripts" / "gpu_kit"), "out", "--dry-run", "--work", "work"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    status = {each["part"]: each["status"] for each in summary["parts"]}
    assert list(status) == [part.name for part in PARTS]
    assert {name for name, each in status.items() if each == "ok"} == {"host_cost"}
    assert {name for name, each in status.items() if each in ("failed", "timed out")} == set()
    rows = [json.loads(row) for row in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    by_case = {row["case"]: row for row in rows}
    assert by_case["decode step, batch 1"]["launches"] > 32 * 8
    assert len(by_case["launches"]["ops"]) >= 9
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"summary.json", "rows.jsonl", "log.txt", "triton_cache.tar.gz"}
    assert tarfile.is_tarfile(tmp_path / "out" / "triton_cache.tar.gz")
