"""`hearth model wake` and `park`: which host is asked, over a real nats-server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.cli.models.wakes import chosen_models, park, wake
from shared.errors import ConfigError, NoCapacity
from shared.fleet.host_view import ModelView
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import Done, ModelWaking, ParkModel, WakeModel
from shared.subjects import heartbeat, host_models
from shared.transport.bus import NatsBus
from tests.services.cli.cluster.heartbeats import host_heartbeat, hosted
from tests.services.cli.in_process import call_hearth
from tests.support.servers import NatsServer
from tests.support.services.running import environ_for
from tests.support.waiting import LIMIT_S


def view(revision: str, state: str, host_id: str = "host-1") -> ModelView:
    return ModelView(
        name="m", revision=revision, state=state, host_id=host_id, device="cpu", host_state="ready"
    )


def test_revision_is_chosen_by_name_or_beginning_of_its_digest() -> None:
    models = [view("0123456789abcdef", "hot"), view("0123456789abcdef", "cold", "host-2")]
    both = [*models, view("fedcba", "standby", "host-2")]
    assert chosen_models(models, "m", None, None) == models
    assert chosen_models(both, "m", "0123", None) == models
    assert chosen_models(both, "m", "fedcba", "host-2") == both[2:]
    for revision, host, words in (
        (None, None, "'m' has several revisions on hosts, choose one .*: 0123456789ab, fedcba"),
        ("beef", None, "'m' has no revision 'beef': it has 0123456789ab, fedcba"),
        (None, "host-9", "no host 'host-9' has the model 'm'"),
    ):
        with pytest.raises(ConfigError, match=words):
            chosen_models(both, "m", revision, host)
    with pytest.raises(ConfigError, match="no host has the model 'other'"):
        chosen_models(both, "other", None, None)


class Host:
    """What a host replies to commands; notes them."""

    def __init__(self) -> None:
        self.commands: list[WakeModel | ParkModel] = []
        self.reply: ModelWaking | NoCapacity = ModelWaking(state="waking", ready_in_s=0.25)

    def on_command(self, command: WakeModel | ParkModel) -> ModelWaking | Done:
        self.commands.append(command)
        if isinstance(command, ParkModel):
            return Done()
        if isinstance(self.reply, NoCapacity):
            raise self.reply
        return self.reply


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path, (("operator", "operator-1"), ("host", "host-1")))
    yield server
    server.stop()


@pytest.fixture
async def host_bus(nats: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats.url("host-1"), process_id="host-1")
    yield bus
    await bus.close()


@pytest.fixture
async def operator(nats: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats.url("operator-1"), process_id="operator-1.x")
    yield bus
    await bus.close()


@pytest.fixture
async def host(host_bus: NatsBus) -> Host:
    host = Host()
    await host_bus.serve(host_models("host-1"), WakeModel | ParkModel, host.on_command)
    await host_bus.flush()
    return host


async def test_wake_reports_state_and_time(host: Host, operator: NatsBus) -> None:
    found = view("d", "standby")
    assert await wake(operator, found) == "m is waking on host-1: hot in 0.25 s"
    host.reply = ModelWaking(state="hot", ready_in_s=0.0)
    assert await wake(operator, found) == "m is hot on host-1"
    assert host.commands == 2 * [WakeModel(model="m", revision="d")]
    host.reply = NoCapacity("no memory for 'm'")
    with pytest.raises(NoCapacity, match="no memory for 'm'"):
        await wake(operator, found)


async def test_park_asks_only_hosts_where_it_is_hot(host: Host, operator: NatsBus) -> None:
    with pytest.raises(ConfigError, match="'m' is not hot: it is standby on host-1"):
        await park(operator, [view("d", "standby")])
    models = [view("d", "hot"), view("d", "standby", "host-2")]  # there is no host-2
    assert await park(operator, models) == "m is in standby on host-1"
    assert host.commands == [ParkModel(model="m", revision="d")]


async def test_command_finds_the_host_by_its_heartbeats(
    host: Host, host_bus: NatsBus, nats: NatsServer, tmp_path: Path
) -> None:
    arguments = ("model", "wake", "m", "--nats-url", nats.url("operator-1"))
    environ = environ_for(tmp_path)
    waking = asyncio.create_task(asyncio.to_thread(call_hearth, arguments, environ))
    async with asyncio.timeout(LIMIT_S):
        for number in itertools.count():
            beat = host_heartbeat("host-1", hosted("m", "d", "standby"), number=number, region="")
            await host_bus.publish(heartbeat(("host",), "host-1"), beat)
            done, _ = await asyncio.wait({waking}, timeout=HEARTBEAT_INTERVAL_S / 5)
            if done:
                break
    result = await waking
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "m is waking on host-1: hot in 0.25 s"
    assert host.commands == [WakeModel(model="m", revision="d")]
