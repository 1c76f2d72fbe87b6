"""Decode of multi-head latent attention, compared with `transformers`: output tokens per second.

A random checkpoint of DeepSeek V3's architecture with the dims of Kimi K2 (latents of 512 + 64,
heads of 128 + 64 and values of 128, query rank 1536), but 16 heads, 4 dense layers and narrow MLPs,
so that attention dominates. Both decode the same batch after the same random context, which is
written into their caches: both cache latents, transformers expands them to keys and values in every
step. Steps alternate in one process with the same threads; a figure is the median of the rounds,
and the first logits are compared.

    python -m benchmarks.models.latents [--threads 2] [--context 4096] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from benchmarks.report import Row, at_least, at_most, ratio_columns, write_result
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.step import StepInputs

BATCH = 8
STEPS = 5  # our steps in a round
BAR = 2.0
LARGEST_ERROR = 6e-2  # RMS of the logits' differences over that of the logits, both in BF16
LATENT, ROPE = 512, 64
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 128,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    "num_mtp_layers": 0,
}
DTYPE = torch.bfloat16


class Context:
    """Random latents of `num_tokens` for each sequence. Both caches hold rotated keys as halves."""

    def __init__(self, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.num_tokens = num_tokens
        shape = SHAPE["num_hidden_layers"], BATCH, num_tokens, LATENT + ROPE
        self.rows = torch.randn(shape, generator=generator).to(DTYPE)
        self.token_ids = torch.randint(3, 1024, (BATCH,), generator=generator)


class Peer:
    """One step of `transformers` over its own cache of latents, which is cut back afterwards."""

    def __init__(self, model_dir: Path, context: Context, num_threads: int) -> None:
        self._num_threads = num_threads
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPE).eval()
        self._context = context
        self._cache = DynamicCache()
        for layer, rows in enumerate(context.rows):
            latent, key = (each.unsqueeze(1) for each in rows.split((LATENT, ROPE), dim=2))
            self._cache.update(latent.contiguous(), key.contiguous(), layer)

    @torch.inference_mode()
    def step(self) -> Tensor:
        torch.set_num_threads(self._num_threads)  # the executor has set another number
        position = torch.full((BATCH, 1), self._context.num_tokens)
        logits: Tensor = self._model(
            self._context.token_ids.unsqueeze(1),
            position_ids=position,
            past_key_values=self._cache,
        ).logits[:, -1]
        self._cache.crop(-1)
        return logits.float()


class Hearth:
    """One step of the model's executor over blocks that no two sequences share."""

    def __init__(self, executor: LocalExecutor, context: Context) -> None:
        self._executor = executor
        size = executor.kv_layout.block_size
        num_blocks = -(-(context.num_tokens + 1) // size)
        tables = torch.randperm(BATCH * num_blocks).view(BATCH, num_blocks)
        cache = executor.computer.kv_cache  # [layers, 1, num_blocks, 1, block_size, row]
        padded = torch.nn.functional.pad(
            context.rows, (0, 0, 0, num_blocks * size - context.num_tokens)
        )
        cache[:, 0, tables.flatten(), 0] = padded.view(len(cache), -1, size, LATENT + ROPE)
        self._inputs = _step(size, context, tables)

    def step(self) -> Tensor:
        return self._executor.step_logits(self._inputs)


def _step(block_size: int, context: Context, tables: Tensor) -> StepInputs:
    idle = idle_step(block_size, [1] * BATCH)
    position = context.num_tokens
    slots = tables[:, position // block_size] * block_size + position % block_size
    return msgspec.structs.replace(
        idle,
        input_ids=context.token_ids.numpy(),
        positions=np.full(BATCH, position, dtype=np.int64),
        slot_mapping=slots.unsqueeze(0).numpy(),
        context_lens=np.full(BATCH, position + 1, dtype=np.int64),
        block_tables=tables.unsqueeze(0).numpy(),
    )


def compare(model_dir: Path, options: argparse.Namespace) -> Row:
    context = Context(options.context)
    peer = Peer(model_dir, context, options.threads)
    num_bytes = 2 * BATCH * (options.context + 64) * len(context.rows) * (LATENT + ROPE) * 2
    executor = load_executor(
        model_dir, dtype="bfloat16", num_threads=options.threads, kv_cache_bytes=num_bytes
    )
    hearth = Hearth(executor, context)
    found, expected = hearth.step(), peer.step()
    error = float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    pairs = []
    for _ in range(options.rounds):
        rates = BATCH / _seconds(hearth.step, STEPS), BATCH / _seconds(peer.step, 1)
        pairs.append(rates)
        print(f"{rates[0]:8.1f} {rates[1]:8.2f}", file=sys.stderr)
    return {
        "case": f"batch {BATCH}, context {options.context}",
        "hearth_tokens_per_s": round(statistics.median(ours for ours, _ in pairs), 1),
        "transformers_tokens_per_s": round(statistics.median(theirs for _, theirs in pairs), 2),
        **ratio_columns((ours / theirs for ours, theirs in pairs), digits=2),
        "logits_error": round(error, 4),
    }


def _seconds(step: Callable[[], Tensor], times: int) -> float:
    """Returns the median of the seconds of one step."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        step()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE)).to(DTYPE).save_pretrained(folder)
        row = compare(Path(folder), options)
    bars = [
        at_least(f"{row['case']} / transformers", row["ratio"], BAR, ""),
        at_most("error of the logits", row["logits_error"], LARGEST_ERROR, ""),
    ]
    write_result("latents", [row], bars, ["-m", "benchmarks.models.latents", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
