"""Messages between a leader and its ranks about steps.

    ring:    RunStep, EndRows, CheckDevice, ZeroBlocks, GiveBackBlocks, PrepareKv, CountExperts,
             ProfileSteps, ReadProfile
             ──▶ every rank; the answering rank ──output, or CommandFailed──▶ leader
    masks:   the answering rank ──MasksWanted──▶ leader ──Masks──▶

Steps, masks and KV (kv_messages.py) travel apart, so that none waits for another.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.engine.executors.executor import StepLaunch
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.planning.step_work import ModelWorkload
from shared.errors import HearthError
from shared.kv_layout import KvLayout
from shared.messages import DevicePeaks, ProfilePart, ProfileSteps, ReadProfile
from shared.numerics import ModeChoice, Numerics


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


class DeviceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker's only rank on a CUDA device, and the descriptors that it inherits.

    The rank resolves `mode`, and what else depends on the device; `options` have none of it.
    """

    model_dir: str
    device: str
    mode: ModeChoice
    options: LoadOptions
    kv: int
    masks: int


class GroupModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a group of ranks serves, and how: the fields of `Executor`. `revision`, `kv_layout` and
    `numerics` are those of the whole model.
    """

    kv_layout: KvLayout
    numerics: Numerics
    num_blocks: int
    max_blocks: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_head: bool
    revision: str
    work: ModelWorkload
    depth: int
    is_elastic: bool = True
    step_launch: StepLaunch = ""
    gpu_uuid: str = ""
    offloaded_bytes: int = 0
    peaks: DevicePeaks | None = None


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


class PrepareKv(msgspec.Struct, frozen=True, tag=True):
    """Prepares for a KV cache of so many blocks; with 0 the worker is being parked."""

    num_blocks: int


class CountExperts(msgspec.Struct, frozen=True, tag=True):
    """Asks for ExpertCounts. The answer is empty if no layer has experts."""


class DescribeModel(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank that is alone for its GroupModel."""


class ExpertCounts(msgspec.Struct, frozen=True, tag=True):
    """Tokens by expert: `counts` is int64 [number of layers, num_experts]."""

    num_experts: int
    counts: bytes


class KvPrepared(msgspec.Struct, frozen=True, tag=True):
    """The answer of a device to PrepareKv: bytes of its weights in memory of the host."""

    offloaded_bytes: int


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    """The answer of a command that raised, with the code of its HearthError. A rank that computes
    with others ends instead.
    """

    code: str
    message: str


class MasksWanted(msgspec.Struct, frozen=True, tag=True):
    step: int
    timeout_s: float


class Masks(msgspec.Struct, frozen=True, tag=True):
    words: list[bytes | None]


Command = (
    RunStep
    | EndRows
    | CheckDevice
    | ZeroBlocks
    | GiveBackBlocks
    | PrepareKv
    | CountExperts
    | DescribeModel
    | ProfileSteps
    | ReadProfile
)
CommandAnswer = ExpertCounts | KvPrepared | ProfilePart | CommandFailed


def encode_failure(error: Exception) -> bytes:
    """Returns the answer of a command that raised."""
    if not isinstance(error, HearthError):
        error = HearthError(f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(CommandFailed(error.code, error.message))


def encode_counts(counts: NDArray[np.int64] | None) -> bytes:
    """Returns the answer to CountExperts; `counts` is None without experts."""
    if counts is None:
        return b""
    return msgspec.msgpack.encode(ExpertCounts(counts.shape[1], counts.tobytes()))
