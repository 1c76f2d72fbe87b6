"""The seam between the engine's loop and whatever computes its steps: one device, or several ranks.

The loop submits steps in order, at most `depth` before the oldest one is answered.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.engine.batching.batcher import ScheduledSequence
from shared.engine.planning.step_work import ModelWorkload
from shared.engine.step import StepOutput
from shared.kv_layout import KvLayout
from shared.messages import DevicePeaks
from shared.numerics import Numerics

PROFILE_S = 30.0  # more time for steps while they are recorded
StepLaunch = Literal["", "graphs", "plain", "graphs, cudnn", "plain, cudnn"]


class RecordedSteps(NamedTuple):
    """`trace` is JSON of Chrome's trace format, compressed by gzip."""

    num_steps: int
    trace: bytes


class Executor(Protocol):
    depth: int  # steps in flight
    # Stages of a pipeline; with one, sampled tokens are where the next step needs them
    num_stages: int

    kv_layout: KvLayout  # layout of the whole model
    numerics: Numerics
    num_blocks: int  # blocks of its KV cache at the start, if it does not start parked
    max_blocks: int  # the largest size of that cache
    is_elastic: bool  # whether that size may change while it holds KV

    max_context_tokens: int  # the model's limit
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_head: bool  # False: the model gives embeddings only
    revision: str
    gpu_uuid: str  # of its GPU, as NVML names it; empty: it is not on one GPU
    work: ModelWorkload  # what determines the work of its steps, of all ranks
    peaks: DevicePeaks | None  # None: not known for its devices

    @property
    def step_launch(self) -> StepLaunch:
        """How decode steps are launched: by CUDA graphs, or plain; and cudnn if the attention of
        prompts is its. Empty: not on CUDA.
        """
        ...

    @property
    def num_out_of_memory(self) -> int:
        """Operations beside steps that ran out of the device's memory and were done otherwise."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it computes nothing more, as seen between steps: a rank has ended."""
        ...

    @property
    def step_budget_s(self) -> float:
        """Upper bound in seconds of the step being computed: above it the worker is suspect."""
        ...

    @property
    def step_extension_s(self) -> float:
        """The time added to that budget since, because the step compiles a kernel."""
        ...

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of weights that a parked executor has in memory of the host."""
        ...

    def submit(self, rows: list[ScheduledSequence]) -> int:
        """Queues a step without blocking, and returns its number.

        It takes all that the step needs to know of the sequences. If it raises, the step has failed
        and has no result.
        """
        ...

    async def result(self, step: int) -> StepOutput:
        """Returns the output of a submitted step, in order of submission. Raises if the
        step failed, OutOfMemory if only its size was to blame; later steps in flight are computed
        nevertheless, or fail if they follow from its plan.
        """
        ...

    async def forget_ended(self) -> None:
        """Forgets sequences that have ended, when no step is in flight: else the next one does.
        Raises DeviceFailed if the device is lost.
        """
        ...

    async def check(self) -> None:
        """Computes a step without side effects, when none is in flight. Raises if the device
        fails.
        """
        ...

    async def zero_blocks(self, block_ids: list[int]) -> None:
        """Zeroes the KV of full blocks, between two steps. No step in flight and no copy may use
        them.
        """
        ...

    async def give_back(self, block_ids: list[int]) -> None:
        """Returns the memory of full blocks that nothing uses to the system, where that is
        possible. They hold zeros, or what they held, when they are used again.
        """
        ...

    async def resize_kv(self, num_blocks: int) -> None:
        """Prepares for a KV cache of another size; what its blocks hold stays if it is elastic. 0
        also returns the memory that steps have left. Raises NoCapacity without enough memory.
        """
        ...

    async def expert_counts(self) -> NDArray[np.int64] | None:
        """Returns each expert's tokens since the start, [layers, experts], between two steps, or
        None without experts.
        """
        ...

    async def profile(self, num_steps: int, timeout_s: float) -> RecordedSteps:
        """Records the next steps, fewer if they do not come in time; of several ranks, those of the
        rank that samples. One call at a time. Raises InvalidRequest if nothing computes steps.
        """
        ...

    async def close(self) -> None:
        """Waits for steps in flight."""
        ...
