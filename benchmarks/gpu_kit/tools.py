"""The results of NVIDIA's tools: compute-sanitizer for accesses, ncu for kernel times."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_kit.session import Session, Unavailable

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/bin")
LAUNCHES = [sys.executable, "-m", "benchmarks.gpu_kit.launches"]
PROFILED = ("_decode_attention_kernel", "_linear_kernel")
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis")
MAX_LINES = 40  # of a tool's findings


def run(session: Session, tool: str) -> None:
    if tool == "profile":
        _profile(session)
    else:
        _check(session, tool)


def _find(name: str) -> str:
    """Finds a tool's path. Raises Unavailable."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
    found = shutil.which(name, path=path)
    if found is None:
        raise Unavailable(f"{name} is not on the PATH")
    return found


def _check(session: Session, tool: str) -> None:
    command = [_find("compute-sanitizer"), "--tool", tool, *LAUNCHES]
    session.need_device()
    _output(LAUNCHES, dict(os.environ))  # compiles, which takes longer under the tool
    # One allocation per tensor: otherwise an access beyond one tensor hits the next.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    output = _output(command, environ)
    session.add(case=tool, findings=findings(output), launched=output.count("launched "))
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    if summary is None:
        raise Unavailable(f"compute-sanitizer does not work here: {output[-300:]!r}")
    if int(summary[1]):
        raise RuntimeError(summary[0])


def findings(output: str) -> list[str]:
    """Selects the tool's own lines, which begin with equals signs."""
    lines = [line for line in output.splitlines() if line.startswith("=========")]
    return lines[-MAX_LINES:]


def _profile(session: Session) -> None:
    command = [_find("ncu"), "--csv", "--page", "details", "--clock-control", "none"]
    session.need_device()
    command += ["--kernel-name", f"regex:^({'|'.join(PROFILED)})$", "--launch-count", "4"]
    for section in SECTIONS:
        command += ["--section", section]
    output = _output([*command, *LAUNCHES, "linear", "decode_attention"], dict(os.environ))
    rows = metrics(output)
    if not rows:
        raise Unavailable(f"ncu gave no metrics: {output[-300:]!r}")
    for row in rows:
        session.add(**row)


def metrics(output: str) -> list[dict[str, str]]:
    """Rows of ncu's table, which follows the output of the program and ncu."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    return [
        {
            "case": row["Kernel Name"],
            "launch": row["ID"],
            "metric": row["Metric Name"],
            "unit": row["Metric Unit"],
            "value": row["Metric Value"],
        }
        for row in csv.DictReader(io.StringIO("\n".join(lines)))
        if row.get("Metric Name")
    ]


def _output(command: list[str], environ: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(done.stdout)
    return done.stdout
