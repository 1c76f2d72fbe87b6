"""The engine on a CPU with compressed weights, compared with the same engine with dense ones.

Both use the same checkpoint (given, or a random one of 125 M parameters: normal weights), prompts
and number of threads, greedy, in one process, alternating: output tokens per second of a batch, and
prompt tokens per second of one long prompt. A ratio above 1: compressed is faster. In addition to
wall time there is the ratio of CPU time, which is meaningful on a busy machine, too, and counts
cores that wait for memory. `resident` is the size of the mapped weights in bytes.

    python -m benchmarks.compression.engine [--model DIR] [--threads 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.checkpoints import LLAMA_125M, write_random_llama
from benchmarks.engine_cpu import Case, Hearth, random_prompts
from benchmarks.report import Bar, Row, at_least, at_most, write_result
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor

FORMS = ("dense", "compressed")
BATCHES = (1, 16, 64)
NUM_PROMPT_TOKENS = 16
NUM_LONG_TOKENS = 1024
BITS_A_WEIGHT = 12.15
LEAST_RATIO = 0.95


def make_cases(vocab_size: int, seed: int, num_output_tokens: int) -> list[Case]:
    """Returns cases with different prompts for each seed, so that no prefix cache helps."""
    prompts = partial(random_prompts, random.Random(seed), vocab_size)
    decode = [
        Case(f"batch {size}", prompts(size, NUM_PROMPT_TOKENS), [num_output_tokens] * size)
        for size in BATCHES
    ]
    return [*decode, Case(f"prefill {NUM_LONG_TOKENS}", prompts(1, NUM_LONG_TOKENS), [1])]


async def compare(model_dir: Path, options: argparse.Namespace) -> tuple[list[Row], list[Bar]]:
    engines, sizes = {}, {}
    for form in FORMS:
        executor = load_executor(
            model_dir,
            dtype="bfloat16",
            num_threads=options.threads,
            weights=form,
            has_row_kernels=True,
        )
        engines[form] = (Hearth(executor), executor)
        engines[form][0].loop.start()
        sizes[form] = mapped_bytes() - sum(sizes.values())
    samples: dict[str, list[dict[str, float]]] = {}
    for round_index in range(options.rounds + 1):  # the first warms up
        for case in make_cases(executor.vocab_size, round_index, options.output_tokens):
            sample = {}
            for form in FORMS:
                sample[form], sample[f"{form} CPU"] = await seconds_of(engines[form][0], case)
            if round_index:
                sample["tokens"] = case.num_tokens
                samples.setdefault(case.name, []).append(sample)
                print(f"{case.name:14} {sample}", file=sys.stderr)
    for hearth, _ in engines.values():
        await hearth.loop.stop()
    rows = [row_of(name, found) for name, found in samples.items()]
    return [*rows, memory_row(executor, sizes)], bars_of(rows, executor, sizes)


async def seconds_of(hearth: Hearth, case: Case) -> tuple[float, float]:
    """Returns wall time and CPU time."""
    started, cpu_started = time.perf_counter(), time.process_time()
    await hearth.run(case)
    return time.perf_counter() - started, time.process_time() - cpu_started


def mapped_bytes() -> int:
    """Returns the resident bytes of mapped packed weights in this process."""
    blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    resident = (
        re.search(r"^Rss: +(\d+) kB", each, re.MULTILINE) for each in blocks if ".packed\n" in each
    )
    return sum(int(each[1]) * 1024 for each in resident if each)


def row_of(name: str, samples: list[dict[str, float]]) -> Row:
    def median(values: Any) -> float:
        return round(statistics.median(values), 3)

    return {
        "case": name,
        "dense_tokens_per_s": median(each["tokens"] / each["dense"] for each in samples),
        "compressed_tokens_per_s": median(each["tokens"] / each["compressed"] for each in samples),
        "ratio": median(each["dense"] / each["compressed"] for each in samples),
        "cpu_time_ratio": median(each["dense CPU"] / each["compressed CPU"] for each in samples),
    }


def memory_row(executor: LocalExecutor, sizes: dict[str, int]) -> Row:
    report = executor.weights
    return {
        "case": "memory",
        "dense_resident_mb": round(sizes["dense"] / 1e6, 1),
        "compressed_resident_mb": round(sizes["compressed"] / 1e6, 1),
        "bits_per_weight": report.bits_per_weight,
        "verbatim_share": report.verbatim_share,
    }


def bars_of(rows: list[Row], executor: LocalExecutor, sizes: dict[str, int]) -> list[Bar]:
    report = executor.weights
    expected = report.num_compressed_bytes + report.num_plain_bytes
    return [
        at_most("bits of a compressed weight", report.bits_per_weight, BITS_A_WEIGHT, "bits"),
        at_most("resident / compressed size", sizes["compressed"] / expected, 1.01, ""),
        *(at_least(f"{row['case']} / dense", row["ratio"], LEAST_RATIO, "") for row in rows),
    ]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint in BF16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HEARTH_CACHE_DIR"] = folder  # only for weights: kernels have set theirs
        model_dir = options.model
        if model_dir is None:
            model_dir = Path(folder, "model")
            write_random_llama(model_dir, LLAMA_125M, dtype="bfloat16")
        rows, bars = uvloop.run(compare(model_dir, options))
    write_result("compression_engine", rows, bars, ["-m", "benchmarks.compression.engine", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
