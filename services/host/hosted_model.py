"""The state of one model on a host, and the actions of the host that change it. No I/O.

              ┌──────────────────ended──────────────────┐
              ▼                      ┌─NoCapacity──┐    │
    cold ──Start──▶ starting ──▶ standby ──Wake──▶ waking ──▶ hot
     ▲ ▲                 └──────────────────────────────────▶ ▲ │
     │ └─ended─ stopping ◀──Stop── standby, hot, …            │ Park
     │                      standby ◀──── parking ◀───────────┼─┘
     └──pause── failed                       └──WorkerBusy────┘

Start is a StartAction, Wake a WakeAction, and so on. A worker that ends makes its model cold, or
failed after MAX_FAILURES in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import msgspec

from services.host.budget import ModelKey, ModelMemory
from shared.messages import ModelState

TRANSITIONS: dict[ModelState, frozenset[ModelState]] = {
    "cold": frozenset({"starting", "failed"}),
    "starting": frozenset({"standby", "hot", "stopping", "cold", "failed"}),
    "standby": frozenset({"waking", "stopping", "cold", "failed"}),
    "waking": frozenset({"hot", "standby", "stopping", "cold", "failed"}),
    "hot": frozenset({"parking", "stopping", "cold", "failed"}),
    "parking": frozenset({"standby", "hot", "stopping", "cold", "failed"}),
    "stopping": frozenset({"cold", "failed"}),
    "failed": frozenset({"starting", "cold"}),
}
HAS_PROCESS: frozenset[ModelState] = frozenset(TRANSITIONS) - {"cold", "failed"}
HAS_KV: frozenset[ModelState] = frozenset({"waking", "hot", "parking"})
MAX_FAILURES = 3  # failures in a row, before a model counts as failed; it is still tried again
WORKER_ENDS = "its worker keeps ending"
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0  # pauses before a worker that ended is started again
DEFAULT_START_S, DEFAULT_WAKE_S = 10.0, 0.5  # assumed until they are measured
FIRST_START_LIMIT_S = 1800.0  # converts the weights and compiles kernels
MIN_LIMIT_S = 30.0  # limit of a start or a wake
LIMIT_FACTOR = 10.0  # times the expected duration
OFFLOAD_BYTES_PER_S = 1 << 30  # at least: the first time pages are locked


class StartAction(msgspec.Struct, frozen=True, tag=True):
    """Starts a worker with a cache of `kv_bytes`, or in standby if it is None."""

    key: ModelKey
    device: str
    kv_bytes: int | None


class WakeAction(msgspec.Struct, frozen=True, tag=True):
    key: ModelKey
    kv_bytes: int


class ParkAction(msgspec.Struct, frozen=True, tag=True):
    key: ModelKey


class ResizeAction(msgspec.Struct, frozen=True, tag=True):
    key: ModelKey
    kv_bytes: int


class StopAction(msgspec.Struct, frozen=True, tag=True):
    """Ends the worker after its running requests."""

    key: ModelKey


class KillAction(msgspec.Struct, frozen=True, tag=True):
    key: ModelKey
    reason: str


Action = StartAction | WakeAction | ParkAction | ResizeAction | StopAction | KillAction


@dataclass(slots=True)
class HostedState:
    """The state of a model on this host.

    `kv_bytes` are those that its worker has or was given. `is_wake_wanted` holds since `wanted_at`,
    until the model is hot. A model that `is_known` has been started once, here or before. One that
    `is_final` is not tried again until its registry record changes. `public_failure` is for
    clients, as in HostedModel. If `is_offloaded`, its weights are in memory of the host.
    """

    memory: ModelMemory
    device: str
    is_known: bool = False
    wake_s: float = DEFAULT_WAKE_S
    start_s: float = DEFAULT_START_S
    state: ModelState = "cold"
    since: float = -inf
    hot_since: float = -inf
    kv_bytes: int = 0
    resized_to: int = 0  # the last size that its worker was told
    is_offloaded: bool = False
    is_wake_wanted: bool = False
    wanted_at: float = inf
    is_removed: bool = False
    is_killed: bool = False
    num_failures: int = 0
    retry_at: float = -inf
    failure: str = ""
    public_failure: str = ""
    is_final: bool = False

    @property
    def key(self) -> ModelKey:
        return self.memory.key

    @property
    def has_process(self) -> bool:
        return self.state in HAS_PROCESS

    @property
    def used_bytes(self) -> int:
        return self._process_bytes + self.kv_bytes if self.has_process else 0

    @property
    def least_bytes(self) -> int:
        """The bytes of the model's process, with the floor of its cache if it has one."""
        return self._process_bytes + (self.memory.kv_floor_bytes if self.kv_bytes else 0)

    @property
    def _process_bytes(self) -> int:
        return self.memory.standby_bytes if self.is_offloaded else self.memory.fixed_bytes

    @property
    def is_becoming_hot(self) -> bool:
        return self.state == "waking" or (self.state == "starting" and self.kv_bytes > 0)

    @property
    def is_hot_soon(self) -> bool:
        """Whether it has a cache and keeps it, or will have one."""
        return self.state == "hot" or self.is_becoming_hot or self.is_wake_wanted

    def is_startable(self, now: float) -> bool:
        is_idle = not (self.has_process or self.is_final or self.is_removed)
        return is_idle and now >= self.retry_at

    def used(self, now: float) -> None:
        self.memory = msgspec.structs.replace(self.memory, used_at=now)

    def enter(self, state: ModelState, now: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.key}: {self.state} → {state}")
        self.state, self.since = state, now
        if state in ("standby", "cold", "failed"):
            self.kv_bytes = self.resized_to = 0
        if state in ("cold", "failed"):
            self.is_killed = False
            self.memory = msgspec.structs.replace(self.memory, offloaded_bytes=0)
        if state != "stopping":
            self.is_offloaded = state == "standby"
        if state in ("hot", "failed"):
            self.is_wake_wanted, self.wanted_at = False, inf
        if state == "hot":
            self.hot_since = now
        if state in ("hot", "standby"):
            self.num_failures, self.failure, self.public_failure = 0, "", ""

    def ended(self, reason: str, now: float, public_reason: str = WORKER_ENDS) -> None:
        """Records the end of its worker. A model that served is wanted again; an intended end is no
        failure.
        """
        had_served = self.state in ("hot", "waking")
        if self.state == "stopping" and not self.is_killed:
            self.enter("failed" if self.is_final else "cold", now)
            return
        self.num_failures += 1
        self.failure, self.public_failure = reason, public_reason
        self.retry_at = now + min(MAX_PAUSE_S, MIN_PAUSE_S * 2 ** (self.num_failures - 1))
        is_failed = self.is_final or self.num_failures >= MAX_FAILURES
        self.enter("failed" if is_failed else "cold", now)
        if had_served and not (is_failed or self.is_removed):
            self.want(now)

    def refused(self, reason: str, now: float) -> None:
        """Records that its worker found no memory to wake in, and stays in standby. The wake is
        tried again, MAX_FAILURES times in all.
        """
        num_failures = self.num_failures + 1
        self.enter("standby", now)
        self.retry_at = now + MIN_PAUSE_S * 2 ** (num_failures - 1)
        self.num_failures, self.failure = num_failures, reason
        if num_failures >= MAX_FAILURES:
            self.num_failures, self.is_wake_wanted, self.wanted_at = 0, False, inf

    def want(self, now: float) -> None:
        if not self.is_wake_wanted:
            self.is_wake_wanted, self.wanted_at = True, now

    def limit_s(self) -> float:
        """Returns the limit of its state, before its worker is given up; inf for one that may
        last.
        """
        if self.state == "starting":
            limit = LIMIT_FACTOR * self.start_s if self.is_known else FIRST_START_LIMIT_S
        elif self.state in ("waking", "parking"):
            offload_s = self.memory.offloaded_bytes / OFFLOAD_BYTES_PER_S
            limit = LIMIT_FACTOR * self.wake_s + offload_s
        elif self.state == "stopping":
            limit = MIN_LIMIT_S
        else:
            return inf
        return max(MIN_LIMIT_S, limit)

    def expected_s(self, now: float) -> float:
        """Returns the expected time until it is hot, if nothing else happens before."""
        if self.state == "hot":
            return 0.0
        elapsed = now - self.since
        if self.state == "starting" and self.kv_bytes == 0:
            return max(0.0, self.start_s - elapsed) + self.wake_s
        if self.state in ("starting", "waking"):
            whole = self.start_s if self.state == "starting" else self.wake_s
            return max(0.05, whole - elapsed)
        pause_s = max(0.0, self.retry_at - now)
        return pause_s + (self.wake_s if self.state in ("standby", "parking") else self.start_s)
