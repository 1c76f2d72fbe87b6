"""Shares the memory of one device among the models of a host. No I/O.

    budget = Σ weights + process of every model with a process + Σ KV of the hot ones + free

Weights that a parked worker offloads, to memory of the host, count only while it is hot.
Every hot model has at least its floor, which holds one sequence of its full context. What is left
is shared by need, up to each ceiling (water filling): KV pools are elastic. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import NamedTuple

import msgspec

# Shares of models without any need: they differ from zero, so that a burst finds some room.
LEAST_NEED = 1.0
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))


class ModelKey(NamedTuple):
    """Identifies a model. `revision` is its name in the model registry."""

    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.name} ({self.revision})"


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a model.

    `process_bytes` are those of a worker, besides weights and KV. `need` counts tokens that its
    worker holds and that wait for it, or any other measure that is the same for all models. If
    `is_standby_wanted`, the model registry wants its process alive. `used_at` is when it was last
    hot. `offloaded_bytes` are those of its weights that leave the device in standby.
    """

    key: ModelKey
    weights_bytes: int
    process_bytes: int
    kv_floor_bytes: int
    kv_ceiling_bytes: float = inf
    need: float = 0.0
    priority: int = 0
    is_standby_wanted: bool = False
    used_at: float = -inf
    offloaded_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """The bytes of the model's process without a cache, with all weights on the device."""
        return self.weights_bytes + self.process_bytes

    @property
    def standby_bytes(self) -> int:
        """The bytes of its process in standby."""
        return self.fixed_bytes - self.offloaded_bytes

    @property
    def wake_bytes(self) -> int:
        """The least bytes that a wake from standby takes."""
        return self.least_hot_bytes - self.standby_bytes

    @property
    def least_hot_bytes(self) -> int:
        return self.fixed_bytes + self.kv_floor_bytes


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Room for a wake. The processes of `stops`, models in standby, must end first. `missing_bytes`
    must come from parked models.
    """

    stops: tuple[ModelKey, ...] = ()
    missing_bytes: int = 0


def kv_sizes(
    budget_bytes: int, resident: Iterable[ModelMemory], hot: Collection[ModelKey]
) -> dict[ModelKey, int]:
    """Returns the KV of every hot model: its floor, and its part of what the others leave. The sum
    with all fixed bytes is at most the budget, unless the floors alone exceed it.
    """
    models = list(resident)
    active = [each for each in models if each.key in hot]
    sizes = {each.key: each.kv_floor_bytes for each in active}
    spare = budget_bytes - sum(each.fixed_bytes for each in models) - sum(sizes.values())
    growing = [each for each in active if each.kv_ceiling_bytes > each.kv_floor_bytes]
    while spare > 0 and growing:
        total = sum(_weight(each) for each in growing)
        filled = [
            each
            for each in growing
            if each.kv_ceiling_bytes - each.kv_floor_bytes <= spare * _weight(each) / total
        ]
        if not filled:
            for each in growing:
                sizes[each.key] += int(spare * _weight(each) / total)
            break
        for each in filled:
            sizes[each.key] = int(each.kv_ceiling_bytes)
            spare -= int(each.kv_ceiling_bytes) - each.kv_floor_bytes
        growing = [each for each in growing if each not in filled]
    return sizes


def room_for(
    target: ModelMemory,
    budget_bytes: int,
    resident: Iterable[ModelMemory],
    *,
    hot: Collection[ModelKey],
    stoppable: Collection[ModelKey],
) -> Room:
    """Returns what must happen before `target` can be hot: the caches of hot models shrink to their
    floors without being named here; then `stoppable` processes in standby end, the least wanted one
    first.
    """
    others = [each for each in resident if each.key != target.key]
    taken = sum(each.least_hot_bytes if each.key in hot else each.standby_bytes for each in others)
    missing = target.least_hot_bytes + taken - budget_bytes
    stops: list[ModelMemory] = []
    for each in sorted((each for each in others if each.key in stoppable), key=retention):
        if missing <= 0:
            break
        stops.append(each)
        missing -= each.standby_bytes
    for each in list(stops):  # those that a later, larger one made unnecessary
        if missing + each.standby_bytes <= 0:
            stops.remove(each)
            missing += each.standby_bytes
    return Room(stops=tuple(each.key for each in stops), missing_bytes=max(0, missing))


def standby_starts(
    cold: Iterable[ModelMemory],
    budget_bytes: int,
    resident: Iterable[ModelMemory],
    hot: Collection[ModelKey],
) -> list[ModelKey]:
    """Returns the cold models whose processes fit beside all others, the most wanted one
    first. Room stays for the largest wake of a model that is not hot: any of them can be
    woken by parking alone.
    """
    residents = list(resident)
    starts: list[ModelKey] = []
    for each in sorted(cold, key=retention, reverse=True):
        grown = [*residents, each]
        parked = [model for model in grown if model.key not in hot]
        taken = sum(model.least_hot_bytes for model in grown if model.key in hot)
        taken += sum(model.standby_bytes for model in parked)
        if taken + max(model.wake_bytes for model in parked) <= budget_bytes:
            residents = grown
            starts.append(each.key)
    return starts


def choose_device(free_bytes: Mapping[str, int]) -> str:
    """Returns the device with the most free memory."""
    return max(sorted(free_bytes), key=lambda device: free_bytes[device])


def never_fits(model: ModelMemory, budgets: Mapping[str, int]) -> str | None:
    """Returns the reason that no device can ever serve the model, or None."""
    largest = max(budgets, key=lambda device: budgets[device])
    if model.least_hot_bytes <= budgets[largest]:
        return None
    return (
        f"model {model.key} needs {size_text(model.least_hot_bytes)} "
        f"({size_text(model.weights_bytes)} of weights, {size_text(model.process_bytes)} for its "
        f"process, {size_text(model.kv_floor_bytes)} of KV), and the budget of {largest} is "
        f"{size_text(budgets[largest])}"
    )


def retention(model: ModelMemory) -> tuple[bool, int, float, ModelKey]:
    """Returns the sort key by which models are retained: those that can be missed first come
    first.
    """
    return model.is_standby_wanted, model.priority, model.used_at, model.key


def size_text(num_bytes: float) -> str:
    for unit, shift in _UNITS:
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.3g} {unit}"
    return f"{num_bytes:g} B"


def _weight(model: ModelMemory) -> float:
    return LEAST_NEED + model.need
