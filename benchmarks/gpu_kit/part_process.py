"""The process of one part: its command, its environment, its ending."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_kit.outputs import Outputs
from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_kit.process import run

ROOT = Path(__file__).resolve().parents[2]

Ended = tuple[str, str]  # status, reason


@dataclass(frozen=True)
class PartProcess:
    """The process of one part. For `mode`, see session.py. `environ` is added to this process's."""

    part: Part
    mode: str
    outputs: Outputs
    environ: Mapping[str, str]

    def run(self, limit_s: float) -> Ended:
        log_start = self.outputs.log.stat().st_size
        with tempfile.TemporaryDirectory() as folder:
            ending = Path(folder) / "ending.json"
            status = run(
                self._command(ending, limit_s),
                deadline_s=limit_s,
                log=self.outputs.log,
                environ=self._environ(),
                cwd=ROOT,
            )
            self.outputs.shorten_log(log_start)
            if ending.exists():
                found = json.loads(ending.read_text())
                return found["status"], found["reason"]
        if status is None:
            return "timed out", f"after {limit_s:.0f} s"
        return "failed", f"its process ended with status {status}"

    def _command(self, ending: Path, limit_s: float) -> list[str]:
        part = self.part
        command = [sys.executable, "-m", "benchmarks.gpu_kit.child", part.module, *part.arguments]
        command += ["--part", part.name, "--mode", self.mode, "--needs", *part.needs]
        command += ["--rows", str(self.outputs.rows), "--ending", str(ending)]
        return [*command, "--seconds", str(limit_s)]

    def _environ(self) -> dict[str, str]:
        """Existing paths remain: PYTHONPATH may be needed to find packages, whose programs are in
        `bin`, where `pip install --target` puts them.
        """
        packages = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        programs = [str(Path(each, "bin")) for each in packages]
        return {
            **os.environ,
            **self.environ,
            "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *packages]),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }
