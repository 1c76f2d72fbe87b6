"""Heartbeats of hosts."""

from __future__ import annotations

from typing import Any

from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import DeviceMemory, Heartbeat, HostedModel, HostLoad, ModelState

GIB = 2**30


def hosted(name: str, revision: str, state: ModelState, **fields: Any) -> HostedModel:
    return HostedModel(name=name, revision=revision, state=state, device="cpu", **fields)


def host_heartbeat(
    host_id: str, *models: HostedModel, number: int = 1, num_devices: int = 1, region: str = "west"
) -> Heartbeat:
    devices = tuple(
        DeviceMemory(device=f"cuda:{i}", budget_bytes=4 * GIB, used_bytes=GIB)
        for i in range(num_devices)
    )
    return Heartbeat(
        process_id=host_id,
        epoch=1,
        sequence_number=number,
        roles=("host",),
        state="ready",
        interval_s=HEARTBEAT_INTERVAL_S,
        region=region,
        host=HostLoad(devices=devices, models=models),
    )
