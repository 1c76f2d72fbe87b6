"""What scripts/gpu_pack makes suffices for every part: software of the reference image, no network.

Minutes: compiles the kernels of all parts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.gpu_kit.compiled.carried_cache import ARCHIVE, MANIFEST, Manifest, unpack
from benchmarks.gpu_kit.parts import NAMES
from benchmarks.gpu_kit.session import read_rows
from tests.benchmarks.gpu_kit.dry_parts import FILE, launches_in

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("HEARTH_REFERENCE", ROOT / ".venv-gpu")) / "bin" / "python"
COMPILE_AGAIN = """
import sys
from pathlib import Path
from benchmarks.gpu_kit.outputs import Outputs
from benchmarks.gpu_kit.parts import PARTS
from benchmarks.gpu_pack.kernels import compile_part
outputs, cache = Outputs(Path(sys.argv[1])), Path(sys.argv[2])
sys.exit(not all([compile_part(part, outputs, cache) for part in PARTS]))
"""


def run(*command: str | Path, cwd: Path, **environ: str) -> None:
    subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, check=True)


def made_pack(folder: Path) -> Path:
    run(ROOT / "scripts" / "gpu_pack", folder, cwd=ROOT)
    return folder


def environ_of(pack: Path, packages: Path) -> Mapping[str, str]:
    """The reference image's, with what the wheels hold; nothing can be compiled in C."""
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", packages)
    run(PYTHON, *install, *(pack / "wheels").glob("*.whl"), cwd=ROOT)
    return {"PYTHONPATH": str(packages), "CC": "false"}


def test_pack_suffices_for_every_part(tmp_path: Path) -> None:
    """One test, so that the workers of a run do not make two packs."""
    pack = made_pack(tmp_path / "pack")
    environ = environ_of(pack, tmp_path / "packages")
    check_no_kernel_is_compiled_again(pack, environ, tmp_path)
    check_every_part_runs_dry(pack, environ, tmp_path / "dry")


def check_no_kernel_is_compiled_again(pack: Path, environ: Mapping[str, str], folder: Path) -> None:
    """In a checkout at another path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        target = folder / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    unpack(pack / ARCHIVE, folder / "cache")
    again = (PYTHON, "-c", COMPILE_AGAIN, folder / "again", folder / "cache")
    run(*again, cwd=folder / "checkout", **environ)
    rows = read_rows(folder / "again" / "rows.jsonl")
    found = [row for row in rows if row["case"] == "compiled"]
    assert {row["part"]: row["misses"] for row in found if row["misses"]} == {}
    assert {row["part"]: row["hits"] for row in found} == Manifest.read(pack / MANIFEST).kernels


def check_every_part_runs_dry(pack: Path, environ: Mapping[str, str], folder: Path) -> None:
    command = (PYTHON, "-m", "benchmarks.gpu_kit", folder / "out", "--work", folder / "work")
    limit = ("--budget-s", "3600")
    run(*command, "--pack", pack, "--dry-run", *limit, "--only", *NAMES, cwd=ROOT, **environ)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    status = {each["part"]: each["status"] for each in summary["parts"]}
    assert status == dict.fromkeys(NAMES, "ok")
    launches = launches_in(folder / "out" / "rows.jsonl")
    launches.pop("carried")
    assert launches == json.loads(FILE.read_text()), "with this Triton it launches something else"
