"""Plain least recent use, to compare with: a model is woken as soon as a request waits for it, and
the model whose last request arrived first is parked for it. Models that run requests count as used
now. No gathering, no minimum time hot, no second replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.residency.parking_victims import chosen_victims
from services.scheduler.residency.view import (
    UNUSED,
    Action,
    Demands,
    Device,
    ModelId,
    Park,
    Resident,
    Wake,
)

_Option = tuple[Device, list[Resident]]


class LruPolicy:
    def decide(self, devices: Sequence[Device], demands: Demands, now: float) -> list[Action]:
        actions: list[Action] = []
        free = [device for device in devices if not device.is_waking]
        waiting = [model for model, demand in demands.items() if demand.num_queued]
        for model in sorted(waiting, key=lambda each: demands[each].oldest_at):
            allowed = [each for each in devices if demands[model].may_be_on(each)]
            residents = [each.models[model] for each in allowed if model in each.models]
            if any(each.is_under_way or each.is_hot for each in residents):
                continue
            places = [each for each in allowed if each in free]
            options = [each for device in places for each in _options(device, model, demands)]
            if options:
                device, victims = min(options, key=lambda each: _order(each, model))
                free.remove(device)
                actions += [Park(device.host_id, *each.model) for each in victims]
                actions.append(Wake(device.host_id, *model))
        return actions


def _options(device: Device, model: ModelId, demands: Demands) -> list[_Option]:
    target = device.models.get(model)
    if target is None or not target.can_be_woken:
        return []
    candidates = [each for each in device.models.values() if each.is_hot and not each.is_pinned]

    def recency(resident: Resident) -> tuple[bool, float]:
        return resident.num_running > 0, demands.get(resident.model, UNUSED).last_used_at

    victims = chosen_victims(device, target, sorted(candidates, key=recency))
    return [] if victims is None else [(device, victims)]


def _order(option: _Option, model: ModelId) -> tuple[bool, bool, int, float, int]:
    device, victims = option
    target = device.models[model]
    num_running = sum(each.num_running for each in victims)
    is_avoided = target.is_avoided
    return is_avoided, target.is_cold, num_running, len(victims), device.num_running
