"""Sums that cross ranks in BF16: bits of their own, the same at every number of ranks, and the
bytes that a plan foresees.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.models.checkpoint_config import read_config
from shared.engine.parallel.links import Host, LinkTable
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.planning.model_shape import model_shape
from shared.engine.planning.parallel_plan import all_plans, plan_of
from shared.engine.step import StepInputs
from shared.numerics import Activations, exchange_of
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_model
from tests.support.engine.steps import Blocks, step_of
from tests.support.grids import in_short_run

NUM_BLOCKS = 64
VOCABULARY, HIDDEN = 300, 256
FIELDS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 300,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, **FIELDS)
    return folder


def prompt(num_tokens: int) -> list[int]:
    return [(11 * n) % VOCABULARY for n in range(num_tokens)]


def steps() -> list[StepInputs]:
    """A chunk of a prompt, then its rest beside another one; all tokens have logits."""
    blocks = Blocks(NUM_BLOCKS)
    long, short = blocks.line(prompt(50)), blocks.line(prompt(9))
    found = []
    for work in ([(long, 30)], [(long, 19), (short, 8)], [(short, 1), (long, 1)]):
        found.append(step_of(work))
        for line, num_new in work:
            line.num_computed += num_new
    return found


def run_model(
    folder: Path,
    shape: MeshShape,
    dtype: str,
    activations: Activations,
    work: Callable[[Mesh, Any], Any],
) -> Any:
    setup = RankSetup(
        model_dir=str(folder),
        options=LoadOptions(dtype=dtype, activations=activations),
        max_blocks=NUM_BLOCKS,
        num_threads=1,
        kv=(),
        masks=-1,
    )

    def on_rank(mesh: Mesh) -> Any:
        return work(mesh, load_rank(setup, mesh).computer)

    return run_ranks(shape, on_rank, exchange_of(activations))


@pytest.mark.parametrize("dtype", in_short_run(["bfloat16"], ["bfloat16", "float32"]))
def test_logits_are_bit_equal_at_every_number_of_ranks(folder: Path, dtype: str) -> None:
    options: dict[str, Any] = {"dtype": dtype, "kv_cache_bytes": 8 << 20}
    single = load_executor(folder, activations="bf16-exchange", **options)
    plain = load_executor(folder, **options)
    expected = [single.step_logits(step) for step in steps()]
    assert not torch.equal(expected[0], plain.step_logits(steps()[0]))
    assert single.numerics.activations == "bf16-exchange"
    assert not single.numerics.may_share_kv(plain.numerics)

    def logits(mesh: Mesh, computer: Any) -> list[Tensor]:
        return [computer.step_logits(step) for step in steps()]

    for tp in (2, 4, 8):
        for found in run_model(folder, MeshShape(tp), dtype, "bf16-exchange", logits):
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs), f"tp {tp}"


def test_stages_of_one_rank_round_as_well(folder: Path) -> None:
    single = load_executor(
        folder, dtype="bfloat16", kv_cache_bytes=8 << 20, activations="bf16-exchange"
    )
    expected = single.step_logits(steps()[0]).argmax(1).tolist()

    def tokens(mesh: Mesh, computer: Any) -> list[int]:
        return computer.run(steps()[0]).token_ids

    shape = MeshShape(1, 3)
    found = run_model(folder, shape, "bfloat16", "bf16-exchange", tokens)
    assert found[shape.answering_rank] == expected


@pytest.mark.each_value
@pytest.mark.parametrize("activations", ["plain", "bf16-exchange"])
@pytest.mark.parametrize("num_tokens", [4, 300], ids=["gathered", "halved"])
@pytest.mark.parametrize("shape", [MeshShape(4), MeshShape(2, 2)], ids=["tp 4", "tp 2 x pp 2"])
def test_ranks_send_the_bytes_of_the_plan(
    folder: Path, activations: Activations, num_tokens: int, shape: MeshShape
) -> None:
    step = step_of([(Blocks(NUM_BLOCKS).line(prompt(num_tokens)), num_tokens)])

    def sent(mesh: Any, computer: Any) -> int:
        before = mesh.num_sent_bytes
        computer.run(step)
        return mesh.num_sent_bytes - before

    found = run_model(folder, shape, "bfloat16", activations, sent)
    model = model_shape(
        read_config(folder),
        item_bytes=2,
        num_tokens=num_tokens,
        exchange=exchange_of(activations),
        rank_bytes_per_s=1e9,
    )
    plan = plan_of(all_plans(LinkTable((Host("a", 4),)), model), shape.tp, shape.pp)
    assert sum(found) == pytest.approx(plan.num_bytes, rel=0.02)
    for stage, num_bytes in enumerate(plan.rank_bytes):
        border = plan.border_bytes / shape.tp if stage + 1 < shape.pp else 0
        for rank in shape.stage_ranks(stage):
            assert found[rank] == pytest.approx(num_bytes + border, rel=0.02)
