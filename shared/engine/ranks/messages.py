"""What a leader and its ranks send each other about steps and copies.

    ring:    RunStep, CheckDevice, ZeroBlocks ──▶ every rank; the answering rank ──output──▶ leader
    masks:   the answering rank ──MasksWanted──▶ leader ──Masks──▶
    copies:  ReadKv, WriteKv ──▶ a rank ──Copied, CopyFailed──▶ leader

Steps, masks and copies travel apart, so that none waits for another.
"""

from __future__ import annotations

import msgspec

from shared.numerics import Activations, Mode


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a rank's part of the model, and the descriptors that it inherits.

    `copies`: a socket for each rank; `masks`: one of the answering rank; -1: of another host's.
    """

    model_dir: str
    dtype: str
    block_size: int
    num_blocks: int
    mode: Mode
    activations: Activations = "plain"
    load_format: str
    num_threads: int
    copies: tuple[int, ...]
    masks: int


class RunStep(msgspec.Struct, frozen=True, tag=True):
    inputs: bytes


class CheckDevice(msgspec.Struct, frozen=True, tag=True):
    """A step without side effects."""


class ZeroBlocks(msgspec.Struct, frozen=True, tag=True):
    """Answered once all ranks have zeroed them."""

    block_ids: list[int]


class MasksWanted(msgspec.Struct, frozen=True, tag=True):
    timeout_s: float


class Masks(msgspec.Struct, frozen=True, tag=True):
    words: list[bytes | None]


class ReadKv(msgspec.Struct, frozen=True, tag=True):
    """A group's tokens [first_token, first_token + num_tokens), of the rank's layers and heads."""

    block_table: list[int]
    first_token: int
    num_tokens: int
    group: int


class WriteKv(msgspec.Struct, frozen=True, tag=True):
    where: ReadKv
    payload: bytes


class Copied(msgspec.Struct, frozen=True, tag=True):
    payload: bytes = b""


class CopyFailed(msgspec.Struct, frozen=True, tag=True):
    reason: str


Command = RunStep | CheckDevice | ZeroBlocks
CopyCommand = ReadKv | WriteKv
CopyReply = Copied | CopyFailed
