"""Greedy tokens equal those of transformers, in FP32, on checkpoints of odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from tests.support.engine.checkpoints import LLAMA3_ROPE, write_llama
from tests.support.engine.reference import margin_checked_prompt
from tests.support.engine.steps import Blocks, generate, prefill

SHAPES: dict[str, dict[str, Any]] = {
    "head_dim 20, group 2": {"head_dim": 20},
    "group 7, head_dim 24": {
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "hidden_size": 56,
    },
    "group 7, two KV heads": {
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_size": 56,
    },
    "tied": {"tie_word_embeddings": True},
    "llama3 rope, biases": {
        "rope_parameters": LLAMA3_ROPE,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    },
    "no grouping, head_dim from hidden": {"num_key_value_heads": 4, "head_dim": None},
}
NUM_TOKENS = 12
Loaded = Callable[[str], tuple[PreTrainedModel, LocalExecutor]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Returns, for a shape, the model of transformers and the executor of all tests."""

    @cache
    def load(shape: str) -> tuple[PreTrainedModel, LocalExecutor]:
        folder = tmp_path_factory.mktemp("model")
        model = write_llama(folder, **SHAPES[shape])
        return model, load_executor(folder, dtype="float32", kv_cache_bytes=8 << 20)

    return load


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_equal_transformers(loaded: Loaded, shape: str) -> None:
    model, executor = loaded(shape)
    blocks = Blocks(executor.num_blocks)
    for num_tokens in (1, 16, 17, 300):
        prompt, expected = margin_checked_prompt(model, num_tokens, executor.vocab_size, NUM_TOKENS)
        line = blocks.line(prompt, room=NUM_TOKENS)
        assert generate(executor, line, NUM_TOKENS) == expected, f"prompt of {num_tokens}"
        is_tied = "tied" in shape  # a tied model repeats itself
        assert is_tied or len(set(expected)) > 3, "the output has too few different tokens"


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_close_to_transformers(loaded: Loaded, shape: str) -> None:
    model, executor = loaded(shape)
    prompt = torch.randint(3, 199, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = prefill(executor, Blocks(executor.num_blocks).line(prompt), 64)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = write_llama(tmp_path, dtype=torch.bfloat16)
    executor = load_executor(tmp_path, dtype="bfloat16", kv_cache_bytes=4 << 20)
    prompt = torch.randint(3, 199, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = prefill(executor, Blocks(executor.num_blocks).line(prompt), 64)
    error = (actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 0.03
