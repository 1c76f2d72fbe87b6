"""Chooses the hot models that are parked so that another one can be woken on their device."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.residency.view import Device, Resident


def missing_bytes(device: Device, target: Resident) -> int:
    """Returns the bytes that parking must free before `target` can be woken; at most 0
    if it needs none.

    For a cold model the host may also stop models in standby, whose weights return. Cold models of
    unknown size need nothing here: their host decides.
    """
    if not target.is_cold:
        return target.wake_bytes - device.available_bytes
    stoppable = sum(each.standby_bytes for each in device.models.values() if _is_idle(each, target))
    return target.weights_bytes + target.kv_floor_bytes - device.available_bytes - stoppable


def freed_bytes(parked: Resident, target: Resident) -> int:
    """Returns the bytes that parking a model frees for `target`, beyond what its cache has
    above its floor.
    """
    return parked.wake_bytes + (parked.standby_bytes if target.is_cold else 0)


def chosen_victims(
    device: Device, target: Resident, candidates: Iterable[Resident]
) -> list[Resident] | None:
    """Returns the first candidates that free enough, without those that the others make
    unnecessary; None if all of them do not free enough.
    """
    missing, chosen = missing_bytes(device, target), list[Resident]()
    for each in candidates:
        if missing <= 0:
            break
        chosen.append(each)
        missing -= freed_bytes(each, target)
    if missing > 0:
        return None
    for each in list(chosen):
        if missing + freed_bytes(each, target) <= 0:
            chosen.remove(each)
            missing += freed_bytes(each, target)
    return chosen


def _is_idle(resident: Resident, target: Resident) -> bool:
    return resident.state == "standby" and resident.model != target.model
