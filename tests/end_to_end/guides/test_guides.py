"""What README.md and the guides tell to run does run, on a cluster of the demo model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.cluster.hearth_up import Cluster, run_cluster
from tests.support.guide_blocks import ROOT, Block, blocks_of, filled, guides

LIMIT_S = 240
PRINTED = re.compile(r"^@(\d+)\n(.*?)(?=^@\d+$|\Z)", re.MULTILINE | re.DOTALL)
QWEN3_8B: dict[str, object] = {  # what a plan reads of the hub's file
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
LONG = {"run: long": (), "run: regions": ("--region", "fr", "--class", "eu=fr")}  # options of `up`


def marked(*marks: str) -> list[Path]:
    """Returns README.md and the guides that have a block with one of these marks."""
    return [path for path in guides() if any(each.mark in marks for each in blocks_of(path))]


def name_of(guide: Path) -> str:
    return f"{guide.parent.name}-{guide.stem}"


@pytest.mark.parametrize("guide", marked("run"), ids=name_of)
def test_guide(guide: Path, cluster: Cluster, tmp_path: Path) -> None:
    check_guide(guide, ("run",), cluster, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mark", LONG)
def test_guides_with_a_cluster_of_their_own(mark: str, tmp_path: Path) -> None:
    for guide in marked(mark):
        folder = tmp_path / guide.stem
        folder.mkdir()
        with run_cluster(folder / "cluster", *LONG[mark]) as cluster:
            check_guide(guide, ("run", mark), cluster, folder)


def check_guide(guide: Path, marks: Sequence[str], cluster: Cluster, tmp_path: Path) -> None:
    """Runs the blocks of a guide one after the other in one shell, as a reader does."""
    blocks = [each for each in blocks_of(guide) if each.mark in (*marks, "output")]
    done = run_blocks(blocks, cluster, folder_for(tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = dict(PRINTED.findall(done.stdout))
    for before, block in pairwise(blocks):
        if block.mark == "output":
            check_output(block, printed[str(before.line)])


def folder_for(tmp_path: Path) -> Path:
    """Returns a folder in which commands may write, with all files of the repository, and the
    configuration of a model that the guides name by its hub id.
    """
    folder = tmp_path / "hearth"
    folder.mkdir()
    for each in ROOT.iterdir():
        (folder / each.name).symlink_to(each)
    write_config(folder / "Qwen/Qwen3-8B", QWEN3_8B)
    return folder


def write_config(folder: Path, config: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def run_blocks(
    blocks: Sequence[Block], cluster: Cluster, folder: Path
) -> subprocess.CompletedProcess[str]:
    parts = ["set -euo pipefail"]
    for each in blocks:
        if each.mark != "output":
            parts += [f"echo; echo @{each.line}", script_of(each, cluster)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {
        "PATH": path,
        "HOME": str(folder.parent),
        "XDG_STATE_HOME": str(cluster.folder),
        "COLUMNS": "120",
    }
    return subprocess.run(
        ["bash", "-c", "\n".join(parts)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def script_of(block: Block, cluster: Cluster) -> str:
    text = filled(block.text, url=cluster.url, api_key=cluster.state.api_key)
    if block.language == "python":
        return f"python - <<'END_OF_BLOCK'\n{text}END_OF_BLOCK"
    return text.rstrip()


def check_output(block: Block, printed: str) -> None:
    """Raises AssertionError unless `printed` is the block; … stands for any text."""
    lines = [re.escape(line.rstrip()) for line in block.text.strip().splitlines()]
    pattern = "\n".join(lines).replace("…", ".*")
    found = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    assert re.fullmatch(pattern, found, re.DOTALL), f"{block}: printed\n{found}"
