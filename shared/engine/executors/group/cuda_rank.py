"""Computes the steps of a worker's only rank, on one CUDA device.

The process has the device, with weights, KV and a data plane; the leader has the bus and outlives a
device that is lost. Up to two steps are in flight, as in one process: each is launched when its
plan comes, while the answer of the one before it is awaited.

    ring ──plan──▶ PlanQueue ──▶ CudaExecutor: step thread launches
    ring ◀─answer, in order───── answer thread waits for the device
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
import structlog

from kernels.device import on_triton_compile
from shared.background import item_error, start_awaited
from shared.engine.executors.cuda.cuda_device import cuda_device
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.executors.group.channel import Channel
from shared.engine.executors.group.kv.rank_kv import start_rank_kv
from shared.engine.executors.group.kv.rank_memory import RankKvMemory
from shared.engine.executors.group.messages import (
    CheckDevice,
    Command,
    CountExperts,
    DescribeModel,
    DeviceSetup,
    EndRows,
    GiveBackBlocks,
    GroupModel,
    KvPrepared,
    PrepareKv,
    RunStep,
    ZeroBlocks,
    encode_counts,
    encode_failure,
)
from shared.engine.executors.group.rank_profile import RankTrace
from shared.engine.executors.group.remote_masks import RemoteMasks
from shared.engine.executors.load import resolve_device
from shared.engine.executors.loading.load_options import OnPhase
from shared.engine.executors.loading.mode_choice import resolve_mode
from shared.engine.executors.step_deadline import COMPILE_S
from shared.engine.executors.step_queue import PlanQueue
from shared.engine.parallel.processes.rank_messages import LoadingPhase, RankIdentity, StepExtended
from shared.engine.parallel.processes.rank_process import RankContext, StepRing
from shared.engine.parallel.processes.records import Record
from shared.engine.step import StepOutput
from shared.engine.step_plan import INT_BYTES, StepPlan, StepResult, decode_plan, encode
from shared.errors import OutOfMemory
from shared.messages import ProfilePart, ProfileSteps, ReadProfile
from shared.telemetry.log import configure_child_logging

log = structlog.get_logger(__name__)

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def load_on_device(setup: DeviceSetup, on_phase: OnPhase) -> CudaExecutor:
    """Raises CheckpointError, ConfigError."""
    target = resolve_device(setup.device)
    options = msgspec.structs.replace(setup.options, mode=resolve_mode(setup.mode, target))
    device = cuda_device(target)
    return CudaExecutor.load(Path(setup.model_dir), options, device, on_phase, answers_apart=True)


Load = Callable[[DeviceSetup, OnPhase], CudaExecutor]


class CudaRank:
    """See RankWork. A step or a command that raises fails alone, as in one process: the leader
    decides whether the device is lost. A plan that cannot be applied ends the rank.
    """

    def __init__(self, context: RankContext, load: Load = load_on_device) -> None:
        """Raises CheckpointError, ConfigError."""
        configure_child_logging(f"rank-{context.rank}")
        setup = msgspec.msgpack.decode(context.config, type=DeviceSetup)
        self._executor = executor = load(setup, lambda phase: context.send(LoadingPhase(phase)))
        layout = executor.kv_layout
        self.identity = RankIdentity(
            weights_digest=executor.revision,
            layout_key=layout.key,
            numerics=str(executor.numerics),
            versions=f"torch {version('torch')}",
        )
        self._plans = PlanQueue(layout.block_size, len(layout.groups), executor.start_in_time)
        self._has_lost_plan = False
        self._trace = RankTrace()
        self._masks = RemoteMasks(Channel.of(setup.masks))
        if executor.computer.kv_cache.is_cuda:
            on_triton_compile(partial(context.send, StepExtended(COMPILE_S)))
        memory = RankKvMemory(executor, layout, layout.whole)
        start_rank_kv(setup.kv, memory, layout.whole, own_host="")

    def serve(self, ring: StepRing) -> None:
        asyncio.run(self._serve(ring))

    async def _serve(self, ring: StepRing) -> None:
        begun = asyncio.Queue[tuple[int, Awaitable[bytes]]]()
        asyncio.get_running_loop().add_reader(ring.fileno(), self._begin_all, ring, begun)
        while True:
            number, answer = await begun.get()
            ring.answer(number, await answer)

    def _begin_all(
        self, ring: StepRing, begun: asyncio.Queue[tuple[int, Awaitable[bytes]]]
    ) -> None:
        """Begins what has come. `_serve` raises what this raises, after the answers before it."""
        try:
            while (record := ring.take()) is not None:
                begun.put_nowait((record.step, self._begin(record)))
        except BaseException as error:
            loop = asyncio.get_running_loop()
            loop.remove_reader(ring.fileno())
            failed = loop.create_future()
            failed.set_exception(error)
            begun.put_nowait((-1, failed))

    def _begin(self, record: Record) -> Awaitable[bytes]:
        match _decoder.decode(record.data):
            case RunStep(plan=data):
                plan = decode_plan(data)
                masks = self._masks.of_step(record.step, len(plan.masked) // INT_BYTES)
                self._plans.submit(plan, masks, self._lose_plan)
                return self._result(plan)
            case command:
                return start_awaited(self._answer(command))

    def _lose_plan(self) -> None:
        self._has_lost_plan = True

    async def _result(self, plan: StepPlan) -> bytes:
        try:
            output = await self._plans.result(plan.step)
        except BaseException as raised:
            error = item_error(raised)
            if self._has_lost_plan:
                raise
            if isinstance(error, OutOfMemory):  # the leader logs it once in a while
                return encode(StepResult(plan.step, StepOutput([]), error.message, True))
            log.exception("step_failed")
            failure = f"{type(error).__name__}: {error}"
            return encode(StepResult(plan.step, StepOutput([]), failure))
        return encode(StepResult(plan.step, output))

    async def _answer(self, command: Command) -> bytes:
        try:
            return await self._run(command)
        except BaseException as raised:
            error = item_error(raised)
            log.exception("command_failed", command=type(command).__name__)
            return encode_failure(error)

    async def _run(self, command: Command) -> bytes:
        executor = self._executor
        match command:
            case EndRows(rows=rows):
                self._plans.state.end(rows)
            case CheckDevice():
                await executor.check()
            case ZeroBlocks(block_ids=block_ids):
                await executor.zero_blocks(block_ids)
            case GiveBackBlocks(block_ids=block_ids):
                await executor.give_back(block_ids)
            case PrepareKv(num_blocks=num_blocks):
                await executor.resize_kv(num_blocks)
                return msgspec.msgpack.encode(KvPrepared(executor.offloaded_bytes))
            case CountExperts():
                return encode_counts(await executor.expert_counts())
            case DescribeModel():
                return msgspec.msgpack.encode(self._model())
            case ProfileSteps(num_steps=num_steps, timeout_s=timeout_s):
                self._trace.set(start_awaited(executor.profile(num_steps, timeout_s)))
                return msgspec.msgpack.encode(ProfilePart(number=0))
            case ReadProfile() as read:
                return msgspec.msgpack.encode(self._trace.part(read))
        return b""

    def _model(self) -> GroupModel:
        executor = self._executor
        return GroupModel(
            kv_layout=executor.kv_layout,
            numerics=executor.numerics,
            num_blocks=executor.num_blocks,
            max_blocks=executor.max_blocks,
            max_context_tokens=executor.max_context_tokens,
            vocab_size=executor.vocab_size,
            eos_token_ids=executor.eos_token_ids,
            has_head=executor.has_head,
            revision=executor.revision,
            depth=executor.depth,
            is_elastic=executor.is_elastic,
            step_launch=executor.step_launch,
            gpu_uuid=executor.gpu_uuid,
            offloaded_bytes=executor.offloaded_bytes,
            work=executor.work,
            peaks=executor.peaks,
        )
