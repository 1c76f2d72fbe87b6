"""The bits of the logits depend neither on the batch nor on the chunks of the prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from tests.support.engine.checkpoints import write_llama, write_model
from tests.support.engine.steps import Blocks, Line, advance, prefill
from tests.support.grids import in_short_run
from tests.support.threads import computing_threads

SHAPES: dict[str, dict[str, Any]] = {
    "group 2, head_dim 20": {"head_dim": 20, "hidden_size": 80},
    "group 7, one KV head": {
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "hidden_size": 56,
    },
    # inner sizes at which the CPU's GEMM selects other kernels for few rows
    "wide": {
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "attention_bias": True,
    },
    "window, soft caps": {
        "architecture": "Gemma2ForCausalLM",
        "sliding_window": 200,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 77,
    },
    "window, head norms": {
        "architecture": "Gemma3ForCausalLM",
        "sliding_window": 21,
        "sliding_window_pattern": 2,
        "head_dim": 10,
    },
    "latents of full blocks": {
        "architecture": "DeepseekV3ForCausalLM",
        "hidden_size": 128,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "kv_lora_rank": 96,
        "q_lora_rank": 64,
        "first_k_dense_replace": 2,
    },
}
PROMPT_TOKENS = 150


CASES = [
    (shape, dtype)
    for shape in SHAPES
    for dtype in ("bfloat16", "float32")
    if (shape, dtype) != ("latents of full blocks", "float32")  # families has FP32
]


def _load(folder: Path, shape: str, dtype: str) -> LocalExecutor:
    write_model(folder, **{"architecture": "LlamaForCausalLM", **SHAPES[shape]})
    return load_executor(folder, dtype=dtype, kv_cache_bytes=64 << 20)


SHORT = [
    ("group 7, one KV head", "bfloat16"),
    ("wide", "float32"),
    ("window, soft caps", "bfloat16"),
    ("latents of full blocks", "bfloat16"),
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CASES],
    ids="-".join,
)
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LocalExecutor:
    return _load(tmp_path_factory.mktemp("model"), *request.param)


@pytest.fixture(scope="module")
def one_step_logits(executor: LocalExecutor) -> torch.Tensor:
    """The logits of a prompt that one thread computed in one step."""
    logits = prefill(executor, Blocks(executor.num_blocks).line(_prompt(1, PROMPT_TOKENS)), 150)
    assert torch.isfinite(logits).all()
    return logits


@pytest.fixture(scope="module")
def solo_logits(executor: LocalExecutor) -> list[torch.Tensor]:
    """The last logits of each of 32 prompts, each computed alone on one thread."""
    blocks = Blocks(executor.num_blocks)
    return [prefill(executor, blocks.line(prompt), 64)[-1] for prompt in _prompts()]


def _prompts() -> list[list[int]]:
    return [_prompt(10 + index, 1 + (37 * index) % 300) for index in range(32)]


def _prompt(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (num_tokens,), generator=generator).tolist()


@pytest.mark.parametrize(
    ("num_threads", "chunk"),
    in_short_run([(1, 7), (2, 64)], product((1, 2), (1, 7, 64, PROMPT_TOKENS))),
)
def test_logits_are_bit_equal_for_every_chunking(
    executor: LocalExecutor, one_step_logits: torch.Tensor, num_threads: int, chunk: int
) -> None:
    line = Blocks(executor.num_blocks).line(_prompt(1, PROMPT_TOKENS))
    with computing_threads(num_threads):
        assert torch.equal(prefill(executor, line, chunk), one_step_logits)


@pytest.mark.parametrize("dtype", in_short_run(["bfloat16"], ["bfloat16", "float32"]))
def test_tiles_skipped_before_a_window_change_no_bit(tmp_path: Path, dtype: str) -> None:
    """Smaller chunks skip more tiles, sometimes an odd number."""
    executor = _load(tmp_path, "window, soft caps", dtype)
    blocks = Blocks(executor.num_blocks)
    prompt = _prompt(1, 400)
    one_step_logits = prefill(executor, blocks.line(prompt), 400)
    for chunk in (1, 7, 64):
        assert torch.equal(prefill(executor, blocks.line(prompt), chunk), one_step_logits), (
            f"chunks of {chunk}"
        )


@pytest.mark.parametrize("num_threads", in_short_run([2], [1, 2]))
def test_logits_are_bit_equal_for_every_batch(
    executor: LocalExecutor, solo_logits: list[torch.Tensor], num_threads: int
) -> None:
    """Decode rows with contexts of 1 to 300 tokens, beside a prefill chunk."""
    for batch_size in (7, 32):
        blocks = Blocks(executor.num_blocks, seed=batch_size)
        lines = [blocks.line(prompt) for prompt in _prompts()[:batch_size]]
        for line in lines:
            _prefill_all_but_last(executor, line)
        beside = blocks.line(_prompt(5, 20))
        work = [(line, 1) for line in lines]
        work.insert(3, (beside, 20))
        with computing_threads(num_threads):
            logits = advance(executor, work)
        logits = torch.cat((logits[:3], logits[23:]))
        for index in range(batch_size):
            assert torch.equal(logits[index], solo_logits[index]), f"row {index} of {batch_size}"


def _prefill_all_but_last(executor: LocalExecutor, line: Line) -> None:
    num_tokens = len(line.token_ids) - 1
    if num_tokens:
        advance(executor, [(line, num_tokens)])


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize("block_size", [4, 64, 128])
def test_block_size_changes_no_bit(tmp_path: Path, block_size: int, architecture: str) -> None:
    write_model(tmp_path, architecture, sliding_window=30)
    prompt = _prompt(2, 200)
    logits = []
    for size in (16, block_size):
        executor = load_executor(tmp_path, dtype="float32", kv_cache_bytes=4 << 20, block_size=size)
        line = Blocks(executor.num_blocks).line(prompt, block_size=size)
        logits.append(prefill(executor, line, 33))
    assert torch.equal(logits[0], logits[1])


def test_stale_kv_after_the_context_is_not_read(tmp_path: Path) -> None:
    """Blocks are not zeroed between sequences."""
    write_llama(tmp_path)
    executor = load_executor(tmp_path, dtype="float32", kv_cache_bytes=4 << 20)
    blocks = Blocks(executor.num_blocks)
    prompt = _prompt(3, 70)
    fresh = prefill(executor, blocks.line(prompt), 70)
    used = blocks.line(_prompt(4, 80))
    prefill(executor, used, 80)
    again = prefill(executor, replace(used, token_ids=prompt, num_computed=0), 13)
    assert torch.equal(fresh, again)
