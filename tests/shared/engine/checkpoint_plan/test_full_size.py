"""Plans of published models of full size, from files with true headers and no tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.shared.engine.checkpoint_plan.sparse import SCOUT, scout_tensors, write_sparse


def hearth_plan(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The plan, and what the interpreter imported."""
    command = [sys.executable, "-X", "importtime", "-m", "services", "plan", "--json"]
    shown = subprocess.run(
        [*command, "--model", str(folder), *arguments], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    return json.loads(shown.stdout), shown.stderr


@pytest.fixture(scope="module")
def scout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scout")
    write_sparse(folder, SCOUT, scout_tensors(), files=50)
    return folder


def test_scout_on_two_gpus_of_141_gb(scout: Path) -> None:
    """Of 48 layers, 12 keep all tokens: 49,152 B a token, and 1.2 GB a sequence for the others."""
    plan, imported = hearth_plan(
        scout, "--tp", "2", "--memory", "141GB", "--kv-memory", "28GiB", "--context", "32768"
    )
    assert "| torch" not in imported
    assert plan["checkpoint"] == {
        "files": 50,
        "tensors": 581,
        "bytes": sum(each.stat().st_size for each in scout.glob("*.safetensors")) - headers(scout),
    }
    weights = sum(each["weight_bytes"] for each in plan["ranks"])
    assert 215e9 < weights < 217e9
    assert {each["kv_bytes_per_token"] for each in plan["ranks"]} == {196_608 // 2}
    assert plan["kv_tokens"] == (56 * 2**30 - 36 * 8192 * 4096) // 49_152 > 1_190_000
    assert plan["sequences"] == {"context": 32_768, "count": 21, "plain": 9}


def headers(folder: Path) -> int:
    found = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            found += 8 + int.from_bytes(file.read(8), "little")
    return found
