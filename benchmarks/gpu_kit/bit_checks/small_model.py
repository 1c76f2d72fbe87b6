"""A model of two layers with the widths of Llama-3.1-8B, end to end: the logits of a prompt in
chunks, and those of sequences' next tokens in batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_kit.bit_checks.verdict import Verdict
from benchmarks.gpu_kit.models.dummy_model import make_executor
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shared.engine.executors.step_computer import StepComputer
    from shared.engine.step import StepInputs

NUM_LAYERS = 2
NUM_BLOCKS = 2  # blocks of the shared prompt; each sequence has one of its own after it
CHUNKS = (1, 7, 64)
BATCHES = (1, 7, 32)
MOST_ID = 100  # largest id of a token
KERNELS = (
    *("linear", "lane_linear", "decode_attention", "prefill_attention"),
    *("rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_store"),
)


def compare(verdict: Verdict) -> None:
    session = verdict.session
    executor, steps = executor_of(session), Steps(session.shapes.block_size)
    together = steps.prompt_logits(executor, steps.prompt)
    _digest(session, "logits of a prompt", together)
    for chunk in CHUNKS:
        found = steps.prompt_logits(executor, chunk)
        verdict.compare(f"logits, chunks of {chunk}", found, together, KERNELS)
    most = executor.step_logits(steps.decode(max(BATCHES)))
    _digest(session, "logits of a batch", most)
    for batch in BATCHES:
        found = executor.step_logits(steps.decode(batch))
        verdict.compare(f"logits, {batch} sequences", found, most[:batch], KERNELS)


def executor_of(session: Session) -> StepComputer:
    num_blocks = NUM_BLOCKS + max(BATCHES)
    return make_executor(
        session,
        session.shapes.config | {"num_hidden_layers": NUM_LAYERS},
        "exact",
        num_blocks=num_blocks,
        num_positions=num_blocks * session.shapes.block_size,
    )


class Steps:
    """The steps of a prompt in blocks 0 to NUM_BLOCKS - 1, and of sequences that continue it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.prompt = NUM_BLOCKS * block_size  # tokens

    def prompt_logits(self, executor: StepComputer, chunk: int) -> Tensor:
        """Returns the logits of every token of the prompt: [prompt, vocab]."""
        firsts = range(0, self.prompt, chunk)
        return torch.cat([executor.step_logits(self.prefill(each, chunk)) for each in firsts])

    def prefill(self, first: int, chunk: int) -> StepInputs:
        """Returns the prompt's next tokens, at most `chunk`."""
        end = min(first + chunk, self.prompt)
        positions = np.arange(first, end)
        tables = np.arange(NUM_BLOCKS)[None]
        return self._step(
            [end - first], end, positions * 13 % MOST_ID, positions, positions, tables
        )

    def decode(self, batch: int) -> StepInputs:
        own = NUM_BLOCKS + np.arange(batch)
        tables = np.concatenate([np.tile(np.arange(NUM_BLOCKS), (batch, 1)), own[:, None]], axis=1)
        positions, slots = np.full(batch, self.prompt), own * self.block_size
        ids = np.arange(batch)
        return self._step([1] * batch, self.prompt + 1, ids, positions, slots, tables)

    def _step(
        self,
        query_lens: list[int],
        context: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        tables: NDArray[np.int64],
    ) -> StepInputs:
        """Returns a step in which every token has logits."""
        import msgspec

        from shared.engine.executors.loading.warm_up import idle_step

        step = idle_step(self.block_size, query_lens, context_tokens=context)
        rows = np.arange(len(ids))
        return msgspec.structs.replace(
            step,
            input_ids=ids,
            positions=positions,
            slot_mapping=slots[None],
            block_tables=tables[None],
            sampling=msgspec.structs.replace(step.sampling, logits_indices=rows),
        )


def _digest(session: Session, case: str, logits: Tensor) -> None:
    if not session.is_dry:
        session.digest(case, logits, kernels=KERNELS)
