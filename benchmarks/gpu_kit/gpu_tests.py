"""`pytest -m gpu`: every test that needs a GPU, one row for each that did not pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_kit.session import Session

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("tests/kernels/gpu", "tests/shared/engine/test_on_devices.py")
MAX_MESSAGE = 600
MAX_WORKERS = 8
RESERVED_S = 8  # for pytest's shutdown and report


def run(session: Session) -> None:
    session.need_device()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", "--durations=10"]
        if find_spec("xdist") is not None:  # compiles kernels concurrently
            num_workers = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // 2))
            command += ["-n", str(num_workers), "--dist", "worksteal"]
        tests = subprocess.Popen([*command, f"--junitxml={report}", *PLACES], cwd=ROOT)
        status = status_of(tests, session.left_s - RESERVED_S)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {status} and no report")
        num_ran = add_rows(session, report)
    if status or not num_ran:
        raise RuntimeError(f"{num_ran} tests ran, and pytest ended with status {status}")


def status_of(tests: subprocess.Popen[bytes], seconds: float) -> int:
    """Interrupts pytest before the deadline, so that it reports the tests that have run."""
    try:
        return tests.wait(seconds)
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)
        return tests.wait()


def add_rows(session: Session, report: Path) -> int:
    """Returns how many tests ran. Skipped tests are not counted."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        if failure is None:
            failure = case.find("error")
        skipped = case.find("skipped")
        outcome = (
            "failed" if failure is not None else "skipped" if skipped is not None else "passed"
        )
        counts[outcome] += 1
        if failure is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            session.add(case=name, message=(failure.get("message") or "")[:MAX_MESSAGE])
    session.add(case="tests", **counts)
    return counts["passed"] + counts["failed"]
