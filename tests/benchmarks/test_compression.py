"""The bundle benchmark at a small size: its rows are consistent, its weights as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.compression.at_rest import at_rest
from benchmarks.compression.llama_weights import STATISTICS, WHOLE_MODEL, bf16_tensor, weights
from shared.engine.codec.byte_planes import byte_counts, entropy_bits


def test_sizes_and_bars_of_a_small_run() -> None:
    rows, bars = at_rest([], num_layers=1, rows_divisor=512, rounds=1, num_threads=2)
    full_model = [row for row in rows if row["kind"] == "whole model, by shape"]
    assert [row["case"] for row in full_model] == ["8B shapes, usual", "8B shapes, harsh"]
    for row in full_model:
        assert row["weights_m"] == 8030.26
        assert 8 < row["entropy_bits"] < row["bits_per_weight"] < 11.5
        assert row["smaller"] == pytest.approx(1 - row["bits_per_weight"] / 16, abs=1e-3)
    speeds = {row["kind"] for row in rows if "mb_per_s" in row}
    assert {"hearth compress", "open_checkpoint, bundle", "encode", "decode"} <= speeds
    sizes = [bar for bar in bars if bar.unit != "MB/s"]
    assert len(sizes) == 9
    assert all(bar.holds for bar in sizes if bar.name.startswith("demo_model"))


def test_shapes_have_the_parameters_of_8b() -> None:
    assert sum(count * math.prod(shape) for _, shape, count in WHOLE_MODEL) == 8_030_261_248


@pytest.mark.parametrize(("name", "bits"), [("usual", 2.69), ("harsh", 2.88)])
def test_weights_have_the_stated_statistics(name: str, bits: float) -> None:
    words = weights((512, 1024), STATISTICS[name], np.random.default_rng(0))
    exponents = (words.reshape(-1) >> 7 & 0xFF).astype(np.uint8)
    assert entropy_bits(byte_counts(exponents)) == pytest.approx(bits, abs=0.04)
    spread = np.log(np.median(np.abs(bf16_tensor(words).float().numpy()), axis=1)).std()
    assert spread == pytest.approx(STATISTICS[name].spread, abs=0.05)
