"""Two layers as wide as those of Kimi K2, with eight experts: the logits of transformers.

0.6 G random weights; once in a long run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.executors.load import load_executor
from tests.support.engine.checkpoints import write_model
from tests.support.engine.families import YARN
from tests.support.engine.steps import Blocks, prefill

NUM_TOKENS = 300
# Of the median token: in BF16 a few choose another expert, of two with nearly equal scores.
TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-2}  # FP32 sums of 7168 numbers, not of 48
WIDTHS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 7168,
    "intermediate_size": 2048,  # of the dense layer; its own would be 18,432
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 64.0},
    "initializer_range": 0.02,
}


@pytest.mark.long
def test_logits_match_transformers(tmp_path: Path) -> None:
    model = write_model(tmp_path, "DeepseekV3ForCausalLM", dtype=torch.bfloat16, **WIDTHS)
    tokens = torch.randint(3, 512, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens.unsqueeze(0)).logits[0]
    del model
    for dtype, tolerance in TOLERANCE.items():
        executor = load_executor(tmp_path, dtype=dtype, kv_cache_bytes=8 << 20)
        blocks = Blocks(executor.num_blocks)
        whole = prefill(executor, blocks.line(tokens.tolist()), NUM_TOKENS)
        errors = (whole - expected).pow(2).mean(1).sqrt() / expected.pow(2).mean(1).sqrt()
        assert errors.median() < tolerance, dtype
        assert torch.equal(prefill(executor, blocks.line(tokens.tolist()), 64), whole)
