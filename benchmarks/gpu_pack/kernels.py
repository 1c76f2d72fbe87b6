"""The kernels that travel: those of every part, compiled without a GPU."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_kit.compiled.carried_cache import ARCHIVE, MANIFEST, Manifest, pack, software_of
from benchmarks.gpu_kit.outputs import Outputs
from benchmarks.gpu_kit.part_process import PartProcess
from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_kit.session import read_rows

CAPABILITY = 90  # compute capability of H100 and H200
LIMIT_S = 1800.0  # limit of a part


def add_kernels(parts: Iterable[Part], folder: Path) -> list[str]:
    """Writes the archive and its manifest. Returns the parts that failed, and prints the log if
    there are any: what they compiled is in the archive.
    """
    with tempfile.TemporaryDirectory() as work:
        outputs, cache = Outputs(Path(work)), Path(work) / "triton_cache"
        failed = [part.name for part in parts if not compile_part(part, outputs, cache)]
        pack(cache, folder / ARCHIVE)
        kernels = count(outputs)
        if failed:
            sys.stderr.write(outputs.log.read_text(errors="replace"))
    Manifest(software_of(CAPABILITY), kernels).write(folder / MANIFEST)
    return failed


def compile_part(part: Part, outputs: Outputs, cache: Path) -> bool:
    """Fills the cache. Returns whether all of the part's kernels are in it."""
    started = time.monotonic()
    environ = {"TRITON_CACHE_DIR": str(cache)}
    status, reason = PartProcess(part, "compile", outputs, environ).run(LIMIT_S)
    took = f"{time.monotonic() - started:6.1f} s"
    num_kernels = count(outputs).get(part.name, 0)
    print(f"{part.name:18}{status:12}{took} {num_kernels:5} kernels  {reason}", flush=True)
    return status not in ("failed", "timed out")


def count(outputs: Outputs) -> dict[str, int]:
    """Returns the number of kernels that each part launches."""
    rows = [row for row in read_rows(outputs.rows) if row["case"] == "compiled"]
    return {row["part"]: row["hits"] + row["misses"] for row in rows}
