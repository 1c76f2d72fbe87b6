"""An engine with a model executor, stepped without an engine loop."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.batching.sequence import Sequence
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.model_loading import kv_layout_of
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.models.checkpoint_config import read_config
from shared.engine.step import KvRun
from shared.kv_layout import FP8, first_sent
from shared.messages import TokenLogprobs


def executor_with(
    model_dir: Path, dtype: str, num_blocks: int, *, has_fp8_kv: bool = False
) -> LocalExecutor:
    """Loads the model with `num_blocks` blocks for each group of layers; any group may use them
    all.
    """
    layout = kv_layout_of(read_config(model_dir), FP8 if has_fp8_kv else dtype, 16)
    num_blocks *= len(layout.groups)
    block_bytes = layout.block_bytes
    executor = load_executor(
        model_dir,
        dtype=dtype,
        kv_dtype="fp8" if has_fp8_kv else "auto",
        kv_cache_bytes=num_blocks * block_bytes,
        num_threads=1,
    )
    assert executor.num_blocks == num_blocks
    return executor


class Worker:
    def __init__(
        self,
        model_dir: Path,
        dtype: str,
        *,
        num_blocks: int = 64,
        budget: int = 64,
        executor: LocalExecutor | None = None,
        most_blocks: int | None = None,
    ):
        """If given, `executor` has this model, dtype and `num_blocks`, and no other user; of its
        blocks `most_blocks` are used.
        """
        self.executor = executor or executor_with(model_dir, dtype, num_blocks)
        self.engine = Engine(
            num_blocks=self.executor.num_blocks if most_blocks is None else most_blocks,
            block_size=self.executor.kv_layout.block_size,
            max_context_tokens=self.executor.max_context_tokens,
            max_batch_tokens=budget,
            max_sequences=16,
            reaches=self.executor.kv_layout.reaches,
        )
        self.tokens: dict[bytes, list[int]] = defaultdict(list)
        self.logprobs: dict[bytes, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[bytes, tuple[TokenLogprobs, ...]] = {}
        self.endings: dict[bytes, StepProgress] = {}
        self.num_computed_tokens = 0
        self.in_flight: deque[tuple[list[ScheduledSequence], int]] = deque()

    async def run(self, *sequences: Sequence) -> list[int]:
        """Runs all sequences to completion. Returns the new tokens of the first."""
        for sequence in sequences:
            self.engine.add(sequence)
        await self.run_on()
        return self.tokens[sequences[0].sequence_id]

    async def run_on(self) -> None:
        while await self.turn():
            pass

    async def turn(self) -> bool:
        """Submits a step, and applies the oldest if no more may be in flight. Returns False if all
        work is done.
        """
        rows, found = self.engine.schedule(samples_ahead=self.executor.depth > 1)
        for each in found:
            self._record(each)
        if rows:
            self.in_flight.append((rows, self.executor.submit(rows)))
        if self.in_flight and (not rows or len(self.in_flight) == self.executor.depth):
            await self._apply(*self.in_flight.popleft())
        return bool(self.in_flight or self.engine.batcher.waiting or self.engine.batcher.running)

    async def _apply(self, rows: list[ScheduledSequence], step: int) -> None:
        sampled = await self.executor.result(step)
        self.num_computed_tokens += sum(row.num_scheduled_tokens for row in rows)
        for each in self.engine.apply(rows, sampled):
            self._record(each)
        self.engine.pool.check()

    def _record(self, progress: StepProgress) -> None:
        sequence_id = progress.sequence.sequence_id
        self.tokens[sequence_id] += progress.token_ids
        self.logprobs[sequence_id] += progress.logprobs
        if progress.prompt_logprobs:
            assert sequence_id not in self.prompt_logprobs, "received twice"
            self.prompt_logprobs[sequence_id] = progress.prompt_logprobs
        if progress.finish_reason is not None:
            self.endings[sequence_id] = progress


async def push_kv(source: Worker, pushed: Sequence, target: Worker, reserved: Sequence) -> None:
    """Copies the KV of a HELD prefill into a reserved sequence: of each group what it sends."""
    num_tokens = pushed.num_tokens
    layout = source.executor.kv_layout
    for group, reach in enumerate(layout.reaches):
        first = first_sent(reach, num_tokens, layout.hash_tokens)
        count = num_tokens - first
        payload = memoryview(bytearray(count * layout.group_bytes_per_token(group)))
        tables = pushed.block_tables[group], reserved.block_tables[group]
        await source.executor.read_kv(KvRun(tables[0], first, count, group), payload)
        await target.executor.write_kv(KvRun(tables[1], first, count, group), payload)
