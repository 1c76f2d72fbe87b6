"""Workers of several ranks beside one process: tokens/s, memory, and the time of a start.

    python -m benchmarks.parallel.ranks [--rounds 3]

A random Llama (8 layers, hidden 2048) in BF16, an engine in this process, ranks of one thread each.
Every configuration runs in a process of its own, by turns. `decode`: 16 rows; `prefill`: one prompt
in chunks of 256. A pipeline also runs with one step in flight: with the same rows in each step
(`1 in flight`), and with all rows in one (`whole batch`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_random_llama
from benchmarks.report import Row, at_least, at_most, write_result
from shared.block_hash import root_hash
from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence
from shared.engine.engine import Engine
from shared.engine.executors.executor import Executor
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.step import StepOutput
from shared.messages import SamplingParams

LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
BATCH, NUM_STEPS, PROMPT_TOKENS = 16, 48, 2048
CHUNK = 256


@dataclass(frozen=True)
class Case:
    name: str
    tp: int
    pp: int
    num_threads: int
    is_overlapped: bool = True  # False: a step waits for the result of the one before
    is_whole: bool = False  # all rows in one step


CASES = (
    Case("1 rank, 2 threads", 1, 1, 2),
    Case("TP 2", 2, 1, 2),
    Case("PP 2", 1, 2, 2),
    Case("PP 2, 1 in flight", 1, 2, 2, is_overlapped=False),
    Case("PP 2, whole batch", 1, 2, 2, is_overlapped=False, is_whole=True),
    Case("TP 4", 4, 1, 4),
)


class Drive:
    """An engine over an executor, step by step."""

    def __init__(self, executor: Executor, num_blocks: int, case: Case) -> None:
        self.executor = executor
        self.case = case
        self.num_stages = 1 if case.is_whole else executor.num_stages
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=16,
            max_context_tokens=4096,
            max_batch_tokens=CHUNK,
            max_sequences=BATCH,
        )
        self._in_flight: deque[tuple[list[ScheduledSequence], asyncio.Task[StepOutput]]] = deque()

    async def advance(self) -> int:
        """Submits or applies a step. Returns the number of tokens that were drawn."""
        rows, _ = self.engine.schedule(num_stages=self.num_stages)
        if rows:
            result = asyncio.ensure_future(self.executor.result(self.executor.submit(rows)))
            self._in_flight.append((rows, result))
            if not self.case.is_overlapped:
                await asyncio.wait((result,))
        if rows and len(self._in_flight) < self.executor.depth:
            return 0
        rows, result = self._in_flight.popleft()
        return sum(len(each.token_ids) for each in self.engine.apply(rows, await result))

    def add(self, number: int, num_tokens: int, max_tokens: int) -> Sequence:
        prompt = [(number * 31 + n * 7) % 8000 for n in range(num_tokens)]
        sequence = Sequence(
            sequence_id=number.to_bytes(24, "big"),
            tenant_id="tenant",
            cache_root=root_hash("tenant", "weights"),
            token_ids=prompt,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(seed=number, max_tokens=max_tokens, temperature=0.0),
        )
        self.engine.add(sequence)
        return sequence


async def decode_rate(drive: Drive) -> tuple[float, list[list[int]]]:
    """Returns the sampled tokens/s of a full batch, and the tokens of each row."""
    rows = [drive.add(n, 32, 8 + NUM_STEPS) for n in range(BATCH)]
    while min(each.num_output_tokens for each in rows) < 4:
        await drive.advance()
    began_at, num_tokens = time.perf_counter(), 0
    while max(each.num_output_tokens for each in rows) < 4 + NUM_STEPS:
        num_tokens += await drive.advance()
    rate = num_tokens / (time.perf_counter() - began_at)
    while not drive.engine.is_idle:
        await drive.advance()
    return rate, [each.token_ids for each in rows]


async def prefill_rate(drive: Drive) -> float:
    """Returns the prompt tokens/s of one prompt."""
    drive.add(BATCH, PROMPT_TOKENS, 1)
    began_at = time.perf_counter()
    while not drive.engine.is_idle:
        await drive.advance()
    return PROMPT_TOKENS / (time.perf_counter() - began_at)


async def measure(case: Case, model_dir: str) -> dict[str, Any]:
    from shared.engine.executors.group.load_group import load_group
    from shared.engine.executors.load import load_executor

    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_bytes": 256 << 20,
        "num_threads": case.num_threads,
    }
    shape, began_at = MeshShape(case.tp, case.pp), time.perf_counter()
    if shape.num_ranks == 1:
        executor = load_executor(model_dir, "cpu", **options)
        executor: Executor = executor
        num_blocks, pids = executor.num_blocks, ["self"]
    else:
        group = load_group(model_dir, "cpu", shape, **options)
        executor, num_blocks, pids = group, group.num_blocks, [str(pid) for pid in group.pids]
    start_s = time.perf_counter() - began_at
    peak_bytes = max(peak_resident_bytes(pid) for pid in pids)
    drive = Drive(executor, num_blocks, case)
    rate, tokens = await decode_rate(drive)
    prefill = await prefill_rate(drive)
    await executor.close()
    return {
        "decode": rate,
        "prefill": prefill,
        "start_s": start_s,
        "peak_bytes": peak_bytes,
        "tokens": tokens,
    }


def peak_resident_bytes(pid: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise LookupError(f"process {pid} has no VmHWM")


def in_child(case: Case, model_dir: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.parallel.ranks", "--model-dir", model_dir]
    done = subprocess.run(
        [*command, "--case", json.dumps(asdict(case))], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds(model_dir: str, num_rounds: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    for case in CASES:  # compiles, and fills the page cache
        in_child(case, model_dir)
    for number in range(num_rounds):
        for case in CASES:
            print(f"round {number + 1}: {case.name}", file=sys.stderr)
            yield case, in_child(case, model_dir)


def report(found: dict[Case, list[dict[str, Any]]], file_bytes: int, argv: list[str]) -> None:
    def median(case: Case, name: str) -> float:
        return statistics.median(each[name] for each in found[case])

    rows: list[Row] = [
        {
            "case": case.name,
            "decode tokens/s": round(median(case, "decode"), 1),
            "prefill tokens/s": round(median(case, "prefill"), 1),
            "start s": round(median(case, "start_s"), 2),
            "peak MB of a rank": round(median(case, "peak_bytes") / 1e6),
        }
        for case in CASES
    ]
    one, tp, pp, single, whole, tp4 = CASES
    tokens = {json.dumps(run["tokens"]) for each in found.values() for run in each}
    allowed = 1.15 * file_bytes / 4 + 200e6
    bars = [
        at_most("different tokens between all cases", len(tokens) - 1, 0, ""),
        at_least("TP 2 x 1 thread / 1 x 2, decode", _ratio(median, tp, one, "decode"), 0.8, "x"),
        at_least("PP 2 / 1 in flight, decode", _ratio(median, pp, single, "decode"), 1.6, "x"),
        at_least("PP 2 / 1 in flight, prefill", _ratio(median, pp, single, "prefill"), 1.6, "x"),
        at_least("PP 2 / whole batch, decode", _ratio(median, pp, whole, "decode"), 1.0, "x"),
        at_most(
            "peak of a rank of 4 / (1.15 share + 200 MB)",
            median(tp4, "peak_bytes") / allowed,
            1,
            "x",
        ),
        at_most("start of TP 4 / 1 rank", _ratio(median, tp4, one, "start_s"), 1.3, "x"),
    ]
    write_result("ranks", rows, bars, argv)


def _ratio(median: Any, first: Case, second: Case, name: str) -> float:
    return float(median(first, name) / median(second, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model-dir")
    parser.add_argument("--case", help="runs one configuration; for the benchmark itself")
    options = parser.parse_args()
    if options.case:
        case = Case(**json.loads(options.case))
        print(json.dumps(asyncio.run(measure(case, options.model_dir))))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_random_llama(Path(folder), LLAMA, dtype="bfloat16")
        file_bytes = sum(each.stat().st_size for each in Path(folder).glob("*.safetensors"))
        found: dict[Case, list[dict[str, Any]]] = {case: [] for case in CASES}
        for case, run in rounds(folder, options.rounds):
            found[case].append(run)
    report(found, file_bytes, ["-m", "benchmarks.parallel.ranks", *sys.argv[1:]])


if __name__ == "__main__":
    main()
