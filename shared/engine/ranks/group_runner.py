"""A `Runner` whose model is computed by a group of rank processes; the leader holds no weights.

One worker of the fleet is one group: the leader has the bus, the batcher and the block pool, the
ranks have weights and KV. All ranks get the same steps, and the last stage's first rank samples.
A rank that dies, freezes or fails ends the group: `check` raises, and the worker leaves the fleet.
"""

from __future__ import annotations

import asyncio
import select
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np

from shared.clock import Clock
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.planning.rank_part import RankPart
from shared.engine.parallel.processes.group import RankGroup
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.engine.ranks.channel import Channel, ChannelClosed
from shared.engine.ranks.messages import (
    CheckDevice,
    Command,
    Copied,
    CopyFailed,
    CopyReply,
    Masks,
    MasksWanted,
    ReadKv,
    RunStep,
    WriteKv,
    ZeroBlocks,
)
from shared.engine.ranks.step_codec import decode_output, encode_step, mask_words
from shared.engine.runner import StepInputs, StepOutput, TokenMasks
from shared.engine.runners.step_deadline import StepBudget
from shared.errors import DeviceFailed
from shared.kv_layout import ITEM_BYTES, KvLayout
from shared.numerics import Numerics

T = TypeVar("T")
COMMAND_TIMEOUT_S = 30.0  # of a check, a copy, or zeroing


class GroupRunner:
    """`parts`: of each rank, in order; `copies`: a channel to each; `masks`: to the answering rank.
    `step_thread` has started the group. `revision`, `kv_layout`: of the whole model.
    """

    def __init__(
        self,
        group: RankGroup,
        step_thread: ThreadPoolExecutor,
        parts: Sequence[RankPart],
        *,
        shape: MeshShape,
        copies: Sequence[Channel],
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
        self._parts = parts
        self._copied_ranks = _ranks_with_own_heads(shape, parts)
        self._copies = copies
        self._masks = masks
        self._clock = clock
        self._budget = StepBudget()
        self._step_thread = step_thread
        self._copy_thread = ThreadPoolExecutor(1, "group-copy")

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

    async def read_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        out: memoryview,
        group: int = 0,
    ) -> None:
        command = ReadKv(list(block_table), first_token, num_tokens, group)
        await self._on(self._copy_thread, self._read, command, out)

    async def write_kv(
        self,
        block_table: Sequence[int],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        group: int = 0,
    ) -> None:
        command = ReadKv(list(block_table), first_token, num_tokens, group)
        await self._on(self._copy_thread, self._write, command, payload)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._copy_thread.shutdown)
        await loop.run_in_executor(self._step_thread, self.group.close)
        await loop.run_in_executor(None, self._step_thread.shutdown)
        for each in (*self._copies, self._masks):
            each.close()

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

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def _read(self, command: ReadKv, out: memoryview) -> None:
        whole = self._by_head(np.frombuffer(out, np.uint8), command)
        ranks = [each for each in self._copied_ranks if self._layers(each, command.group)]
        for rank in ranks:
            self._copies[rank].send(command)
        for rank in ranks:
            part = self._slices(rank, command.group)
            payload = np.frombuffer(self._copied(rank).payload, np.uint8)
            whole[part] = payload.reshape(whole[part].shape)

    def _write(self, where: ReadKv, payload: memoryview) -> None:
        whole = self._by_head(np.frombuffer(payload, np.uint8), where)
        ranks = [each for each in range(len(self._parts)) if self._layers(each, where.group)]
        for rank in ranks:
            data = whole[self._slices(rank, where.group)].tobytes()
            self._copies[rank].send(WriteKv(where, data))
        for rank in ranks:
            self._copied(rank)

    def _copied(self, rank: int) -> Copied:
        reply: CopyReply = self._copies[rank].receive(CopyReply, COMMAND_TIMEOUT_S)
        if isinstance(reply, CopyFailed):
            raise ValueError(f"rank {rank}: {reply.reason}")
        return reply

    def _by_head(self, data: np.ndarray, where: ReadKv) -> np.ndarray:
        """[layers of the group, planes, num_tokens, num_kv_heads, bytes of a head]"""
        layout = self.kv_layout
        planes, heads, dim = layout.state.row
        num_layers = len(layout.groups[where.group].layers)
        item_bytes = dim * ITEM_BYTES[layout.dtype]
        return data.reshape(num_layers, planes, where.num_tokens, heads, item_bytes)

    def _layers(self, rank: int, group: int) -> range:
        """Of the group's layers, those that the rank holds, by their place in the group."""
        layers, own = self.kv_layout.groups[group].layers, self._parts[rank].layers
        return range(bisect_left(layers, own.start), bisect_left(layers, own.stop))

    def _slices(self, rank: int, group: int) -> tuple[slice, ...]:
        layers, heads = self._layers(rank, group), self._parts[rank].kv_heads
        of_heads = slice(heads.start, heads.stop)
        return slice(layers.start, layers.stop), slice(None), slice(None), of_heads


def _ranks_with_own_heads(shape: MeshShape, parts: Sequence[RankPart]) -> list[int]:
    """Of the ranks that hold the same key-value heads, the first one sends them."""
    found: dict[tuple[int, range], int] = {}
    for rank, part in enumerate(parts):
        if part.kv_heads:
            found.setdefault((shape.place(rank)[0], part.kv_heads), rank)
    return sorted(found.values())
