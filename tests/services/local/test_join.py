"""`hearth credential` with a real nats-server that is configured in a cluster's directory."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import nats
import nats.errors
import pytest

from services.client.health_check import receives_heartbeat
from services.gateway.tenancy.api_keys import ApiKeys
from services.local.credentials import Credential, nats_config
from services.local.join import add_credential, signalled_process
from services.local.processes.child_processes import ProcessSpec
from services.local.servers import find_server
from services.local.state import (
    LocalClusterState,
    StateDir,
    changing,
    clusters_dir,
    running_cluster,
    save,
)
from services.local.supervisor import Supervisor
from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.lifecycle.heartbeat import HealthMonitor
from shared.randomness import SystemRandomness
from shared.store import RedisStore
from shared.subjects import HEARTBEATS, SUBMIT, from_anyone, heartbeat, sent_by
from shared.tenancy.tenant_admin import TenantAdmin
from shared.transport.bus import NatsBus
from tests.services.cli.in_process import call_hearth
from tests.support.nats_clients import connect_ordered
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import LIMIT_S, until

OWNER = Credential("decode", "decode-1")


@pytest.fixture
async def environ(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """The environment that selects a cluster with one credential; `url` is its NATS URL."""
    made = {"XDG_STATE_HOME": str(tmp_path)}
    state = StateDir.create(clusters_dir(made))
    port = free_port()
    text = nats_config([OWNER], host="127.0.0.1", port=port)
    path = state.write_secret("nats.conf", text)
    supervisor = Supervisor(MonotonicClock(), state.path, state.logs, lambda *event: None)
    pid_file = str(state.path / "nats.pid")
    spec = ProcessSpec(
        process_id="nats",
        argv=(find_server("nats-server"), "-c", str(path), "-P", pid_file),
        environ=os.environ,
        listens_on=("127.0.0.1", port),
    )
    await supervisor.launch(spec)
    state.publish(
        LocalClusterState(
            url="http://a", api_key="k", nats_host="127.0.0.1", nats_port=port, credentials=(OWNER,)
        )
    )
    made["url"] = OWNER.nats_url("127.0.0.1", port)
    yield made
    await supervisor.stop(grace_s=5.0)
    state.close(retain_logs=False)


async def connects(url: str) -> bool:
    try:
        client = await nats.connect(url, allow_reconnect=False, connect_timeout=LIMIT_S)
    except (nats.errors.Error, OSError):
        return False
    await client.close()
    return True


async def test_new_credential_works_without_disconnecting_others(
    environ: dict[str, str],
) -> None:
    losses: list[str] = []

    async def on_loss() -> None:
        losses.append("lost")

    member = await connect_ordered(environ["url"], disconnected_cb=on_loss)
    added = add_credential("worker", "worker-far", None, environ=environ)
    assert added.credential.role == "worker"
    assert not added.is_reachable
    # The server reloads its configuration after a signal, so the first attempts may fail.
    async with asyncio.timeout(LIMIT_S):
        while not await connects(added.nats_url):
            pass
    assert not await connects(added.nats_url.replace(added.credential.password, "wrong"))
    await member.flush()
    assert losses == []
    await member.close()


async def test_credential_that_is_added_between_two_starts_of_nats_is_there(
    environ: dict[str, str],
) -> None:
    directory, _ = running_cluster(clusters_dir(environ))
    pid = signalled_process(directory / "nats.pid")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not Path("/proc", str(pid)).exists())
    added = add_credential("worker", "worker-far", None, environ=environ)
    assert added.credential.password in (directory / "nats.conf").read_text()


def test_names_are_validated_or_generated(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="taken"):
        add_credential("decode", "decode-1", None, environ=environ)
    with pytest.raises(ConfigError, match="letters, digits"):
        add_credential("decode", "a.b", None, environ=environ)
    with pytest.raises(ConfigError, match="unknown role"):
        add_credential("router", None, None, environ=environ)
    added = add_credential("kv-index", None, "10.0.0.5", environ=environ)
    assert added.nats_url.startswith("nats://kv_index-")
    assert "@10.0.0.5:" in added.nats_url


async def test_client_credential_belongs_to_its_tenant(
    environ: dict[str, str], redis_server: RedisServer
) -> None:
    directory, _ = running_cluster(clusters_dir(environ))
    with changing(directory) as state:
        save(directory, msgspec.structs.replace(state, redis_url=redis_server.url))
    store = RedisStore(redis_server.url, MonotonicClock(), timeout_s=LIMIT_S)
    await store.write([("FLUSHALL",)])
    await TenantAdmin(store, lambda: 0.0).add("acme", {}, "key")

    async def add(*arguments: str) -> CompletedProcess[str]:
        return await asyncio.to_thread(call_hearth, ("credential", *arguments), environ)

    for arguments, words in (
        (("client",), "--tenant"),
        (("client", "--tenant", "nobody"), "tenant 'nobody' does not exist"),
        (("client", "--tenant", "acme", "--name", "a.b"), "letters, digits"),
        (("client", "--tenant", "acme", "--name", "decode-1"), "taken"),
        (("decode", "--tenant", "acme"), "--tenant is for the role client"),
    ):
        refused = await add(*arguments)
        assert (refused.returncode, refused.stdout) == (2, ""), arguments
        assert words in refused.stderr
    assert len(await TenantAdmin(store, lambda: 0.0).keys("acme")) == 1
    url = (await add("client", "--tenant", "acme", "--name", "billing")).stdout.strip()
    assert url.startswith("nats://billing:")
    other = (await add("client", "--tenant", "acme")).stdout.strip()
    assert other.startswith("nats://client-")
    async with asyncio.timeout(LIMIT_S):
        while not (await connects(url) and await connects(other)):
            pass
    keys = ApiKeys(store, MonotonicClock())
    assert (await keys.tenant_of_client("billing")).tenant_id == "acme"
    assert {each.key_id for each in await TenantAdmin(store, lambda: 0.0).keys("acme")} >= {
        "billing"
    }
    await store.close()


async def test_concurrently_added_credentials_all_work(environ: dict[str, str]) -> None:
    names = [f"decode-{number}" for number in range(2, 10)]
    adding = (
        asyncio.to_thread(add_credential, "decode", name, None, environ=environ) for name in names
    )
    for each in await asyncio.gather(*adding):
        # `connect` retries while the server reloads, as for a worker
        bus = await NatsBus.connect(each.nats_url, process_id=each.credential.process_id)
        await bus.close()


def test_error_without_a_cluster_mentions_hearth_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hearth up"):
        add_credential("decode", None, None, environ={"XDG_STATE_HOME": str(tmp_path)})


async def test_process_with_ready_heartbeats_is_healthy(environ: dict[str, str]) -> None:
    url = environ["url"]
    assert not await receives_heartbeat(url, "decode-1", timeout_s=0.4)
    bus = await NatsBus.connect(url, process_id="decode-1")
    health_monitor = HealthMonitor(bus, MonotonicClock(), SystemRandomness(), roles=("decode",))
    await health_monitor.start()
    assert not await receives_heartbeat(url, "decode-1", timeout_s=0.4)  # still starting
    await health_monitor.transition_to("ready")
    assert await receives_heartbeat(url, "decode-1", timeout_s=5.0)
    await health_monitor.stop()
    await bus.close()


async def test_observer_receives_heartbeats_and_cannot_publish(environ: dict[str, str]) -> None:
    added = add_credential("observer", "watcher", None, environ=environ)
    rejections: asyncio.Queue[str] = asyncio.Queue()

    async def on_error(error: Exception) -> None:
        await rejections.put(str(error).lower())

    bus = await NatsBus.connect(added.nats_url, process_id="watcher")  # retries until the reload
    await bus.close()
    observer = await connect_ordered(added.nats_url, error_cb=on_error)
    member = await NatsBus.connect(environ["url"], process_id="decode-1")
    heartbeats = await observer.subscribe(from_anyone(HEARTBEATS))
    for _ in range(2):  # the first PING may overtake the subscription
        await observer.flush()
    await HealthMonitor(
        member, MonotonicClock(), SystemRandomness(), roles=("decode",)
    ).transition_to("ready")
    subject = (await heartbeats.next_msg(timeout=LIMIT_S)).subject
    assert subject == sent_by(heartbeat(("decode",), "decode-1"), "decode-1")
    for subject in (SUBMIT, heartbeat(("decode",), "decode-1")):
        await observer.publish(subject, b"x")
        rejection = await asyncio.wait_for(rejections.get(), timeout=LIMIT_S)
        assert "permissions violation for publish" in rejection
    await observer.close()
    await member.close()


@pytest.mark.parametrize("text", ["0", "-1", "1", "", "x", "9" * 30])
def test_invalid_pid_in_the_pid_file_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "nats.pid").write_text(text)
    with pytest.raises(ConfigError, match="cannot reload"):
        signalled_process(tmp_path / "nats.pid")
