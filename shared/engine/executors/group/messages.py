"""Messages between a leader and its ranks about steps.

    ring:    RunStep, EndRows, CheckDevice, ZeroBlocks, GiveBackBlocks, ReturnFreedMemory,
             CountExperts ──▶ every rank; the answering rank ──output──▶ leader
    masks:   the answering rank ──MasksWanted──▶ leader ──Masks──▶

Steps, masks and KV (kv_messages.py) travel apart, so that none waits for another.
"""

from __future__ import annotations

import msgspec

from shared.engine.executors.loading.load_options import LoadOptions


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a rank's part of the model, and the descriptors that it inherits.

    `options` are those of the whole model, with the dtype and mode that the leader has chosen.
    `kv` has a socket for each rank, and `masks` is one of the answering rank; -1 stands for a
    socket of another host. `data_plane_host` is the address at which ranks on another host than
    the leader's receive KV.
    """

    model_dir: str
    options: LoadOptions
    num_threads: int
    max_blocks: int
    kv: tuple[int, ...]
    masks: int
    data_plane_host: str = ""


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """A step to run. Its `plan` is encoded as in step_plan.py."""

    plan: bytes


class EndRows(msgspec.Struct, frozen=True, tag=True):
    """Rows whose sequences have ended, encoded like `StepPlan.ended`. It is sent if no step
    follows.
    """

    rows: bytes


class CheckDevice(msgspec.Struct, frozen=True, tag=True):
    """A step without side effects."""


class ZeroBlocks(msgspec.Struct, frozen=True, tag=True):
    """Zeroes blocks. The answer comes once all ranks have zeroed them."""

    block_ids: list[int]


class GiveBackBlocks(msgspec.Struct, frozen=True, tag=True):
    """Gives the memory of unused blocks back to the system."""

    block_ids: list[int]


class ReturnFreedMemory(msgspec.Struct, frozen=True, tag=True):
    """Returns the memory of steps to the system: the worker is being parked."""


class CountExperts(msgspec.Struct, frozen=True, tag=True):
    """Asks for ExpertCounts. The answer is empty if the answering rank has no layer
    with experts.
    """


class ExpertCounts(msgspec.Struct, frozen=True):
    """Tokens by expert: `counts` is int64 [number of layers, num_experts]."""

    num_experts: int
    counts: bytes


class MasksWanted(msgspec.Struct, frozen=True, tag=True):
    step: int
    timeout_s: float


class Masks(msgspec.Struct, frozen=True, tag=True):
    words: list[bytes | None]


Command = (
    RunStep | EndRows | CheckDevice | ZeroBlocks | GiveBackBlocks | ReturnFreedMemory | CountExperts
)
