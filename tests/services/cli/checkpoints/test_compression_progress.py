"""The table of a bundle's savings, printed to pipes and narrow terminals."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.checkpoints.compression_progress import ProgressDisplay, show_savings
from shared.engine.codec.manifest import Manifest, ManifestTensor, StoredShard

KINDS = (
    "mlp.experts.*.gate_up_proj",
    "multi_modal_projector.mm_soft_emb_norm",
    "post_attention_layernorm",
)


def _tensor(kind: str) -> ManifestTensor:
    return ManifestTensor(
        name=f"model.layers.7.{kind.replace('*', '3')}.weight",
        dtype="F8_E4M3",
        shape=(4096, 14336),
        num_bytes=2 * 4096 * 14336,
        digest="",
        codec="bf16-huffman",
        coded_planes=("exponents",),
        num_stored_bytes=4096 * 14336 * 4 // 3,
        entropy_bytes=4096 * 14336 * 5 // 4,
    )


def _table_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    tensors = tuple(_tensor(kind) for kind in KINDS)
    shard = StoredShard(path="model.safetensors", header="", tensors=tensors)
    show_savings(Manifest(shards=(shard,), files=()), Path("out"))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("resumes", "left"), [(True, "run the same command to continue"), (False, "nothing is written")]
)
def test_a_stopped_command_says_what_is_left(
    resumes: bool, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), ProgressDisplay(resumes=resumes):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == f"hearth: stopped; {left}\n"


def test_each_kind_has_one_line_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = _table_lines(capsys)
    for kind in KINDS:
        (line,) = [line for line in lines if line.startswith(kind)]
        assert line.split()[1:] == ["F8_E4M3", "1", "1", "10.67", "10.00", "33.3%"]


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_terminal_wraps_long_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = _table_lines(capsys)
    table = lines[: next(at for at, line in enumerate(lines) if line.startswith("out: "))]
    assert max(map(len, table)) <= width
    assert "…" not in "".join(table)
    names = "".join(line.split()[0] for line in table[2:-1])
    assert names == "".join(KINDS)
    assert sum(line.count("10.67") for line in table) == len(KINDS) + 1
