"""The devices as a policy sees them: heartbeats of hosts, plus what they were asked for since."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from services.scheduler.residency.hosts import KnownHost
from services.scheduler.residency.view import Device, ModelId, Resident
from services.scheduler.residency.wake_orders import Key, Orders
from shared.messages import HostedModel

Identify = Callable[[HostedModel], ModelId]
NumRunning = Callable[[str], int | None]  # argument: a worker; None: it does not accept requests


def devices_of(
    hosts: Iterable[KnownHost],
    orders: Orders,
    *,
    model_of: Identify,
    num_running: NumRunning,
    now: float,
) -> list[Device]:
    """Returns the devices of live hosts. `num_running` counts the requests that a worker runs."""
    return [
        device for host in hosts for device in _devices_of(host, orders, model_of, num_running, now)
    ]


def _devices_of(
    host: KnownHost, orders: Orders, model_of: Identify, num_running: NumRunning, now: float
) -> list[Device]:
    models: dict[str, dict[ModelId, Resident]] = {each.device: {} for each in host.load.devices}
    for hosted in host.load.models:
        key = host.host_id, model_of(hosted)
        resident = _resident_of(key, hosted, orders, num_running, now)
        if resident.is_hot:
            resident = replace(resident, hot_s=hosted.hot_s + now - host.received_at)
        models.setdefault(hosted.device, {})[resident.model] = resident
    return [
        Device(
            host_id=host.host_id,
            name=each.device,
            budget_bytes=each.budget_bytes,
            used_bytes=each.used_bytes,
            models=models[each.device],
            is_waking=any(
                orders.wake_of((host.host_id, model)) is not None for model in models[each.device]
            ),
        )
        for each in host.load.devices
    ]


def _resident_of(
    key: Key, hosted: HostedModel, orders: Orders, num_running: NumRunning, now: float
) -> Resident:
    running = None if hosted.worker_id is None else num_running(hosted.worker_id)
    state = hosted.state
    if state == "hot" and running is not None:
        orders.hot(key)
    elif state in ("hot", "waking"):  # the worker has not joined yet, or is gone
        orders.wake_seen(key, hosted.wake_s, now)
        state = "standby"
    elif state == "starting":  # it becomes hot or goes to standby
        state = "cold"
    wake = orders.wake_of(key)
    is_leaving = state in ("parking", "stopping")
    is_parking = is_leaving or orders.is_parking(key)
    parked_at = now + hosted.wake_s
    return Resident(
        model=key[1],
        state=state,
        weights_bytes=hosted.weights_bytes,
        kv_bytes=hosted.kv_bytes,
        kv_floor_bytes=hosted.kv_floor_bytes,
        offloaded_bytes=hosted.offloaded_bytes,
        wake_s=hosted.wake_s,
        start_s=hosted.start_s,
        num_running=running or 0,
        is_pinned=hosted.is_pinned,
        priority=hosted.priority,
        is_under_way=wake is not None or is_parking,
        ready_at=parked_at if wake is None else wake.ready_at,
        is_refused=orders.is_refused(key),
        is_avoided=orders.is_avoided(key, now),
    )
