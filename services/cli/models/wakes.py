"""Wakes and parks models on hosts by hand, as an operator of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.cli.fleet.host_tables import short_digest
from services.cli.models.live_states import connected, observed_models
from services.cli.nats_address import find_nats
from shared.errors import ConfigError
from shared.fleet.host_view import ModelView
from shared.messages import Done, ModelWaking, ParkModel, WakeModel
from shared.subjects import host_models
from shared.transport.bus import Bus

CONNECT_TIMEOUT_S = 5.0
WAKE_TIMEOUT_S = 5.0
PARK_TIMEOUT_S = 60.0  # running requests end first


def run_wake(nats_url: str | None, name: str, revision: str | None, host: str | None) -> None:
    """Wakes a model, and prints where and when it is hot. Raises the host's refusal,
    such as NoCapacity.
    """
    print(asyncio.run(_command(nats_url, name, revision, host, is_wake=True)))


def run_park(nats_url: str | None, name: str, revision: str | None, host: str | None) -> None:
    """Parks a model, and prints where it is in standby. Raises the host's refusal,
    such as WorkerBusy.
    """
    print(asyncio.run(_command(nats_url, name, revision, host, is_wake=False)))


async def _command(
    nats_url: str | None, name: str, revision: str | None, host: str | None, *, is_wake: bool
) -> str:
    url = find_nats(nats_url, "operator")
    async with connected(url, "operator", CONNECT_TIMEOUT_S) as bus:
        found = chosen_models(await observed_models(bus), name, revision, host)
        return await (wake(bus, found[0]) if is_wake else park(bus, found))


def chosen_models(
    models: Sequence[ModelView], name: str, revision: str | None, host: str | None
) -> list[ModelView]:
    """Returns the models of one revision, in the order of `models`: first the one on the host that
    serves it or can serve it soonest.

    `revision` is its name, or the beginning of its digest. Raises ConfigError if there is none, or
    several revisions.
    """
    named = [each for each in models if each.name == name and host in (None, each.host_id)]
    found = [each for each in named if each.revision.startswith(revision or "")]
    shown = sorted({short_digest(each.revision) for each in found or named})
    if not found and named:
        raise ConfigError(f"{name!r} has no revision {revision!r}: it has {', '.join(shown)}")
    if not found:
        where = "no host" if host is None else f"no host {host!r}"
        raise ConfigError(f"{where} has the model {name!r}: see `hearth status`")
    if len(shown) > 1:
        known = ", ".join(shown)
        raise ConfigError(f"{name!r} has several revisions on hosts, choose one of them: {known}")
    return found


async def wake(bus: Bus, model: ModelView) -> str:
    command = WakeModel(model=model.name, revision=model.revision)
    reply = await bus.request(
        host_models(model.host_id), command, ModelWaking, timeout_s=WAKE_TIMEOUT_S
    )
    if reply.state == "hot":
        return f"{model.name} is hot on {model.host_id}"
    return f"{model.name} is {reply.state} on {model.host_id}: hot in {reply.ready_in_s:.2g} s"


async def park(bus: Bus, models: Sequence[ModelView]) -> str:
    hot = [each for each in models if each.state == "hot"]
    if not hot:
        raise ConfigError(f"{models[0].name!r} is not hot: it is {_states(models)}")
    for each in hot:
        command = ParkModel(model=each.name, revision=each.revision)
        await bus.request(host_models(each.host_id), command, Done, timeout_s=PARK_TIMEOUT_S)
    return f"{hot[0].name} is in standby on {', '.join(each.host_id for each in hot)}"


def _states(models: Sequence[ModelView]) -> str:
    return ", ".join(f"{each.state} on {each.host_id}" for each in models)
