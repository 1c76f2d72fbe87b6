"""Computes a rank process's part of each step. Its data plane runs beside it."""

from __future__ import annotations

import msgspec
import torch

from shared.background import item_error
from shared.clock import MonotonicClock
from shared.engine.executors.group.channel import Channel
from shared.engine.executors.group.kv.rank_kv import start_rank_kv
from shared.engine.executors.group.messages import (
    CheckDevice,
    Command,
    CountExperts,
    EndRows,
    GiveBackBlocks,
    PrepareKv,
    RankSetup,
    RunStep,
    ZeroBlocks,
    encode_counts,
    encode_failure,
)
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.group.rank_profile import RankProfile
from shared.engine.executors.group.remote_masks import RemoteMasks
from shared.engine.executors.loading.freed_memory import return_freed_memory
from shared.engine.executors.loading.warm_up import CHECKED_LENS
from shared.engine.executors.rank_state import RankState
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.processes.rank_process import OneByOne, RankContext
from shared.engine.step_plan import INT_BYTES, StepPlan, StepResult, decode_plan, encode
from shared.messages import ProfileSteps, ReadProfile
from shared.numerics import exchange_of
from shared.telemetry.log import configure_child_logging

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class ModelWork(OneByOne):
    """See RankWork."""

    def __init__(self, context: RankContext) -> None:
        """Raises CheckpointError, ConfigError."""
        configure_child_logging(f"rank-{context.rank}")
        setup = msgspec.msgpack.decode(context.config, type=RankSetup)
        torch.set_num_threads(setup.num_threads)
        self._mesh = context.mesh(exchange=exchange_of(setup.options.activations))
        loaded = load_rank(setup, self._mesh)
        self._computer, self.identity = loaded.computer, loaded.identity
        layout = self._computer.kv_layout
        self._state = RankState(layout.block_size, len(layout.groups))
        self._masks = RemoteMasks(None if setup.masks < 0 else Channel.of(setup.masks))
        self._profile = RankProfile(MonotonicClock())
        self._is_profiled = context.rank == context.start.shape.answering_rank
        start_rank_kv(
            setup.kv[context.rank], loaded.memory, loaded.sent, own_host=setup.data_plane_host
        )

    def run(self, step: int, data: bytes) -> bytes:
        match _decoder.decode(data):
            case RunStep(plan=plan):
                return encode(self._computed(step, decode_plan(plan)))
            case EndRows(rows=rows):
                self._state.end(rows)
            case CheckDevice():
                self._computer.run_idle([*CHECKED_LENS], temperature=1.0)
            case ZeroBlocks(block_ids=block_ids):
                self._computer.zero_blocks(block_ids)
                _wait_for_all(self._mesh)
            case GiveBackBlocks(block_ids=block_ids):
                self._computer.give_back(block_ids)
                _wait_for_all(self._mesh)
            case PrepareKv(num_blocks=num_blocks):
                if num_blocks == 0:
                    return_freed_memory()
            case CountExperts():
                return encode_counts(self._computer.expert_counts())
            case ProfileSteps() | ReadProfile() as command if self._is_profiled:
                return self._profiled(command)
        return b""

    def _profiled(self, command: ProfileSteps | ReadProfile) -> bytes:
        """A profiler that fails ends no group."""
        try:
            if isinstance(command, ProfileSteps):
                return msgspec.msgpack.encode(self._profile.begin(command))
            return msgspec.msgpack.encode(self._profile.part(command))
        except BaseException as raised:
            return encode_failure(item_error(raised))

    def _computed(self, step: int, plan: StepPlan) -> StepResult:
        masks = self._masks.of_step(step, len(plan.masked) // INT_BYTES)
        inputs = self._state.apply(plan, masks)
        with self._profile.step(inputs):
            output = self._computer.run(inputs)
        self._state.record(output)
        return StepResult(plan.step, output, self._computer.failure)


def _wait_for_all(mesh: Mesh) -> None:
    """The answering rank returns after all others have called this."""
    stage, _ = mesh.shape.place(mesh.rank)
    token = torch.zeros(1, 1)
    if stage > 0:
        token = mesh.recv(token.shape, token.dtype)
    if mesh.shape.tp > 1:
        mesh.gather(token, 0)
    if stage + 1 < mesh.shape.pp:
        mesh.send(token)
