"""A `Runner` whose model is computed by a group of rank processes; the leader holds no weights.

One worker of the fleet is one group: the leader has the bus, the batcher and the block pool, the
ranks have weights and KV. All ranks get the same steps, and the last stage's first rank samples.
A rank that dies, freezes or fails ends the group: `check` raises, and the worker leaves the fleet.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from shared.clock import Clock
from shared.engine.parallel.processes.group import RankGroup
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.engine.ranks.channel import Channel, ChannelClosed
from shared.engine.ranks.kv.rank_links import RankLinks
from shared.engine.ranks.messages import (
    CheckDevice,
    Command,
    Masks,
    MasksWanted,
    RunStep,
    ZeroBlocks,
)
from shared.engine.ranks.step_codec import decode_output, encode_step, mask_words
from shared.engine.runner import StepInputs, StepOutput, TokenMasks
from shared.engine.runners.step_deadline import StepBudget
from shared.errors import DeviceFailed
from shared.kv_layout import KvLayout
from shared.numerics import Numerics

T = TypeVar("T")
COMMAND_TIMEOUT_S = 30.0  # of a check, or zeroing


class GroupRunner:
    """`kv_links`: to the data planes of all ranks; `masks`: a channel to the answering rank.
    `step_thread` has started the group. `revision`, `kv_layout`: of the whole model.
    """

    def __init__(
        self,
        group: RankGroup,
        step_thread: ThreadPoolExecutor,
        *,
        kv_links: RankLinks,
        masks: Channel,
        kv_layout: KvLayout,
        numerics: Numerics,
        num_blocks: int,
        max_context_tokens: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        revision: str,
        clock: Clock,
    ) -> None:
        self.kv_layout = kv_layout
        self.numerics = numerics
        self.num_blocks = num_blocks
        self.max_context_tokens = max_context_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.revision = revision
        self.group = group
        self.kv_links = kv_links
        self._masks = masks
        self._clock = clock
        self._budget = StepBudget()
        self._step_thread = step_thread

    @property
    def has_ended(self) -> bool:
        return self.group.loss is not None

    def step_budget_s(self, inputs: StepInputs) -> float:
        return self._budget.seconds(inputs)

    @property
    def step_extension_s(self) -> float:
        return 0.0

    async def run(self, inputs: StepInputs) -> StepOutput:
        """Raises DeviceFailed if the group is lost."""
        return await self._on(self._step_thread, self._run, inputs)

    async def check(self) -> None:
        await self._on(self._step_thread, lambda: self._command(CheckDevice()))

    async def zero_blocks(self, block_ids: list[int]) -> None:
        await self._on(self._step_thread, lambda: self._command(ZeroBlocks(block_ids)))

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await self.kv_links.close()
        await loop.run_in_executor(self._step_thread, self.group.close)
        await loop.run_in_executor(None, self._step_thread.shutdown)
        self._masks.close()

    async def _on(self, thread: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            thread, self._guarded, work, *arguments
        )

    def _guarded(self, work: Callable[..., T], *arguments: Any) -> T:
        """A group without one of its ranks computes nothing more."""
        try:
            return work(*arguments)
        except (GroupLost, ChannelClosed, TimeoutError, msgspec.DecodeError) as error:
            raise DeviceFailed(f"a rank of this worker is lost: {error}") from error

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _run(self, inputs: StepInputs) -> StepOutput:
        began_at = self._clock.now()
        step = RunStep(encode_step(inputs))
        budget_s = self._budget.seconds(inputs)
        output = decode_output(self._command(step, budget_s, inputs.sampling.masks))
        self._budget.observe(inputs, self._clock.now() - began_at)
        return output

    def _command(
        self,
        command: Command,
        budget_s: float = COMMAND_TIMEOUT_S,
        masks: TokenMasks | None = None,
    ) -> bytes:
        """Returns the answering rank's output. The watchdog ends a group that takes too long."""
        step = self.group.submit(msgspec.msgpack.encode(command), budget_s)
        while True:
            if masks is not None:
                self._serve_masks(masks)
            answer = self.group.take(None if masks is None else 0.0)
            if answer is not None:
                assert answer.step == step, "one step at a time"
                return answer.data

    def _serve_masks(self, masks: TokenMasks) -> None:
        """Returns once the group may have an answer."""
        ready, _, _ = select.select([self._masks.fileno(), self.group.fileno()], [], [])
        if self._masks.fileno() in ready:
            wanted: MasksWanted = self._masks.receive(MasksWanted)
            self._masks.send(Masks(mask_words(masks, wanted.timeout_s, self._clock)))
