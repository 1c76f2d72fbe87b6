"""Work without torch, so that ranks start in a blink; it fails or hangs where a plan says so."""

from __future__ import annotations

import os
import signal
import threading

import msgspec

from shared.engine.parallel.processes.rank_messages import RankIdentity
from shared.engine.parallel.processes.rank_process import OneByOne, RankContext


class Plan(msgspec.Struct):
    text: str = ""
    failing_rank: int = -1
    hanging_rank: int = -1


class Config(msgspec.Struct):
    other_rank: int = -1  # it has another identity
    other_field: str = "weights_digest"
    failing_rank: int = -1
    hanging_rank: int = -1
    freezing_rank: int = -1


class EchoWork(OneByOne):
    def __init__(self, context: RankContext) -> None:
        self._rank = context.rank
        config = msgspec.json.decode(context.config or b"{}", type=Config)
        self._act(config.failing_rank, config.hanging_rank)
        if context.rank == config.freezing_rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.identity = RankIdentity("digest", "layout", "numerics", "versions")
        if context.rank == config.other_rank:
            self.identity = msgspec.structs.replace(self.identity, **{config.other_field: "other"})

    def _act(self, failing_rank: int, hanging_rank: int) -> None:
        if self._rank == failing_rank:
            raise MemoryError("no memory is left")
        if self._rank == hanging_rank:
            threading.Event().wait()

    def run(self, step: int, plan: bytes) -> bytes:
        decoded = msgspec.json.decode(plan, type=Plan)
        self._act(decoded.failing_rank, decoded.hanging_rank)
        return f"{self._rank}:{step}:{decoded.text}".encode()
