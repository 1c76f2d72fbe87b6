"""Reports the devices and models of a host. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.host.hosted_model import HostedState
from services.host.hosted_revisions import HostedRevision
from services.host.model_states import HostStates
from shared.messages import DeviceMemory, HostedModel, HostLoad

SOURCE_UNUSABLE = "its source is missing, or is none that the host can serve"


def host_load(states: HostStates, revisions: Iterable[HostedRevision], now: float) -> HostLoad:
    return HostLoad(
        devices=tuple(
            DeviceMemory(
                device=each.name, budget_bytes=each.budget_bytes, used_bytes=each.used_bytes
            )
            for each in states.devices.values()
        ),
        models=tuple(_hosted_model(states, each, now) for each in revisions),
    )


def _hosted_model(states: HostStates, hosted: HostedRevision, now: float) -> HostedModel:
    state = states.find(hosted.key)
    common: dict[str, Any] = {
        "name": hosted.key.name,
        "revision": hosted.digest or hosted.key.revision,
        "card": hosted.card,
        "worker_id": hosted.worker_id,
        "is_pinned": hosted.model.is_pinned,
        "priority": hosted.model.priority,
    }
    if state is None:  # the source of the model is not found yet
        return HostedModel(
            **common,
            state="failed" if hosted.failure else "cold",
            device=next(iter(states.devices)),
            failure=hosted.failure,
            public_failure=SOURCE_UNUSABLE if hosted.failure else "",
        )
    return HostedModel(**common, **_measured(states, state, now))


def _measured(states: HostStates, state: HostedState, now: float) -> dict[str, Any]:
    return {
        "state": state.state,
        "device": state.device,
        # all that ends with its process, so that a scheduler's sums agree with this host's
        "weights_bytes": state.memory.fixed_bytes,
        "kv_bytes": state.kv_bytes,
        "kv_floor_bytes": states.devices[state.device].committed(state).kv_floor_bytes,
        "offloaded_bytes": state.memory.offloaded_bytes,
        "wake_s": state.wake_s,
        "start_s": state.start_s,
        "hot_s": max(0.0, now - state.hot_since) if state.state == "hot" else 0.0,
        "failure": state.failure,
        "public_failure": state.public_failure,
    }
