"""Changes that operators and hosts make, found in heartbeats and in the model registry. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from shared.messages import Heartbeat, HostedModel, ModelState
from shared.model_registry.record import RegisteredModel

MAX_DETAIL = 200  # characters
_KINDS: dict[ModelState, str] = {
    "hot": "model woken",
    "standby": "model parked",
    "failed": "model failed",
}


class Change(NamedTuple):
    kind: str
    process_id: str
    detail: str


class FleetChanges:
    """Compares each heartbeat with the one before."""

    def __init__(self) -> None:
        self._roles: dict[str, tuple[int, tuple[str, ...]]] = {}  # epoch and roles
        self._models: dict[str, dict[tuple[str, str], ModelState]] = {}  # by host
        self._cuts: dict[str, set[str]] = {}  # sites whose link is cut, by process

    def observe(self, heartbeat: Heartbeat) -> list[Change]:
        if heartbeat.state == "stopped":
            self.forget(heartbeat.process_id)
            return []
        found = [*self._role_changes(heartbeat), *self._link_changes(heartbeat)]
        return found if heartbeat.host is None else [*found, *self._model_changes(heartbeat)]

    def forget(self, process_id: str) -> None:
        self._roles.pop(process_id, None)
        self._models.pop(process_id, None)
        self._cuts.pop(process_id, None)

    def _role_changes(self, heartbeat: Heartbeat) -> list[Change]:
        process_id, now = heartbeat.process_id, (heartbeat.epoch, heartbeat.roles)
        before = self._roles.get(process_id)
        if before == now:
            return []
        self._roles[process_id] = now
        if before is None or before[0] != heartbeat.epoch:
            return []
        detail = f"{' and '.join(before[1])} → {' and '.join(heartbeat.roles)}"
        return [Change("role changed", process_id, detail)]

    def _link_changes(self, heartbeat: Heartbeat) -> Iterable[Change]:
        """Yields the links that a gateway has lost, and those that are back."""
        if heartbeat.gateway is None:
            return
        cut = {each.site for each in heartbeat.links if each.is_cut}
        before = self._cuts.get(heartbeat.process_id, set())
        self._cuts[heartbeat.process_id] = cut
        for site in sorted(cut ^ before):
            kind = "link cut" if site in cut else "returned"
            yield Change(kind, f"link to {site}", f"seen by {heartbeat.process_id}")

    def _model_changes(self, heartbeat: Heartbeat) -> Iterable[Change]:
        if heartbeat.host is None:
            return
        models = {(each.name, each.revision): each for each in heartbeat.host.models}
        before = self._models.get(heartbeat.process_id, {})
        self._models[heartbeat.process_id] = {key: each.state for key, each in models.items()}
        for key, each in models.items():
            kind = _KINDS.get(each.state)
            if kind is not None and before.get(key, each.state) != each.state:
                yield Change(kind, heartbeat.process_id, _detail(each))


def registry_changes(
    before: Mapping[str, RegisteredModel], after: Mapping[str, RegisteredModel]
) -> Iterable[tuple[str, str]]:
    """Yields kind and name of each model that was added, removed or changed."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            yield "model added", name
        elif name not in after:
            yield "model removed", name
        elif _without_digests(before[name]) != _without_digests(after[name]):
            yield "model changed", name


def _without_digests(model: RegisteredModel) -> RegisteredModel:
    """The first host that loads a revision records its digest: no operator has changed it."""
    return replace(model, revisions=tuple(replace(each, digest="") for each in model.revisions))


def _detail(model: HostedModel) -> str:
    name = f"{model.name} {model.revision[:12]}"
    return f"{name}: {model.failure}"[:MAX_DETAIL] if model.failure else name
