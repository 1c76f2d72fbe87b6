"""Layers that one fused kernel computes: which ones, and that no bit of the logits changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.gemm.bf16_gemm import has_bf16_kernels
from kernels.cpu.layer.fused_layer import MANY_ROWS
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.layers.fused_layer import FusedLayer
from shared.engine.models.decoder import Decoder
from shared.engine.step import LogitBias, Penalties, sampling_rows
from tests.support.engine.checkpoints import write_model
from tests.support.engine.steps import Blocks, advance, greedy, step_of

pytestmark = pytest.mark.skipif(not has_bf16_kernels(), reason="needs products of BF16")
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 224,
}
FUSED = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
]


def load(folder: Path, dtype: str = "bfloat16") -> LocalExecutor:
    return load_executor(folder, dtype=dtype, kv_cache_bytes=2 << 20)


def logits(executor: LocalExecutor, num_tokens: int) -> list[Tensor]:
    """Logits of a mixed step, a step of single tokens, and a step with a long prompt."""
    blocks = Blocks(executor.num_blocks)
    ids = torch.randint(0, 224, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [blocks.line(ids[:45]), blocks.line(ids[50:53]), blocks.line(ids)]
    works = (
        [(lines[0], 40), (lines[1], 2)],
        [(lines[0], 1), (lines[1], 1)],
        [(lines[2], num_tokens)],
    )
    return [advance(executor, work) for work in works]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", FUSED)
def test_fused_layers_give_the_same_logits(
    architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, architecture, **SHAPE)
    fused = load(tmp_path, dtype)
    assert all(isinstance(layer, FusedLayer) for layer in fused.computer.model.layers)
    monkeypatch.setattr(Decoder, "fuse", lambda model: None)
    unfused = load(tmp_path, dtype)
    assert not any(isinstance(layer, FusedLayer) for layer in unfused.computer.model.layers)
    # Loops by rows, which a prompt of 600 tokens may take, are 13 s to compile in FP32 too.
    num_tokens = 600 if dtype == "bfloat16" else MANY_ROWS - 1
    for got, expected in zip(logits(fused, num_tokens), logits(unfused, num_tokens), strict=True):
        assert torch.equal(got, expected)


def test_layers_with_mlp_bias_are_not_fused(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM", **SHAPE, mlp_bias=True)
    executor = load(tmp_path)
    assert not any(isinstance(layer, FusedLayer) for layer in executor.computer.model.layers)


def test_greedy_step_samples_the_argmax(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM", **SHAPE)
    executor = load(tmp_path)
    step = step_of([(Blocks(executor.num_blocks).line(range(40)), 40)])
    assert step.sampling.is_plain_greedy
    expected = executor.step_logits(step).argmax(-1).tolist()
    assert executor._run(step).token_ids == expected
    with_logprobs = msgspec.structs.replace(step.sampling, raw_logprobs={3: 2})
    output = executor._run(msgspec.structs.replace(step, sampling=with_logprobs))
    assert output.token_ids == expected
    assert [row for row, each in enumerate(output.logprobs) if each is not None] == [3]


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": sampling_rows(2, temperature=[0, 0.5])},
        {"banned": [(1, 7)]},
        {"processed_logprobs": {0: 0}},
        {"bias": LogitBias(np.array([0]), np.array([3]), np.array([1], np.float32))},
        {"penalties": Penalties(*np.ones((2, 1), np.int64), *np.ones((2, 1), np.float32))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_options_that_change_logits_are_not_plain_greedy(changes: dict[str, Any]) -> None:
    sampling = greedy([0, 1])
    assert sampling.is_plain_greedy
    assert not msgspec.structs.replace(sampling, **changes).is_plain_greedy
