"""Hosts and their models for `hearth status` and `hearth model list`, from heartbeats. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.messages import DeviceMemory, Heartbeat, HostedModel

# Order of the states of a model in a table: what serves first.
_STATES = ("hot", "waking", "starting", "parking", "standby", "stopping", "cold", "failed")


class HostView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host for display. `state` is the announced state, or the kind of loss. `models` counts the
    models in each state.
    """

    process_id: str
    state: str
    region: str = ""
    devices: tuple[DeviceMemory, ...] = ()
    models: dict[str, int] = {}


class ModelView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model on one host, whose state is `host_state`.

    Sizes are in bytes. Times are in seconds: from standby to hot, from cold to hot, and
    since it became hot.
    """

    name: str
    revision: str
    state: str
    host_id: str
    device: str
    host_state: str
    region: str = ""
    worker_id: str | None = None
    weights_bytes: int = 0
    kv_bytes: int = 0
    wake_s: float = 0.0
    start_s: float = 0.0
    hot_s: float = 0.0
    priority: int = 0
    is_pinned: bool = False
    failure: str = ""

    @property
    def has_failed(self) -> bool:
        return self.state == "failed"

    def is_of(self, name: str, revision: str, digest: str) -> bool:
        """Returns hosts name a revision by its digest, or by its name until they know that."""
        return self.name == name and self.revision in (revision, digest)


_OF_MODEL = [each for each in HostedModel.__struct_fields__ if each in ModelView.__struct_fields__]


def host_view(heartbeat: Heartbeat, state: str) -> HostView:
    """Returns the view of a host; `state` is that of its process."""
    load = heartbeat.host
    models = () if load is None else load.models
    counts = ((state, sum(each.state == state for each in models)) for state in _STATES)
    return HostView(
        process_id=heartbeat.process_id,
        state=state,
        region=heartbeat.region,
        devices=() if load is None else load.devices,
        models={state: count for state, count in counts if count},
    )


def model_views(host: HostView, models: Iterable[HostedModel]) -> Iterable[ModelView]:
    return (_model_view(each, host) for each in models)


def in_order(models: Iterable[ModelView]) -> list[ModelView]:
    """Sorts by name and revision; of one revision, the host first on which it serves."""
    return sorted(
        models, key=lambda it: (it.name, it.revision, _STATES.index(it.state), it.host_id)
    )


def _model_view(model: HostedModel, host: HostView) -> ModelView:
    return ModelView(
        **{name: getattr(model, name) for name in _OF_MODEL},
        host_id=host.process_id,
        host_state=host.state,
        region=host.region,
    )
