"""Ranks that share experts, as threads: at 1 to 8 ranks, ep or tp, the bits of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config import ExpertSplit
from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.step_computer import StepComputer
from shared.engine.models.checkpoint_config import read_config
from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.planning.worker_parts import worker_parts
from shared.engine.step import StepInputs
from shared.errors import ConfigError
from shared.numerics import Activations
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_model
from tests.support.engine.quantized import quantize
from tests.support.engine.steps import Blocks, step_of
from tests.support.grids import in_short_run

NUM_BLOCKS = 64
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 300,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    # lanes of unequal width, the last of a partial block; a dense layer; a shared expert
    "glm4": {
        "architecture": "Glm4MoeForCausalLM",
        "n_routed_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 280,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "mixtral": {
        "architecture": "MixtralForCausalLM",
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    # sinks of heads, biases of experts and of their columns
    "gpt-oss": {
        "architecture": "GptOssForCausalLM",
        "intermediate_size": 280,
        "num_local_experts": 10,
        "num_experts_per_tok": 3,
        "layer_types": ["full_attention"] * 3,
        "swiglu_limit": 0.5,
    },
}
PROMPTS = [[(11 * n) % 300 for n in range(50)], [(5 * n + 1) % 300 for n in range(9)]]
# of each split: numbers of ranks and stages
MESHES: dict[ExpertSplit, list[tuple[int, int]]] = {
    "ep": [(2, 1), (4, 1), (8, 1), (2, 3)],
    "tp": [(2, 1), (8, 1), (2, 2)],
    "auto": [(1, 2)],
}


@pytest.fixture(scope="module", params=in_short_run(["glm4", "gpt-oss"], SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, **{**TINY, **SHAPES[request.param]})
    return folder


def steps() -> list[StepInputs]:
    """Chunks of two prompts in a batch, then the last token of each; all tokens have logits."""
    blocks = Blocks(NUM_BLOCKS)
    long, short = (blocks.line(each) for each in PROMPTS)
    found = []
    for work in ([(long, 30)], [(long, 19), (short, 8)], [(short, 1), (long, 1)]):
        found.append(step_of(work))
        for line, num_new in work:
            line.num_computed += num_new
    return found


@pytest.fixture(scope="module", params=in_short_run(["bfloat16"], ["bfloat16", "float32"]))
def whole(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[Tensor]]:
    """A dtype, and the results of the whole model."""
    executor = load_executor(folder, dtype=request.param, kv_cache_bytes=8 << 20)
    return request.param, results_of(executor.computer)


def results_of(computer: StepComputer) -> list[Tensor]:
    """Logits of each step, then the tokens of each layer's experts in all steps."""
    before = expert_counts(computer)
    logits = [computer.step_logits(step) for step in steps()]
    return [*logits, expert_counts(computer) - before]


def expert_counts(computer: StepComputer) -> Tensor:
    counts = computer.expert_counts()
    assert counts is not None
    return torch.from_numpy(counts)


def of_ranks(
    folder: Path,
    shape: tuple[int, int],
    dtype: str,
    experts: ExpertSplit,
    activations: Activations = "plain",
) -> list[list[Tensor]]:
    """The results of each rank of the last stage."""
    setup = RankSetup(
        model_dir=str(folder),
        options=LoadOptions(dtype=dtype, activations=activations, experts=experts),
        max_blocks=NUM_BLOCKS,
        num_threads=1,
        kv=(),
        masks=-1,
    )

    def results(mesh: Mesh) -> list[Tensor]:
        computer = load_rank(setup, mesh).computer
        if mesh.shape.place(mesh.rank)[0] == mesh.shape.pp - 1:
            return results_of(computer)
        computer.expert_counts()  # all ranks count between the same steps
        for step in steps():
            computer.run(step)
        computer.expert_counts()
        return []

    exchange: Exchange = "bf16" if activations == "bf16-exchange" else "fp32"
    return [found for found in run_ranks(MeshShape(*shape), results, exchange) if found]


@pytest.mark.parametrize(
    ("experts", "shape"),
    in_short_run(
        [("ep", (4, 1)), ("ep", (2, 3)), ("tp", (8, 1)), ("auto", (1, 2))],
        [(experts, shape) for experts, shapes in MESHES.items() for shape in shapes],
    ),
)
def test_logits_and_counts_are_equal_at_every_number_of_ranks(
    folder: Path, whole: tuple[str, list[Tensor]], experts: ExpertSplit, shape: tuple[int, int]
) -> None:
    dtype, expected = whole
    found = of_ranks(folder, shape, dtype, experts)
    assert len(found) == shape[0]
    for rank in found:
        for ours, theirs in zip(rank, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("experts", ["ep", "tp"])
def test_sums_in_bf16_are_rounded_alike(folder: Path, experts: ExpertSplit) -> None:
    executor = load_executor(
        folder, dtype="bfloat16", kv_cache_bytes=8 << 20, activations="bf16-exchange"
    )
    expected = results_of(executor.computer)
    plain = load_executor(folder, dtype="bfloat16", kv_cache_bytes=8 << 20)
    assert not torch.equal(plain.step_logits(steps()[0]), expected[0])
    for rank in of_ranks(folder, (2, 1), "bfloat16", experts, "bf16-exchange"):
        for ours, theirs in zip(rank, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.long  # compiles the loops of their ranks
@pytest.mark.parametrize("experts", ["ep", "tp"])
def test_four_bit_experts_are_shared_too(experts: ExpertSplit, tmp_path: Path) -> None:
    write_model(tmp_path / "plain", dtype=torch.bfloat16, **{**TINY, **SHAPES["mixtral"]})
    ignored = [r"re:.*self_attn.*"]
    folder = quantize(tmp_path / "plain", tmp_path / "quantized", "int4", ignored=ignored)
    executor = load_executor(folder, dtype="bfloat16", kv_cache_bytes=8 << 20)
    expected = results_of(executor.computer)
    for rank in of_ranks(folder, (2, 1), "bfloat16", experts):
        for ours, theirs in zip(rank, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_each_split_cuts_what_it_says(folder: Path) -> None:
    config = read_config(folder)
    moe = config.moe
    assert moe is not None
    for experts in ("ep", "tp"):
        parts = [part.experts for part in worker_parts(config, MeshShape(4), experts)]
        held = [part.experts for part in parts if part is not None]
        columns = [part.columns for part in parts if part is not None]
        whole = (0, moe.num_experts), (0, moe.intermediate_size)
        cut, uncut = (held, columns) if experts == "ep" else (columns, held)
        total, other = whole if experts == "ep" else whole[::-1]
        assert [first for first, _ in cut] + [total[1]] == [0, *(end for _, end in cut)]
        assert uncut == [other] * 4


def test_models_that_cannot_be_cut_are_named(tmp_path: Path) -> None:
    shape = {**TINY, **SHAPES["mixtral"], "intermediate_size": 64, "num_local_experts": 3}
    write_model(tmp_path, **shape)
    config = read_config(tmp_path)
    with pytest.raises(ConfigError, match="3 experts are too few for 4 ranks"):
        worker_parts(config, MeshShape(4), "ep")
    with pytest.raises(ConfigError, match="the 64 columns of each expert are too few for 4 ranks"):
        worker_parts(config, MeshShape(4), "tp")
    write_model(tmp_path / "dense", "LlamaForCausalLM", **TINY)
    with pytest.raises(ConfigError, match="the model has no experts to spread over ranks"):
        worker_parts(read_config(tmp_path / "dense"), MeshShape(2), "ep")
