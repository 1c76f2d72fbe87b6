"""Whether a worker of one model should change its role, and which: pure, with its own timers.

With p workers that prefill, d that decode and b that do both, the fleet is used by

    usage = max(prefill / (p + b), decode / (d + b), (prefill + decode) / (p + d + b))

since workers of both roles take work of either. The change of one worker between prefill and
decode that lowers the usage most is wanted if the usage is high and falls by enough. It is made
once it has been wanted for HOLD_S, not sooner than `min_s` after the last change of any worker of
the model, by whomever, and never takes the last worker of a role from its group. Where no worker
decodes, which two schedulers may cause at once, `min_s` does not count. Workers of both roles
follow the work by themselves and are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from services.scheduler.roles.demand import WorkerDemand, WorkerWork
from shared.messages import WorkerRole

# No change is wanted below MIN_USAGE: streams accumulate for seconds after it is passed.
MIN_USAGE = 0.6
TARGET_USAGE = 0.8  # usage of the workers that an autoscaler is advised to have
MIN_GAIN = 1.15  # the usage before a change over that after it
HOLD_S = 1.0
ROLES: tuple[WorkerRole, WorkerRole] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class RoleChange:
    worker_id: str
    role: WorkerRole
    min_s: float = 0.0  # time since the worker's last change


@dataclass(frozen=True, slots=True)
class Split:
    num_prefill: int
    num_decode: int
    num_both: int

    def usage(self, demand: WorkerDemand) -> float:
        total = self.num_prefill + self.num_decode + self.num_both
        return max(
            _share(demand.prefill, self.num_prefill + self.num_both),
            _share(demand.decode, self.num_decode + self.num_both),
            _share(demand.prefill + demand.decode, total),
        )

    def after(self, role: WorkerRole) -> Split:
        """Returns the split after one worker has changed to this role from the other one."""
        step = 1 if role == "prefill" else -1
        return Split(self.num_prefill + step, self.num_decode - step, self.num_both)


class RolePolicy:
    """Decides the changes of role of one model's workers."""

    def __init__(self, *, min_s: float, min_workers: int) -> None:
        self._min_s = min_s
        self._min_workers = min_workers
        self._roles: dict[str, tuple[str, ...]] = {}
        self._changed_at = -inf
        self._wanted: WorkerRole | None = None
        self._wanted_since = inf

    def decide(
        self, workers: Sequence[WorkerWork], demand: WorkerDemand, now: float
    ) -> RoleChange | None:
        """Returns the change of role to make, if any. A change that its worker refuses is decided
        again after `min_s`.
        """
        self._observe(workers, now)
        wanted = self._best(workers, demand)
        role = None if wanted is None else wanted.role
        if role != self._wanted:
            self._wanted, self._wanted_since = role, now
        if wanted is None:
            return None
        is_outage = not any("decode" in each.roles for each in workers)
        min_s = 0.0 if is_outage else self._min_s
        if now - self._wanted_since < HOLD_S or now - self._changed_at < min_s:
            return None
        self._changed_at = now
        return replace(wanted, min_s=min_s)

    def _observe(self, workers: Sequence[WorkerWork], now: float) -> None:
        """Records changes of known workers, including those by others."""
        roles = {each.worker_id: each.roles for each in workers}
        if any(self._roles.get(each, own) != own for each, own in roles.items()):
            self._changed_at = now
        self._roles = roles

    def _best(self, workers: Sequence[WorkerWork], demand: WorkerDemand) -> RoleChange | None:
        split = split_of(workers)
        usage = split.usage(demand)
        if usage < MIN_USAGE:
            return None
        role = min(ROLES, key=lambda each: split.after(each).usage(demand))
        if usage < MIN_GAIN * split.after(role).usage(demand):
            return None
        movable = list(self._movable(workers, role))
        if not movable:
            return None
        return RoleChange(min(movable, key=_held_work).worker_id, role)

    def _movable(self, workers: Sequence[WorkerWork], role: WorkerRole) -> Iterator[WorkerWork]:
        source = "decode" if role == "prefill" else "prefill"
        left = Counter(each.group for each in workers if source in each.roles)
        for each in workers:
            is_spare = left[each.group] > self._min_workers
            if each.roles == (source,) and each.can_change and is_spare:
                yield each


def split_of(workers: Sequence[WorkerWork]) -> Split:
    counts = Counter(each.roles for each in workers)
    return Split(counts["prefill",], counts["decode",], counts["prefill", "decode"])


def wanted_workers(busy: float, min_workers: int) -> int:
    """Returns the number of workers at which each is used by at most TARGET_USAGE."""
    return max(min_workers, ceil(busy / TARGET_USAGE))


def _held_work(worker: WorkerWork) -> tuple[float, str]:
    """Returns a sort key: the work that the worker still has in its old role."""
    held = worker.num_used_blocks / max(1, worker.num_total_blocks)
    return held + worker.prefill_tokens_in_flight * worker.speed.token_s, worker.worker_id


def _share(busy: float, num_workers: int) -> float:
    if num_workers <= 0:
        return inf
    return busy / num_workers
