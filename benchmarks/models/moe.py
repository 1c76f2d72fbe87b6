"""A mixture of experts beside `transformers`: decoded tokens per second of a static batch.

Both use the same random checkpoint (Mixtral's architecture: 12 layers, hidden 768, 16 experts of
1,024, 2 of which a token uses; 453 M weights of experts), prompts, threads and dtype, greedy, in
one process, alternating. transformers computes experts in three ways, all of which are measured; a
case is compared with the fastest. One that takes twice the time of another in the first round,
which warms up, is not measured again. Only decode steps count, without the prompt: `batched_mm`
copies an expert's weights for each token, so a prompt would not fit the memory.

    python -m benchmarks.models.moe [--threads 2] [--dtype bfloat16] [--rounds 3] [--tokens 17]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.engine_cpu import Case, Hearth, random_prompts
from benchmarks.report import Row, at_least, ratio_columns, write_result
from shared.engine.engine import StepProgress
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
BATCHES = (1, 16, 64)
NUM_PROMPT_TOKENS = 16
WARM_TOKENS = 4
LEAST_RATIO = 1.3  # least ratio to transformers' fastest implementation


class Peer:
    """The peer: decode steps of transformers, without the overhead of `generate`."""

    def __init__(self, model_dir: Path, dtype: str, num_threads: int) -> None:
        self._num_threads = num_threads
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()

    @torch.inference_mode()
    def decode_s(self, case: Case, implementation: str) -> float:
        """Returns the seconds for all tokens but the first of each sequence."""
        torch.set_num_threads(self._num_threads)  # the executor has set another number
        self._model.set_experts_implementation("eager")
        out = self._model(torch.tensor(case.prompts), use_cache=True)
        self._model.set_experts_implementation(implementation)
        started = time.perf_counter()
        for _ in range(case.num_output_tokens[0] - 1):
            ids = out.logits[:, -1:].argmax(-1)
            out = self._model(ids, past_key_values=out.past_key_values, use_cache=True)
        out.logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - started


class TimedHearth(Hearth):
    """Notes when the first step of a case, which computes all of its prompts, has ended."""

    def __init__(self, executor: LocalExecutor) -> None:
        super().__init__(executor)
        self._first_at: float | None = None

    async def decode_s(self, case: Case) -> float:
        self._first_at = None
        await self.run(case)
        assert self._first_at is not None  # every sequence has a first token
        return time.perf_counter() - self._first_at

    def _on_progress(self, progress: list[StepProgress]) -> None:
        if self._first_at is None and any(each.token_ids for each in progress):
            self._first_at = time.perf_counter()
        super()._on_progress(progress)


def make_case(size: int, num_tokens: int, seed: int) -> Case:
    """Returns cases with different prompts for each seed, so that no prefix cache helps."""
    randomness = random.Random(seed)
    prompts = random_prompts(randomness, SHAPE["vocab_size"], size, NUM_PROMPT_TOKENS)
    return Case(f"batch {size}", prompts, [num_tokens] * size)


async def compare(model_dir: Path, options: argparse.Namespace) -> list[Row]:
    """Returns one row per batch size: rates in tokens/s, medians of the rounds."""
    peer = Peer(model_dir, options.dtype, options.threads)
    hearth = TimedHearth(load_executor(model_dir, dtype=options.dtype, num_threads=options.threads))
    hearth.loop.start()
    warm = {
        size: await rates_of(hearth, peer, make_case(size, WARM_TOKENS, size)) for size in BATCHES
    }
    rounds: dict[str, list[dict[str, float]]] = {}
    for round_index in range(1, options.rounds + 1):
        for size in BATCHES:
            case = make_case(size, options.tokens, 100 * round_index + size)
            names = near_fastest(warm[size])
            rounds.setdefault(case.name, []).append(await rates_of(hearth, peer, case, names))
    await hearth.loop.stop()
    slower = {f"batch {size}": rates for size, rates in warm.items()}
    return [row_of(name, rates, slower[name]) for name, rates in rounds.items()]


async def rates_of(
    hearth: TimedHearth, peer: Peer, case: Case, names: Sequence[str] = IMPLEMENTATIONS
) -> dict[str, float]:
    """Returns the decoded tokens/s."""
    found = {"hearth": await hearth.decode_s(case)}
    for name in names:
        found[name] = await asyncio.to_thread(peer.decode_s, case, name)
    num_decoded = len(case.prompts) * (case.num_output_tokens[0] - 1)
    rates = {name: num_decoded / seconds for name, seconds in found.items()}
    print(case.name, {key: round(rate, 1) for key, rate in rates.items()}, file=sys.stderr)
    return rates


def near_fastest(rates: dict[str, float]) -> list[str]:
    """Returns the implementations that take at most twice the time of the fastest."""
    most = max(rates[name] for name in IMPLEMENTATIONS)
    return [name for name in IMPLEMENTATIONS if 2 * rates[name] >= most]


def row_of(name: str, rounds: list[dict[str, float]], warm: dict[str, float]) -> Row:
    """Returns the row of a model. `warm` has the first round's rates of implementations that were
    not measured again.
    """
    medians = {key: statistics.median(rates[key] for rates in rounds) for key in rounds[0]}
    fastest = max((key for key in medians if key != "hearth"), key=lambda key: medians[key])
    return {
        "case": name,
        **{f"{key}_tokens_per_s": round(rate, 1) for key, rate in {**warm, **medians}.items()},
        "fastest": fastest,
        **ratio_columns(rates["hearth"] / rates[fastest] for rates in rounds),
    }


def write_checkpoint(model_dir: Path, dtype: str) -> None:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        MixtralForCausalLM(MixtralConfig(**SHAPE)).save_pretrained(model_dir)
    finally:
        torch.set_default_dtype(default)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=17)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), options.dtype)
        rows = uvloop.run(compare(Path(folder), options))
    bars = [
        at_least(f"{row['case']} / transformers", row["ratio"], LEAST_RATIO, "") for row in rows
    ]
    write_result("moe", rows, bars, ["-m", "benchmarks.models.moe", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
