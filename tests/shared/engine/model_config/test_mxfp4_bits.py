"""gpt-oss in MXFP4 gives the logits of its dequantized checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.reference.dequantize import dequantize_mxfp4
from shared.config import ExpertSplit
from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.layers.moe import Experts
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.quantize.stacked_mxfp4 import mxfp4
from shared.errors import CheckpointError
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_model
from tests.support.engine.quantized import FILE, dequantize_folder, edit_tensors, quantize
from tests.support.engine.steps import Blocks, advance, prefill, step_of
from tests.support.grids import in_short_run

# One group of layers, so that a step has one table.
FIELDS: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "layer_types": ["full_attention"] * 2,
}
PROMPT = [(11 * n) % 190 for n in range(45)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mxfp4")
    write_model(root / "plain", "GptOssForCausalLM", dtype=torch.bfloat16, **FIELDS)
    return quantize(root / "plain", root / "quantized", "mxfp4")


@pytest.fixture(scope="module")
def dense(folder: Path) -> Path:
    return dequantize_folder(folder, folder.parent / "dense", torch.bfloat16)


def load(folder: Path, dtype: str = "bfloat16") -> LocalExecutor:
    return load_executor(folder, dtype=dtype, kv_cache_bytes=8 << 20)


def logits(executor: LocalExecutor) -> Tensor:
    """Of a prompt in chunks, then of a step of two sequences."""
    blocks = Blocks(64)
    long, short = blocks.line(PROMPT, room=1), blocks.line(PROMPT[:3])
    found = prefill(executor, long, 33)
    long.token_ids.append(7)
    return torch.cat((found, advance(executor, [(long, 1), (short, 3)])))


def test_published_names_and_numbers_are_those_of_transformers(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    assert (tuple(blocks.shape), blocks.dtype) == ((5, 320, 3, 16), torch.uint8)
    assert (tuple(scales.shape), scales.dtype) == ((5, 320, 3), torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = dequantize_mxfp4(blocks, scales, torch.bfloat16).transpose(1, 2)
    assert torch.equal(ours, theirs)
    plain = load_file(folder.parent / "plain" / FILE)
    assert float((ours.float() - plain[name]).norm() / plain[name].norm()) < 0.15
    assert tensors.keys() - plain.keys() == {
        each for each in tensors if each.endswith(("_blocks", "_scales"))
    }


def test_codes_are_the_nearest() -> None:
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(1))
    weight[0, :32], weight[1, :32], weight[2, 0] = 0.0, 6.0, 3e38
    weight[3, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4)
    found = dequantize_mxfp4(*mxfp4(weight), torch.float32)
    assert not found[0, :32].any()
    assert found[1, :32].eq(6.0).all()
    assert found[3, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]  # even codes
    assert torch.equal(dequantize_mxfp4(*mxfp4(found), torch.float32), found)
    steps = weight.abs().view(9, 3, 32).amax(2).log2().floor().exp2().repeat_interleave(32, 1)
    assert ((found - weight).abs() <= steps / 2).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_those_of_the_dequantized_checkpoint(
    folder: Path, dense: Path, dtype: str
) -> None:
    ours, theirs = load(folder, dtype), load(dense, dtype)
    assert torch.equal(logits(ours), logits(theirs))
    assert ours.weights.num_quantized > 0 == theirs.weights.num_quantized


def test_experts_take_the_bytes_of_the_file(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    stored = sum(t.nbytes for name, t in tensors.items() if name.endswith(("_blocks", "_scales")))
    executor = load(folder)
    assert executor.weights.num_quantized_bytes <= 1.03 * stored
    found = [each for each in executor.computer.model.modules() if isinstance(each, Experts)]
    assert len(found) == 2


@pytest.mark.parametrize("experts", in_short_run(["ep"], ["ep", "tp"]))
def test_ranks_have_the_bits_of_the_undivided_model(folder: Path, experts: ExpertSplit) -> None:
    executor = load(folder)
    expected = executor.step_logits(step_of([(Blocks(64).line(PROMPT), 45)]))
    options = LoadOptions(dtype="bfloat16", experts=experts)
    setup = RankSetup(
        model_dir=str(folder), options=options, max_blocks=64, num_threads=1, kv=(), masks=-1
    )

    def of_rank(mesh: Mesh) -> Tensor:
        computer = load_rank(setup, mesh).computer
        return computer.step_logits(step_of([(Blocks(64).line(PROMPT), 45)]))

    for found in run_ranks(MeshShape(4 if experts == "tp" else 2), of_rank):
        assert torch.equal(found, expected)


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{NAME}_scales": None}, "weight_scales is missing"),
        ({f"{NAME}_scales": torch.zeros(5, 96, 4).byte()}, "has shape"),
        ({f"{NAME}_scales": torch.full((5, 96, 5), 255).byte()}, "480 of 480 scales are NaN"),
        ({f"{NAME}_blocks": torch.zeros(5, 96, 5, 16)}, "F32, not U8"),
        (
            {f"{NAME}_blocks": None, f"{NAME}_scales": None, NAME: torch.zeros(5, 160, 96)},
            "is dense, but quantization_config",
        ),
    ],
    ids=["no scale", "scale of another shape", "NaN", "floats", "dense"],
)
def test_bad_tensors_are_named(
    folder: Path, tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / FILE).write_bytes((folder / FILE).read_bytes())

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, tensor in changes.items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor

    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in caught.value.message
