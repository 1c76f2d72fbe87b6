"""Plans of published models of full size, from files with true headers and no tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.engine.models.checkpoint_config import read_config
from shared.engine.planning.memory_plan import (
    MemoryLimit,
    num_kv_tokens,
    plan_memory,
)
from tests.shared.engine.planning.sparse import (
    KIMI,
    SCOUT,
    kimi_tensors,
    scout_tensors,
    write_sparse,
)

CHECK = """
import re, sys, time
from pathlib import Path
from shared.engine.planning.stored_weights import read_stored
from shared.engine.models.checkpoint_config import read_config
began = time.process_time()
folder = Path(sys.argv[1])
read_stored(folder, read_config(folder))
status = Path("/proc/self/status").read_text()
print(time.process_time() - began, re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
"""


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
        "tensors": 1133,  # 554 of them the image encoder's
        "bytes": sum(each.stat().st_size for each in scout.glob("*.safetensors")) - headers(scout),
    }
    weights = sum(each["weight_bytes"] for each in plan["ranks"])
    assert 217e9 < weights < 218e9  # 1.7 of them the image encoder's
    assert {each["kv_bytes_per_token"] for each in plan["ranks"]} == {196_608 // 2}
    assert plan["kv_tokens"] == (56 * 2**30 - 36 * 8192 * 4096) // 49_152 > 1_190_000
    assert plan["sequences"] == {"context": 32_768, "count": 21, "plain": 9}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    write_sparse(folder, KIMI, kimi_tensors(), files=64)
    return folder


@pytest.mark.long  # its 208,550 tensors take 8 s
def test_kimi_on_eight_gpus_of_80_gb(kimi: Path) -> None:
    """Each rank holds all latents, 61 layers x 576 x 2 B a token, and all of what makes them and
    of the routers: 71.3 GiB a rank, where an eighth of the files is 69.2.
    """
    plan, imported = hearth_plan(kimi, "--tp", "8", "--memory", "80GB")
    assert "| torch" not in imported
    assert (plan["checkpoint"]["files"], plan["checkpoint"]["tensors"]) == (64, 208_550)
    assert plan["checkpoint"]["bytes"] == pytest.approx(594e9, rel=1e-3)
    assert {each["kv_bytes_per_token"] for each in plan["ranks"]} == {70_272}
    made = 60 * 384 * 7168 * 4 + 61 * (1536 + 576) * 7168 * 2  # routers, products to latents
    for rank in plan["ranks"]:
        whole = plan["checkpoint"]["bytes"] - made
        assert rank["weight_bytes"] == pytest.approx(whole / 8 + made, rel=5e-3)
        left = 80e9 - rank["weight_bytes"] - rank["workspace_bytes"]
        assert plan["kv_tokens"] == pytest.approx(0.9 * left / 70_272, rel=1e-3)
    assert 40_000 < plan["kv_tokens"] < 42_000


@pytest.mark.long
def test_kimi_holds_57_000_tokens_in_30_gib_of_eight_ranks(kimi: Path) -> None:
    limit = MemoryLimit(kv_bytes=30 * 2**30 // 8)
    ranks = plan_memory(read_config(kimi), tp=8, pp=1, item_bytes=2, limit=limit)
    assert num_kv_tokens(ranks) == 3.75 * 2**30 // 70_272 > 57_000


@pytest.mark.long  # a busy machine takes longer than the bar
def test_names_of_208_550_tensors_are_checked_in_10_s_and_600_mb(kimi: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", CHECK, str(kimi)], capture_output=True, text=True, check=True
    )
    seconds, kib = map(float, shown.stdout.split())
    assert seconds < 10
    assert kib * 1024 < 600e6


def headers(folder: Path) -> int:
    found = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            found += 8 + int.from_bytes(file.read(8), "little")
    return found
