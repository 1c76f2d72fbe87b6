"""Row-parallel products of a model sum in lanes, in every form of their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels.sum_lanes import add_lanes
from shared.engine.executors.cpu_executor import CpuExecutor
from shared.engine.executors.load import load_executor
from shared.engine.layers.linear import Linear
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.parallel.cuts import column_lanes
from tests.support.engine import golden

CASES = [
    ("llama", "bfloat16", "dense"),
    ("llama", "bfloat16", "compressed"),
    ("llama", "float32", "dense"),
    ("odd llama", "bfloat16", "compressed"),
    ("odd llama", "float32", "dense"),
    pytest.param(("odd llama", "float16", "dense"), marks=pytest.mark.long),  # 10 s to compile
]


def write_config(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(golden.CONFIGS[name]))
    return folder


def test_lanes_are_summed_before_they_are_added() -> None:
    """2**24 + 1 + 1 is 2**24 in FP32; 2**24 + (1 + 1) is not."""
    linear = Linear(256, 32, dtype=torch.float32, lane_borders=column_lanes(256))
    linear.parameter.data.zero_()
    for column, value in ((0, 2.0**24), (32, 1.0), (40, 1.0)):
        linear.parameter.data[:, column] = value
    x = torch.ones(3, 256)
    for _ in range(2):
        assert (linear(x) - 2.0**24).unique().tolist() == [2.0]
        linear.pack()


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_products_of_a_model_are_sums_of_their_partials(
    case: tuple[str, str, str], tmp_path: Path
) -> None:
    name, dtype, weights = case
    folder = write_config(tmp_path, name)
    executor = load_executor(
        folder, dtype=dtype, weights=weights, load_format="dummy", kv_cache_bytes=1 << 20
    )
    assert isinstance(executor, CpuExecutor)
    layer = executor.computer.model.layers[0]
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert linear.lanes.num == 8
        x = torch.randn(5, linear.lanes.width, generator=torch.Generator().manual_seed(0))
        x = x.to(getattr(torch, dtype))
        lanes = linear.method.partials(x, 8)
        assert lanes.shape == (8, 5, executor.computer.model.config.hidden_size)
        assert lanes.dtype == torch.float32
        assert torch.equal(linear(x), add_lanes(lanes)[0].to(x.dtype))
        assert torch.equal(linear.method.partials(x, 2), add_lanes(lanes, 2))
    with pytest.raises(ValueError, match="does not sum in lanes"):
        layer.self_attn.qkv_proj.method.partials(x)


def test_borders_are_those_of_heads_and_blocks(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    model = Decoder(read_config(folder), dtype=torch.float32, num_positions=8)
    borders = model.layers[0].self_attn.o_proj.lanes.borders
    assert borders == (0, 32, 64, 96, 128, 160, 192, 224, 288)  # nine heads of 32
    assert model.layers[0].mlp.down_proj.lanes.borders == column_lanes(352)
