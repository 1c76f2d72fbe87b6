"""The results of tools: compute-sanitizer for accesses, torch's profiler and ncu for times.

compute-sanitizer and ncu do not work on every runtime: there the part is unavailable. Without a
device, what they would watch is launched once.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_kit.kernels import smoke
from benchmarks.gpu_kit.machine.device_facts import find_tool
from benchmarks.gpu_kit.model_steps import profile
from benchmarks.gpu_kit.session import Session, Unavailable

ROOT = Path(__file__).resolve().parents[3]
CHECKED = (
    *("linear-qkv-batch-exact", "linear-qkv-one-not exact", "lane_linear-o-batch"),
    *("decode_attention-one-exact", "prefill_attention-exact", "rms_norm-batch"),
    *("silu_and_mul-batch", "rotate_and_store-batch-not norms", "sample-batch-not mask"),
    *("gather_blocks-not fp8", "scatter_blocks-not fp8", "copy_blocks-some"),
    *("top_k-batch", "compressed_linear-o-one-exact", "penalize-batch", "apply_token_mask-batch"),
)
PROFILED = (  # each launches one kernel of these names
    *("linear-gate_up-one-exact", "linear-gate_up-batch-exact"),
    *("decode_attention-batch-exact", "decode_attention-batch-not exact"),
)
KERNELS = ("_decode_attention_kernel", "_linear_kernel")
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis")
MAX_LINES = 40  # most lines of a tool's findings
RESERVED_S = 3  # time to end a tool that takes too long


def run(session: Session, tool: str) -> None:
    match tool:
        case "profile":
            profile.run(session)
        case "ncu":
            _profile(session)
        case _:
            _check(session, tool)


def _find(session: Session, name: str) -> str:
    """Raises Unavailable."""
    session.need_device()
    found = find_tool(name)
    if found is None:
        raise Unavailable(f"{name} is not on the PATH")
    return found


def _check(session: Session, tool: str) -> None:
    """Raises RuntimeError for an error that the tool has found, Unavailable if it does not work."""
    if session.is_dry:
        smoke.launch(session, *CHECKED)
        return
    command = [_find(session, "compute-sanitizer"), "--tool", tool, *_launches(CHECKED)]
    # One allocation per tensor: otherwise an access beyond one tensor hits the next.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    output, is_complete = run_tool(command, environ, session.left_s - RESERVED_S)
    found = findings(output)
    num_launched = output.count("launched ")
    session.add(case=tool, findings=found, launched=num_launched, is_complete=is_complete)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    if summary is None and not num_launched:
        raise Unavailable(f"compute-sanitizer does not work here: {output[-300:]!r}")
    if summary is None and is_complete:
        raise RuntimeError(f"the launches died: {output[-300:]!r}")
    if has_errors(output):
        raise RuntimeError(f"{tool} found errors: {found[:3]}")


def has_errors(output: str) -> bool:
    """Whether the tool's summary counts errors or, without a summary, the output so far shows
    one.
    """
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    if summary is not None:
        return bool(int(summary[1]))
    return re.search(r"^========= (Invalid|Error|Race|Warning: Race)", output, re.M) is not None


def findings(output: str) -> list[str]:
    """Selects the tool's own lines, which begin with equals signs."""
    lines = [line for line in output.splitlines() if line.startswith("=========")]
    return lines[-MAX_LINES:]


def _profile(session: Session) -> None:
    """The launches of the second round: those of the first one are warm-ups."""
    if session.is_dry:
        smoke.launch(session, *PROFILED)
        return
    command = [_find(session, "ncu"), "--csv", "--page", "details", "--clock-control", "none"]
    command += ["--kernel-name", f"regex:^({'|'.join(KERNELS)})$"]
    command += ["--launch-skip", str(len(PROFILED)), "--launch-count", str(len(PROFILED))]
    for section in SECTIONS:
        command += ["--section", section]
    command += _launches(PROFILED * 2)
    output, _ = run_tool(command, dict(os.environ), session.left_s - RESERVED_S)
    rows = metrics(output)
    if not rows:
        raise Unavailable(f"ncu gave no metrics: {output[-300:]!r}")
    for row in rows:
        session.add(**row)


def metrics(output: str) -> list[dict[str, str]]:
    """Returns the rows of ncu's table, which follows the output of the program and ncu."""
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


def _launches(names: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_kit.kernels.smoke", *names]


def run_tool(command: list[str], environ: dict[str, str], seconds: float) -> tuple[str, bool]:
    """Returns the output, and whether the tool ended in time. It is written to a file: what the
    tool has started may outlive it, and hold a pipe.
    """
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(max(0.0, seconds))
            is_complete = True
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            is_complete = False
        file.seek(0)
        output = file.read().decode(errors="replace")
    print(output)
    return output, is_complete
