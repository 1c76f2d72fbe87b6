"""A full engine on Triton's kernels generates the same tokens as transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kernels import ops
from kernels.device import IS_INTERPRETED
from kernels.split_weight import SplitWeight
from kernels.torch_ops.sample import sample
from shared.engine.executors.load import load_executor
from shared.engine.sampling.sampler import sampling_columns
from shared.engine.step import sampling_rows
from tests.support.engine.checkpoints import write_model
from tests.support.engine.steps import Blocks, advance, prefill, step_of

NUM_PROMPT, NUM_NEW = 13, 3
SMALL = {
    "hidden_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {},  # norms of heads
    "Gemma2ForCausalLM": {  # each second layer has a window
        "num_hidden_layers": 2,
        "sliding_window": 7,
        "attn_logit_softcapping": 3.0,
    },
    "MixtralForCausalLM": {"num_local_experts": 5, "intermediate_size": 40},
    "DeepseekV3ForCausalLM": {  # latents
        "head_dim": 8,
        "num_key_value_heads": 2,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "kv_lora_rank": 20,
        "q_lora_rank": 14,
        "first_k_dense_replace": 1,  # its 256 experts take 100 s in the interpreter
    },
}


def prompt_of(num_tokens: int) -> list[int]:
    return torch.randint(3, 199, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(
    params=[
        "DeepseekV3ForCausalLM",
        "MixtralForCausalLM",
        *(
            pytest.param(family, marks=pytest.mark.long)
            for family in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        ),
        pytest.param("Gemma2ForCausalLM", marks=pytest.mark.long if IS_INTERPRETED else ()),
    ]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[int]]:
    """A checkpoint, and transformers' continuation of a prompt."""
    model = write_model(
        tmp_path,
        request.param,
        **{**SMALL, "vocab_size": 203, **FAMILIES[request.param]},
    )
    token_ids = prompt_of(NUM_PROMPT)
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return tmp_path, token_ids[-NUM_NEW:]


@pytest.mark.each_value
def test_greedy_tokens(checkpoint: tuple[Path, list[int]], device: torch.device) -> None:
    assert ops.HAS_TRITON
    folder, expected = checkpoint
    executor = load_executor(
        folder, dtype="float32", kv_cache_bytes=1 << 20, device=str(device), num_threads=1
    )
    blocks, prompt = Blocks(executor.num_blocks), prompt_of(NUM_PROMPT)
    # in chunks, then together with another
    line, other = blocks.line(prompt, room=NUM_NEW), blocks.line(prompt_of(5), room=NUM_NEW)
    prefill(executor, other, 5)
    logits = prefill(executor, line, 8)
    for token_id in expected[:-1]:
        assert int(logits[-1].argmax()) == token_id
        line.token_ids.append(token_id)
        other.token_ids.append(7)
        logits = advance(executor, [(other, 1), (line, 1)])
    assert int(logits[-1].argmax()) == expected[-1]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("LlamaForCausalLM", marks=pytest.mark.long),
        pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.long),
        pytest.param("Gemma2ForCausalLM", marks=pytest.mark.long if IS_INTERPRETED else ()),
    ],
)
def test_logits_are_bit_equal_for_every_batch_and_chunking(
    tmp_path: Path, family: str, device: torch.device, small_segments: None
) -> None:
    """For a context of two segments; the default mode of the engine, on every device."""
    write_model(tmp_path, family, **{**SMALL, "vocab_size": 203, **FAMILIES[family]})
    dtype = "float32" if IS_INTERPRETED else "bfloat16"
    num_tokens = 131 if IS_INTERPRETED else 1100
    executor = load_executor(
        tmp_path, dtype=dtype, kv_cache_bytes=1 << 22, device=str(device), num_threads=1
    )
    blocks, prompt = Blocks(executor.num_blocks), prompt_of(num_tokens)
    unchunked = prefill(executor, blocks.line(prompt), num_tokens)
    line, others = blocks.line(prompt), [blocks.line(prompt_of(n)) for n in (9, 3)]
    while (num_left := num_tokens - 2 - line.num_computed) > 0:
        first = line.num_computed
        chunk = advance(executor, [(line, min(64, num_left))])
        assert torch.equal(chunk, unchunked[first : line.num_computed])
    for position in (num_tokens - 2, num_tokens - 1):  # compared with prefill, one token at a time
        logits = advance(executor, [(others[0], 1), (line, 1), (others[1], 1)])
        assert torch.equal(logits[1], unchunked[position])


def test_sampled_tokens(tmp_path: Path, device: torch.device) -> None:
    write_model(tmp_path, "LlamaForCausalLM", **SMALL)
    executor = load_executor(
        tmp_path, dtype="float32", kv_cache_bytes=1 << 20, device=str(device), num_threads=1
    )
    inputs = step_of([(Blocks(executor.num_blocks).line(prompt_of(4)), 4)])
    rows = sampling_rows(4, temperature=0.9, top_k=20, top_p=0.8, seed=np.arange(4))
    sampling = replace(inputs.sampling, rows=rows)
    sampled = asyncio.run(executor.run(replace(inputs, sampling=sampling))).token_ids
    columns = sampling_columns(sampling, device)
    assert sampled == sample(executor.step_logits(inputs), *columns).tolist()


@pytest.mark.parametrize(
    "is_tied",
    [
        pytest.param(True, marks=pytest.mark.long if IS_INTERPRETED else ()),
        pytest.param(False, marks=pytest.mark.long),
    ],
)
def test_split_weights_give_the_same_logits(
    tmp_path: Path, is_tied: bool, device: torch.device
) -> None:
    """Covers linear layers, the output head and the rows of an embedding lookup."""
    shape = {**SMALL, "hidden_size": 64, "intermediate_size": 128}
    write_model(tmp_path, "LlamaForCausalLM", **shape, tie_word_embeddings=is_tied)
    logits = []
    for weights in ("dense", "compressed"):
        executor = load_executor(
            tmp_path,
            dtype="bfloat16",
            kv_cache_bytes=1 << 20,
            device=str(device),
            num_threads=1,
            weights=weights,
        )
        blocks, prompt = Blocks(executor.num_blocks), prompt_of(NUM_PROMPT)
        logits.append(prefill(executor, blocks.line(prompt), 8))
    assert isinstance(executor.computer.model.lm_head.weight, SplitWeight)
    assert torch.equal(*logits)
