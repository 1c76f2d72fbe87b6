"""The input and the decisions of a residency policy. Units are bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from shared.messages import ModelState

ModelId = tuple[str, str]  # the name and the digest of its weights

USUAL_GAPS = 3.0  # 19 of 20 gaps between Poisson arrivals are shorter than so many mean gaps
UNKNOWN_START_S = 10.0  # assumed start of a model that was never started


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model on one device.

    `num_running` counts the requests that its worker runs. `offloaded_bytes` are those of its
    weights that leave the device in standby. If `is_under_way`, it is on its way to
    another state, or asked to take it; if that state is hot, it is expected there at `ready_at`. If
    `is_refused`, its host will not wake it for now. If `is_avoided`, a wake has not ended in time.
    """

    model: ModelId
    state: ModelState
    weights_bytes: int = 0
    kv_bytes: int = 0
    kv_floor_bytes: int = 0
    offloaded_bytes: int = 0
    wake_s: float = 0.0
    start_s: float = 0.0
    hot_s: float = 0.0
    num_running: int = 0
    is_pinned: bool = False
    priority: int = 0
    is_under_way: bool = False
    ready_at: float = inf
    is_refused: bool = False
    is_avoided: bool = False

    @property
    def standby_bytes(self) -> int:
        """The bytes that the model takes on the device in standby."""
        return self.weights_bytes - self.offloaded_bytes

    @property
    def wake_bytes(self) -> int:
        """The least bytes that a wake from standby takes."""
        return self.kv_floor_bytes + self.offloaded_bytes

    @property
    def is_hot(self) -> bool:
        return self.state == "hot" and not self.is_under_way

    @property
    def is_cold(self) -> bool:
        return self.state in ("cold", "failed")

    @property
    def can_be_woken(self) -> bool:
        is_available = not (self.is_under_way or self.is_refused)
        return is_available and self.state in ("standby", "cold")

    @property
    def ready_in_s(self) -> float:
        """The expected seconds from the model's present state until it is hot."""
        return (self.start_s or UNKNOWN_START_S) if self.is_cold else self.wake_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of a host. If `is_waking`, one of its models is on its way to hot."""

    host_id: str
    name: str
    budget_bytes: int
    used_bytes: int
    models: Mapping[ModelId, Resident] = field(default_factory=dict)
    is_waking: bool = False

    @property
    def num_running(self) -> int:
        return sum(each.num_running for each in self.models.values())

    @property
    def available_bytes(self) -> int:
        """The unused bytes, and those that the host takes back from KV caches above their
        floors.
        """
        above = sum(
            max(0, each.kv_bytes - each.kv_floor_bytes)
            for each in self.models.values()
            if each.state == "hot"
        )
        return self.budget_bytes - self.used_bytes + above


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """The requests of one model.

    `rate` is in arrivals per second, decayed. `deadline_at` is the earliest of the queued requests.
    `hosts` are those that may serve them; None means all.
    """

    rate: float = 0.0
    last_used_at: float = -inf
    num_queued: int = 0
    num_tokens: int = 0
    oldest_at: float = inf
    deadline_at: float = inf
    hosts: frozenset[str] | None = None

    def may_be_on(self, device: Device) -> bool:
        return self.hosts is None or device.host_id in self.hosts

    def expected_rate(self, now: float) -> float:
        """Returns the rate, unless the model has been unused for longer than that explains."""
        idle_s = now - self.last_used_at
        return min(self.rate, USUAL_GAPS / idle_s) if idle_s > 0 else self.rate


@dataclass(frozen=True, slots=True)
class Wake:
    host_id: str
    model: str
    revision: str


@dataclass(frozen=True, slots=True)
class Park:
    host_id: str
    model: str
    revision: str


Action = Wake | Park
Demands = Mapping[ModelId, ModelDemand]
UNUSED = ModelDemand()


class Policy(Protocol):
    def decide(self, devices: Sequence[Device], demands: Demands, now: float) -> list[Action]:
        """Returns the actions to send to hosts now, in order: parks come before the wake that they
        make room for. There is at most one wake for each device.
        """
        ...
