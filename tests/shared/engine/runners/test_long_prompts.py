"""A prompt near the longest context of Kimi, on narrow layers: pushed, cached and resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.engine.models.checkpoint_config import read_config
from shared.engine.runners.load import load_runner
from shared.engine.runners.model_loading import kv_layout_of
from shared.messages import SamplingParams
from tests.shared.engine.support.checkpoints import write_model
from tests.shared.engine.support.families import YARN
from tests.shared.engine.support.model_worker import Worker, push_kv
from tests.shared.engine.support.rig import new_sequence

NUM_SAMPLED = 6
BUDGET = 2048
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
    num_blocks = (num_tokens + 4 * NUM_SAMPLED) // 16 + 8
    num_bytes = num_blocks * kv_layout_of(read_config(folder), "bfloat16", 16).block_bytes
    runner = load_runner(folder, dtype="bfloat16", kv_cache_bytes=num_bytes)
    return Worker(folder, "bfloat16", budget=BUDGET, runner=runner)


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [20_000, 250_000])
def test_pushed_cached_and_resumed_prompts_give_the_same_tokens(
    tmp_path: Path, num_tokens: int
) -> None:
    write_model(tmp_path, "DeepseekV3ForCausalLM", **NARROW)
    prompt = [(7 * n + n * n % 1009) % 190 + 3 for n in range(num_tokens)]
    sampling = SamplingParams(seed=3, max_tokens=NUM_SAMPLED, temperature=0.9)

    async def main() -> None:
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

    asyncio.run(main())
