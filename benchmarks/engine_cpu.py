"""The engine alone, compared with `transformers` with a static batch: output tokens per second.

Both use the same random 125 M checkpoint, prompts, number of threads and number of output tokens,
greedy, in one process, alternating; the figure of a case is the median of its rounds. With mixed
lengths transformers has to run a batch until its longest output ends; only requested tokens count,
for both. Prefill is the time to the first token of one long prompt.

    python -m benchmarks.engine_cpu [--threads 2] [--dtype bfloat16] [--rounds 3]
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
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import msgspec
import torch
import uvloop
from transformers import AutoModelForCausalLM

from benchmarks.checkpoints import LLAMA_125M, write_random_llama
from benchmarks.report import Row, at_least, ratio_columns, write_result
from shared.block_hash import root_hash
from shared.clock import MonotonicClock
from shared.engine.batching.sequence import Sequence
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.loop import EngineLoop
from shared.messages import SamplingParams

NUM_PROMPT_TOKENS = 100
NUM_OUTPUT_TOKENS = 64
MIXED = (8, 128)
NUM_LONG_TOKENS = 4096
CONTEXT = 8192
MAX_BATCH_TOKENS = 2048
# least ratio to transformers, by case
BARS = {"batch 1": 1.0, "batch 16": 1.0, "batch 64": 1.0, "mixed 64": 1.5, "prefill 4096": 1.0}


class Case(msgspec.Struct, frozen=True):
    name: str
    prompts: list[list[int]]
    num_output_tokens: list[int]

    @property
    def num_tokens(self) -> int:
        """The tokens of the case's rate: prompt tokens for a prefill, else output tokens."""
        is_prefill = self.num_output_tokens == [1]
        return len(self.prompts[0]) if is_prefill else sum(self.num_output_tokens)


def make_cases(vocab_size: int, seed: int) -> list[Case]:
    """Returns cases with different prompts for each seed, so that no prefix cache helps."""
    randomness = random.Random(seed)
    prompts = partial(random_prompts, randomness, vocab_size)
    decode = [
        Case(f"batch {size}", prompts(size, NUM_PROMPT_TOKENS), [NUM_OUTPUT_TOKENS] * size)
        for size in (1, 16, 64)
    ]
    mixed = [randomness.randint(*MIXED) for _ in range(64)]
    return [
        *decode,
        Case("mixed 64", prompts(64, NUM_PROMPT_TOKENS), mixed),
        Case(f"prefill {NUM_LONG_TOKENS}", prompts(1, NUM_LONG_TOKENS), [1]),
    ]


def random_prompts(
    randomness: random.Random, vocab_size: int, count: int, length: int
) -> list[list[int]]:
    return [[randomness.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


class Peer:
    """The peer: `generate` of transformers over one static batch."""

    def __init__(self, model_dir: Path, dtype: str, num_threads: int) -> None:
        self._num_threads = num_threads
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()

    @torch.inference_mode()
    def run(self, case: Case) -> None:
        longest = max(case.num_output_tokens)
        torch.set_num_threads(self._num_threads)  # the executor has set another number
        self._model.generate(
            torch.tensor(case.prompts),
            attention_mask=torch.ones(len(case.prompts), len(case.prompts[0]), dtype=torch.long),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )


class Hearth:
    """The engine loop with the model's executor, without bus and services."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.engine = Engine(
            num_blocks=executor.num_blocks,
            block_size=executor.kv_layout.block_size,
            max_context_tokens=CONTEXT,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_sequences=256,
            reaches=executor.kv_layout.reaches,
        )
        self.loop = EngineLoop(self.engine, executor, MonotonicClock())
        self.loop.listen(self._on_progress)
        self._num_left = 0
        self._done = asyncio.Event()

    async def run(self, case: Case) -> None:
        self._num_left = len(case.prompts)
        self._done.clear()
        for sequence in sequences_of(case):
            self.engine.add(sequence)
        self.loop.wake()
        await self._done.wait()

    def _on_progress(self, progress: list[StepProgress]) -> None:
        self._num_left -= sum(each.finish_reason is not None for each in progress)
        if self._num_left == 0:
            self._done.set()


def sequences_of(case: Case) -> list[Sequence]:
    return [
        Sequence(
            sequence_id=index.to_bytes(16, "big"),
            tenant_id="benchmark",
            cache_root=root_hash("benchmark", "weights"),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(seed=0, max_tokens=num_tokens, temperature=0.0),
        )
        for index, (prompt, num_tokens) in enumerate(
            zip(case.prompts, case.num_output_tokens, strict=True)
        )
    ]


async def compare(model_dir: Path, options: argparse.Namespace) -> list[Row]:
    """Returns one row per case: both rates (tokens/s), and the median of the rounds' ratios."""
    peer = Peer(model_dir, options.dtype, options.threads)
    executor = load_executor(
        model_dir, dtype=options.dtype, num_threads=options.threads, has_row_kernels=True
    )
    hearth = Hearth(executor)
    hearth.loop.start()
    rates: dict[str, list[tuple[float, float]]] = {}
    for round_index in range(options.rounds + 1):  # the first warms up
        for case in make_cases(executor.vocab_size, round_index):
            ours_s = await seconds(hearth.run(case))
            theirs_s = await seconds(asyncio.to_thread(peer.run, case))
            if round_index:
                rate = (case.num_tokens / ours_s, case.num_tokens / theirs_s)
                rates.setdefault(case.name, []).append(rate)
                print(f"{case.name:14} {rate[0]:8.1f} {rate[1]:8.1f}", file=sys.stderr)
    await hearth.loop.stop()
    return [row_of(name, pairs) for name, pairs in rates.items()]


async def seconds(work: Awaitable[None]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def row_of(name: str, pairs: list[tuple[float, float]]) -> Row:
    return {
        "case": name,
        "hearth_tokens_per_s": round(statistics.median(ours for ours, _ in pairs), 1),
        "transformers_tokens_per_s": round(statistics.median(theirs for _, theirs in pairs), 1),
        **ratio_columns(ours / theirs for ours, theirs in pairs),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        write_random_llama(Path(folder), LLAMA_125M, dtype=options.dtype)
        rows = uvloop.run(compare(Path(folder), options))
    bars = [
        at_least(f"{row['case']} / transformers", row["ratio"], BARS[row["case"]], "")
        for row in rows
    ]
    write_result("engine_cpu", rows, bars, ["-m", "benchmarks.engine_cpu", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
