"""A prompt near the longest context of Kimi, on narrow layers: pushed, cached and resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.model_loading import kv_layout_of
from shared.engine.models.checkpoint_config import read_config
from shared.messages import SamplingParams
from tests.support.engine.checkpoints import write_model
from tests.support.engine.families import YARN
from tests.support.engine.model_worker import Worker, push_kv
from tests.support.engine.rig import new_sequence

NUM_SAMPLED = 6
BUDGET = 2048
# Beside the KV: scores of 64 rows and the context, in FP32, of each thread that attends; the
# prompts as lists, hashes and payloads; code that the first step loads.
SCORE_BYTES, PROMPT_BYTES, CODE_BYTES = 64 * 4, 400, 160 << 20
NARROW: dict[str, Any] = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        **YARN,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def _worker(folder: Path, num_tokens: int) -> Worker:
    """Its KV cache has room for one prompt."""
    num_blocks = (num_tokens + 4 * NUM_SAMPLED) // 16 + 8
    layout = kv_layout_of(read_config(folder), "bfloat16", 16)
    assert layout.block_bytes == 2 * 16 * (20 + 8) * 2  # 2 layers, BF16
    executor = load_executor(
        folder, dtype="bfloat16", kv_cache_bytes=num_blocks * layout.block_bytes
    )
    assert executor.computer.kv_cache.nbytes == num_blocks * layout.block_bytes
    return Worker(folder, "bfloat16", budget=BUDGET, executor=executor)


def _resident_bytes(field: str) -> int:
    """`VmRSS`: now; `VmHWM`: the most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _reset_resident_bytes() -> int:
    """Resets VmHWM. Returns VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_bytes("VmRSS")


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [20_000, 250_000])
def test_pushed_cached_and_resumed_prompts_give_the_same_tokens(
    tmp_path: Path, num_tokens: int
) -> None:
    write_model(tmp_path, "DeepseekV3ForCausalLM", **NARROW)
    prompt = [(7 * n + n * n % 1009) % 190 + 3 for n in range(num_tokens)]
    sampling = SamplingParams(seed=3, max_tokens=NUM_SAMPLED, temperature=0.9)

    async def main() -> None:
        before = _reset_resident_bytes()
        prefill, decode = _worker(tmp_path, num_tokens), _worker(tmp_path, num_tokens)
        source = new_sequence(prompt[:-1], None)
        await prefill.run(source)
        pushed = new_sequence(prompt, sampling)
        assert decode.engine.reserve(pushed)
        await push_kv(prefill, source, decode, pushed)
        decode.engine.activate(pushed, num_tokens - 1)
        await decode.run_on()
        assert decode.num_computed_tokens == NUM_SAMPLED
        expected = decode.tokens[pushed.sequence_id]
        assert len(set(expected)) > 1

        cached = new_sequence(prompt, sampling)
        assert await decode.run(cached) == expected
        assert cached.num_cached_tokens == (num_tokens - 1) // 16 * 16

        prefill.engine.abort(source)
        resumed = new_sequence(prompt, sampling, output_ids=expected[:4])
        assert await prefill.run(resumed) == expected[4:]
        assert resumed.num_cached_tokens == (num_tokens - 1) // 16 * 16

        caches = 3 * prefill.executor.computer.kv_cache.nbytes  # two, and the payload of a push
        scratch = torch.get_num_threads() * SCORE_BYTES * num_tokens
        grown = _resident_bytes("VmHWM") - before
        assert grown < caches + scratch + PROMPT_BYTES * num_tokens + CODE_BYTES

    asyncio.run(main())
