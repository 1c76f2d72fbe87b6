"""Ranks as threads of this process: at 1, 2, 4 and 8 ranks the bits of the undivided model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.step import EmbeddedTokens, StepInputs
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_model
from tests.support.engine.steps import Blocks, step_of
from tests.support.grids import in_short_run

NUM_BLOCKS = 64
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama, group 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "llama, 28 heads": {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 224},
    "qwen3, head norms": {
        "architecture": "Qwen3ForCausalLM",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "qwen2, biases, tied": {
        "architecture": "Qwen2ForCausalLM",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "gemma2, windows": {
        "architecture": "Gemma2ForCausalLM",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 20,
    },
    "deepseek": {
        "architecture": "DeepseekV3ForCausalLM",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "kv_lora_rank": 20,
        "q_lora_rank": 14,
        "first_k_dense_replace": 2,
    },
}
PROMPTS = [[(11 * n) % 300 for n in range(50)], [(5 * n + 1) % 300 for n in range(9)]]


# Heads that ranks share unevenly; norms of heads; latents.
SHORT = ("llama, 28 heads", "qwen3, head norms", "deepseek")


@pytest.fixture(scope="module", params=in_short_run(SHORT, SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    fields = {"architecture": "LlamaForCausalLM", **TINY, **SHAPES[request.param]}
    write_model(folder, **fields)
    return folder


def steps(num_groups: int, hidden_size: int, dtype: str) -> list[StepInputs]:
    """Chunks of two prompts in a batch, then the last token of each; all tokens have logits. Some
    tokens of the first chunk have vectors of images.
    """
    blocks = Blocks(NUM_BLOCKS)
    long, short = (blocks.line(each) for each in PROMPTS)
    found = []
    for work in ([(long, 30)], [(long, 19), (short, 8)], [(short, 1), (long, 1)]):
        found.append(step_of(work, num_groups=num_groups))
        for line, num_new in work:
            line.num_computed += num_new
    return [with_vectors(found[0], hidden_size, dtype), *found[1:]]


def with_vectors(step: StepInputs, hidden_size: int, dtype: str) -> StepInputs:
    rows = np.array([4, 5, 6, 21])
    vectors = torch.randn(len(rows), hidden_size, generator=torch.Generator().manual_seed(0))
    raw = vectors.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    return msgspec.structs.replace(step, embedded=EmbeddedTokens(rows, raw))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_bit_equal_at_every_number_of_ranks(folder: Path, dtype: str) -> None:
    executor = load_executor(folder, dtype=dtype, kv_cache_bytes=8 << 20)
    num_groups = len(executor.kv_layout.groups)
    shape = num_groups, executor.computer.model.config.hidden_size, dtype
    expected = [executor.step_logits(step) for step in steps(*shape)]
    setup = RankSetup(
        model_dir=str(folder),
        options=LoadOptions(dtype=dtype),
        max_blocks=NUM_BLOCKS,
        num_threads=1,
        kv=(),
        masks=-1,
    )

    def logits(mesh: Mesh) -> list[Tensor]:
        computer = load_rank(setup, mesh).computer
        return [computer.step_logits(step) for step in steps(*shape)]

    for tp in (2, 4, 8):
        for found in run_ranks(MeshShape(tp), logits):
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs), f"tp {tp}"
