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


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    run(ROOT / "scripts" / "gpu_pack", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def environ(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The reference image's, with what the wheels hold; nothing can be compiled in C."""
    packages = tmp_path_factory.mktemp("packages")
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", packages)
    run(PYTHON, *install, *(pack / "wheels").glob("*.whl"), cwd=ROOT)
    return {"PYTHONPATH": str(packages), "CC": "false"}


def test_no_kernel_is_compiled_again(
    pack: Path, environ: Mapping[str, str], tmp_path: Path
) -> None:
    """In a checkout at another path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        target = tmp_path / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    unpack(pack / ARCHIVE, tmp_path / "cache")
    again = (PYTHON, "-c", COMPILE_AGAIN, tmp_path / "out", tmp_path / "cache")
    run(*again, cwd=tmp_path / "checkout", **environ)
    found = [row for row in read_rows(tmp_path / "out" / "rows.jsonl") if row["case"] == "compiled"]
    assert {row["part"]: row["misses"] for row in found if row["misses"]} == {}
    assert {row["part"]: row["hits"] for row in found} == Manifest.read(pack / MANIFEST).kernels


def test_every_part_runs_dry(pack: Path, environ: Mapping[str, str], tmp_path: Path) -> None:
    command = (PYTHON, "-m", "benchmarks.gpu_kit", tmp_path / "out", "--work", tmp_path / "work")
    limit = ("--budget-s", "3600")
    run(*command, "--pack", pack, "--dry-run", *limit, "--only", *NAMES, cwd=ROOT, **environ)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    status = {each["part"]: each["status"] for each in summary["parts"]}
    assert status == dict.fromkeys(NAMES, "ok")
    launches = launches_in(tmp_path / "out" / "rows.jsonl")
    launches.pop("carried")
    assert launches == json.loads(FILE.read_text()), "with this Triton it launches something else"
