"""The kit's parts that run a full model, on the CPU with a small model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.gpu_kit import handoff, model_8b, roofline
from benchmarks.gpu_kit.session import Session
from shared.engine.runners.load import load_runner

SMALL = handoff.CONFIG | {"num_hidden_layers": 2}


def test_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that exceed the KV blocks are skipped, with a row that says so."""
    monkeypatch.setattr(model_8b, "BATCHES", (1, 3, 500))
    monkeypatch.setattr(model_8b, "CONTEXT", 100)
    monkeypatch.setattr(model_8b, "PROMPT", 96)
    monkeypatch.setattr(model_8b, "CHUNKS", (64, 96))
    monkeypatch.setattr(model_8b, "STEPS", 2)
    session = Session("8b", tmp_path / "rows.jsonl")
    with model_8b.folder_of(SMALL) as folder:
        runner = load_runner(
            folder, "cpu", load_format="dummy", dtype="float32", kv_cache_bytes=8 << 20
        )
    asyncio.run(model_8b.measure(session, runner, "exact", SMALL))
    rows = {row["case"]: row for row in session.rows_of("8b")}
    assert rows["decode, batch 500"]["left_out"] == "too few KV blocks"
    measured = [row for row in rows.values() if "measured_ms" in row]
    assert len(measured) == 4
    for row in measured:
        assert row["error"] == pytest.approx(row["measured_ms"] / row["predicted_ms"] - 1, rel=0.1)


def test_kv_is_pushed_between_processes() -> None:
    with model_8b.folder_of(SMALL) as folder:
        rows = handoff.measure(folder, "cpu", "cpu", 100, 2)
    assert [row["case"] for row in rows] == ["push of 100 tokens"] * 2
    assert all(row["gb_s"] > 0 for row in rows)
    assert roofline.kv_bytes_per_token(roofline.CONFIG) == roofline.kv_bytes_per_token(
        handoff.CONFIG
    )
