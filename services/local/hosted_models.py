"""A local cluster of several models: one host runs the workers of all, by the model registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from services.local.model_list import NamedModel
from shared.background import Background
from shared.clock import Clock
from shared.errors import ConfigError, HearthError
from shared.lifecycle.host_models import ReceivedModels
from shared.messages import Heartbeat, HostedModel, ModelWaking, WakeModel
from shared.model_registry.admin import RegistryAdmin
from shared.store import RedisStore
from shared.subjects import HEARTBEATS, host_models
from shared.transport.bus import NatsBus

POLL_S = 0.1
STORE_TIMEOUT_S = 5.0


async def store_models(
    redis_url: str, clock: Clock, models: Sequence[NamedModel], *, weights: str, kv_dtype: str
) -> None:
    """Adds the models to the registry. A name with another source there gets a further revision."""
    store = RedisStore(redis_url, clock, timeout_s=STORE_TIMEOUT_S)
    admin = RegistryAdmin(store, time.time)
    given = {"weights": weights, "kv_dtype": kv_dtype}
    settings = {name: value for name, value in given.items() if value != "auto"}
    try:
        known = await admin.all()
        for each in models:
            found = known.get(each.name)
            if found is None:
                await admin.add(each.name, each.source, settings=settings)
            elif all(revision.source != each.source for revision in found.revisions):
                raise ConfigError(
                    f"model {each.name!r} is in the catalogue with another source, "
                    f"{found.revisions[0].source}: move it with `hearth model`"
                )
    finally:
        await store.close()


async def wait_until_served(
    nats_url: str,
    operator_id: str,
    models: Sequence[NamedModel],
    clock: Clock,
    on_ready: Callable[[str], None],
) -> None:
    """Returns once the first model is hot and the others are at least in standby. Calls `on_ready`
    with each name. Raises ConfigError for a model that fails.
    """
    bus = await NatsBus.connect(nats_url, process_id=operator_id)
    hosted: dict[str, tuple[str, HostedModel]] = {}
    background = Background()
    received = ReceivedModels(bus, clock, background)

    def observe(message: Heartbeat) -> None:
        message = received.complete(message)
        if message.host is not None:
            hosted.update({each.name: (message.process_id, each) for each in message.host.models})

    try:
        await bus.subscribe(HEARTBEATS, Heartbeat, observe)
        waiting = [each.name for each in models]
        first = waiting[0]
        while waiting:
            for name in list(waiting):
                if name not in hosted:
                    continue
                host_id, model = hosted[name]
                if model.state == "failed" and model.failure:
                    raise ConfigError(f"model {name!r}: {model.failure}")
                if model.state == "hot" or (model.state == "standby" and name != first):
                    waiting.remove(name)
                    on_ready(name)
                elif name == first and model.state == "standby":
                    await _wake(bus, host_id, model)
            await clock.sleep(POLL_S)
    finally:
        await background.stop()
        await bus.close()


async def _wake(bus: NatsBus, host_id: str, model: HostedModel) -> None:
    message = WakeModel(model=model.name, revision=model.revision)
    try:
        await bus.request(host_models(host_id), message, ModelWaking, timeout_s=5.0)
    except HearthError as error:
        raise ConfigError(f"model {model.name!r}: {error.message}") from None
