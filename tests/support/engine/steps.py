"""Hand-built steps for an executor: sequences with scattered block tables, no engine core."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.step import SamplingInputs, StepInputs, sampling_rows


@dataclass
class Line:
    """A sequence: its tokens, its blocks, and the number of tokens whose KV is computed."""

    token_ids: list[int]
    block_table: list[int]  # the table of the first group of layers
    num_computed: int = 0
    blocks: Blocks | None = None
    others: dict[int, list[int]] = field(default_factory=dict)  # tables of other groups

    def table(self, group: int) -> list[int]:
        if group == 0:
            return self.block_table
        if group not in self.others:
            assert self.blocks is not None, "it has no blocks for other groups"
            self.others[group] = self.blocks.take(len(self.block_table))
        return self.others[group]


@dataclass
class Blocks:
    """Allocates block ids in random order."""

    num_blocks: int
    seed: int = 0
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self._free)

    def line(self, token_ids: Sequence[int], *, room: int = 0, block_size: int = 16) -> Line:
        num_blocks = -(-(len(token_ids) + room) // block_size)
        return Line(list(token_ids), self.take(num_blocks), blocks=self)

    def take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]


def greedy(logits_indices: Sequence[int]) -> SamplingInputs:
    return SamplingInputs(
        np.array(logits_indices, dtype=np.int64), sampling_rows(len(logits_indices))
    )


def step_of(
    work: Sequence[tuple[Line, int]], block_size: int = 16, num_groups: int = 1
) -> StepInputs:
    """Returns one step over (line, number of new tokens). Every new token has a row of logits."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    width = max(len(line.block_table) for line, _ in work)
    tables = np.zeros((num_groups, len(work), width), dtype=np.int64)
    for index, (line, num_new) in enumerate(work):
        start, end = line.num_computed, line.num_computed + num_new
        input_ids += line.token_ids[start:end]
        positions += range(start, end)
        for group in range(num_groups):
            table = line.table(group)
            tables[group, index, : len(table)] = table
            slots[group] += [
                table[p // block_size] * block_size + p % block_size for p in range(start, end)
            ]
    query_lens = np.array([num_new for _, num_new in work], dtype=np.int64)
    return StepInputs(
        input_ids=np.array(input_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_lens=query_lens,
        context_lens=query_lens + np.array([line.num_computed for line, _ in work]),
        block_tables=tables,
        sampling=greedy(range(len(input_ids))),
    )


def advance(executor: LocalExecutor, work: Sequence[tuple[Line, int]]) -> torch.Tensor:
    """Computes one step. Returns the logits of all of its tokens, [T, vocab_size]."""
    logits = executor.step_logits(
        step_of(work, executor.kv_layout.block_size, len(executor.kv_layout.groups))
    )
    for line, num_new in work:
        line.num_computed += num_new
    return logits


def prefill(executor: LocalExecutor, line: Line, chunk: int) -> torch.Tensor:
    """Computes the line's tokens in chunks. Returns the logits of all of them."""
    parts = []
    while line.num_computed < len(line.token_ids):
        parts.append(
            advance(executor, [(line, min(chunk, len(line.token_ids) - line.num_computed))])
        )
    return torch.cat(parts)


def generate(executor: LocalExecutor, line: Line, num_tokens: int) -> list[int]:
    """Returns the greedy continuation of `num_tokens`. The line must have blocks for it."""
    start = len(line.token_ids)
    logits = prefill(executor, line, 512)
    while len(line.token_ids) < start + num_tokens:
        line.token_ids.append(int(logits[-1].argmax()))
        logits = advance(executor, [(line, 1)])
    return line.token_ids[start:]
