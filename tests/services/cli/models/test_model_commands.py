"""`hearth model` on a real Redis, with the states of a host on a real nats-server."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import redis

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.cli.models.registry_table import RegistryView, table_of_registry
from services.cli.output import text_console
from shared.clock import MonotonicClock
from shared.fleet.host_view import ModelView
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import HostedModel
from shared.model_registry.admin import RegistryAdmin
from shared.model_registry.record import REGISTRY, RegisteredModel, RegisteredRevision
from shared.store import RedisStore
from shared.subjects import heartbeat
from shared.tenancy.audit import AUDIT
from shared.transport.bus import NatsBus
from tests.services.cli.cluster.heartbeats import host_heartbeat, hosted
from tests.services.cli.in_process import call_hearth
from tests.services.cli.models.conftest import Hearth, text
from tests.support.grids import in_one_test
from tests.support.servers import NatsServer, RedisServer
from tests.support.services.running import environ_for
from tests.support.waiting import LIMIT_S

T = TypeVar("T")
RECORD = b'{"name":"m","revisions":[{"name":"r1","source":"org/m"}]}'


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO_MODEL_DIR, folder)
    return str(folder)


def rows(hearth: Hearth) -> list[list[str]]:
    """The cells of the table without its heading."""
    return [line.split() for line in text(hearth("model", "list")).splitlines()[1:]]


async def record_digest(url: str, name: str, revision: str, digest: str) -> None:
    store = RedisStore(url, MonotonicClock(), timeout_s=LIMIT_S)
    await RegistryAdmin(store, lambda: 0.0).record_digest(name, revision, digest)
    await store.close()


def test_life_of_a_name(hearth: Hearth, redis_server: RedisServer, checkpoint: str) -> None:
    assert text(hearth("model", "list")) == "no model in the catalogue"
    settings = (
        "--standby",
        "2",
        "--max-context",
        "4096",
        "--weights",
        "dense",
        "--kv-dtype",
        "fp8",
    )
    settings = (*settings, "--pin")
    assert text(hearth("model", "add", "qwen", checkpoint, "--alias", "fast", *settings)) == "r1"
    asyncio.run(record_digest(redis_server.url, "qwen", "r1", "0123456789abcdef"))
    assert rows(hearth)[0] == [
        *("qwen", "r1", "0123456789ab", "100", "%", checkpoint),
        *("fast", "all", "4,096", "dense", "fp8", "2", "0", "yes"),
    ]
    staged = hearth("model", "add", "qwen", "org/new")
    assert text(staged) == "r2" and "r2 serves nothing yet" in staged.stderr
    text(hearth("model", "promote", "qwen", "r2", "--canary", "5"))
    assert [(row[1], row[3]) for row in rows(hearth)] == [("r1", "95"), ("r2", "5")]
    pending = hearth("model", "promote", "qwen", "r2")
    assert text(pending) == "" and "once a host has loaded it" in pending.stderr
    assert "promoted once loaded" in text(hearth("model", "list"))
    asyncio.run(record_digest(redis_server.url, "qwen", "r2", "fedcba"))
    assert [row[1:4] for row in rows(hearth)] == [["r2", "fedcba", "100"]]
    text(hearth("model", "remove", "qwen"))
    assert text(hearth("model", "list")) == "no model in the catalogue"
    assert text(hearth("model", "aliases")) == "no alias"  # removed with the model


def test_settings_change_one_by_one(hearth: Hearth, checkpoint: str) -> None:
    text(hearth("tenant", "add", "acme"))
    limited = ("--tenant", "acme", "--alias", "fast", "--priority", "5")
    text(hearth("model", "add", "m", checkpoint, *limited))
    text(hearth("model", "set", "m", "--standby", "1"))
    text(hearth("model", "pin", "m"))
    (row,) = json.loads(text(hearth("model", "list", "--json")))
    assert (row["priority"], row["num_standby"], row["is_pinned"]) == (5, 1, True)
    assert row["tenants"] == ["acme"] and row["aliases"][0]["tenant_id"] == "acme"
    assert row["revisions"][0]["source"] == checkpoint and row["revisions"][0]["share"] == 1
    text(hearth("model", "set", "m", "--tenant", "all", "--max-context", "16"))
    text(hearth("model", "set", "m", "--max-context", "unlimited"))
    text(hearth("model", "unpin", "m"))
    row = json.loads(text(hearth("model", "show", "m", "--json")))
    assert (row["tenants"], row["max_context_tokens"], row["is_pinned"]) == (None, None, False)
    shown = text(hearth("model", "show", "m"))
    assert "fast (acme)" in shown and checkpoint in shown and "r1" in shown


def test_sources_are_absolute_or_hub_ids(hearth: Hearth, tmp_path: Path) -> None:
    missing = hearth("model", "add", "a", "./no/folder")
    assert f"note: {Path.cwd()}/no/folder does not exist on this machine" in missing.stderr
    assert text(missing) == "r1" and len(missing.stderr.splitlines()) == 1
    assert hearth("model", "add", "b", "org/name").stderr == ""
    assert hearth("model", "add", "c", "shared/demo_model").stderr == ""  # a directory here
    sources = [row["revisions"][0]["source"] for row in json.loads(_json(hearth))]
    assert sources == [
        f"{Path.cwd()}/no/folder",
        "org/name",
        f"{Path.cwd()}/shared/demo_model",
    ]


def _json(hearth: Hearth) -> str:
    return text(hearth("model", "list", "--json"))


def test_unreadable_record_affects_its_model_only(
    hearth: Hearth, redis_server: RedisServer
) -> None:
    text(hearth("model", "add", "m", "org/name"))
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(REGISTRY, "[b]broken", "{")
    first, second = rows(hearth)
    assert " ".join(first) == "[b]broken its record is unreadable" and second[:2] == ["m", "r1"]
    assert [row["is_readable"] for row in json.loads(_json(hearth))] == [False, True]
    assert "is unreadable" in hearth("model", "show", "[b]broken").stderr
    text(hearth("model", "remove", "[b]broken"))
    assert [row[0] for row in rows(hearth)] == ["m"]


@in_one_test(
    ("arguments", "words"),
    [
        (["add", "a b", "org/x"], "invalid model 'a b'"),
        (["add", "n", "org/x", "--revision", "a b"], "invalid revision 'a b'"),
        (["add", "n", ""], "invalid source ''"),
        (["add", "n", "shared"], "shared has no config.json: expected a checkpoint directory"),
        (["add", "n", "README.md"], "README.md is a file"),
        (["add", "n", "org/x", "--alias", "n"], "the alias 'n' is the model's own name"),
        (["add", "n", "org/x", "--alias", "a b"], "invalid alias 'a b'"),
        (["add", "n", "org/x", "--tenant", "nobody"], "tenant 'nobody' does not exist"),
        (["add", "n", "org/x", "--tenant", "all", "--tenant", "b"], "--tenant all allows every"),
        (["add", "n", "org/x", "--max-context", "many"], "--max-context 'many' is neither"),
        (["add", "n", "org/x", "--weights", "half"], "invalid weights 'half' of 'n'"),
        (["add", "n", "org/x", "--kv-dtype", "int8"], "invalid kv_dtype 'int8' of 'n'"),
        (["add", "n", "org/x", "--priority", "101"], "invalid priority 101 of 'n'"),
        (["add", "n", "org/x", "--canary", "5"], "the model 'n' does not exist yet"),
        (["add", "m", "org/x", "--canary", "100"], "a canary of 100 % is not between 0 and 100"),
        (["add", "m", "org/x", "--revision", "r1"], "has a revision 'r1' already"),
        (["set", "m"], "no setting is given"),
        (["set", "n", "--priority", "1"], "the catalogue has no model 'n'"),
        (["show", "n"], "the catalogue has no model 'n'"),
        (["remove", "n"], "the catalogue has no model 'n'"),
        (["remove", "m", "--revision", "r1"], "'r1' is the only revision of 'm'"),
        (["promote", "m", "r9"], "the model 'm' has no revision 'r9': it has r1"),
        (["promote", "m", "r1", "--keep", "--canary", "5"], "--keep is for a complete promotion"),
        (["pin", "n"], "the catalogue has no model 'n'"),
        (["unpin", "n"], "the catalogue has no model 'n'"),
    ],
)
def test_invalid_arguments_are_rejected(
    hearth: Hearth, redis_server: RedisServer, arguments: list[str], words: str
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(REGISTRY, "m", RECORD)
        result = hearth("model", *arguments)
        assert client.hgetall(REGISTRY) == {b"m": RECORD}
        assert set(client.keys()) <= {REGISTRY.encode(), AUDIT.encode()}
    assert result.returncode == 2 and result.stdout == ""
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_redis_away_is_one_line(tmp_path: Path) -> None:
    url = "redis://127.0.0.1:1/0"
    result = call_hearth(("model", "list", "--redis-url", url), environ_for(tmp_path))
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1
    assert "Redis does not answer" in result.stderr


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path, (("observer", "observer-1"), ("host", "host-1")))
    yield server
    server.stop()


async def test_list_shows_states_on_hosts(
    hearth: Hearth, redis_server: RedisServer, nats: NatsServer
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(REGISTRY, "m", RECORD)
    await record_digest(redis_server.url, "m", "r1", "d1")
    models = (hosted("m", "d1", "hot"), hosted("m", "other", "standby"))
    assert await beside_host(nats, models, lambda: states(hearth, nats)) == [("hot", "host-1")]


async def test_operators_see_why_a_host_cannot_serve_a_model(
    hearth: Hearth, nats: NatsServer, redis_server: RedisServer
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(REGISTRY, "m", RECORD)
    failed = hosted("m", "r1", "failed", failure="no config.json in /x", public_failure="it is not")
    show = ("model", "show", "m", "--nats-url", nats.url("observer-1"))
    assert "no config.json in /x" in await beside_host(nats, (failed,), lambda: text(hearth(*show)))


async def beside_host(
    nats: NatsServer, models: tuple[HostedModel, ...], command: Callable[[], T]
) -> T:
    """Runs the command while a host with these models sends heartbeats."""
    running = asyncio.create_task(asyncio.to_thread(command))
    bus = await NatsBus.connect(nats.url("host-1"), process_id="host-1")
    try:
        async with asyncio.timeout(LIMIT_S):
            for number in itertools.count():
                beat = host_heartbeat("host-1", *models, number=number, region="")
                await bus.publish(heartbeat(("host",), "host-1"), beat)
                done, _ = await asyncio.wait({running}, timeout=HEARTBEAT_INTERVAL_S / 5)
                if done:
                    break
    finally:
        await bus.close()
    return await running


def states(hearth: Hearth, nats: NatsServer) -> list[tuple[str, str]]:
    """Of the only model; the last line, as the bus also logs here."""
    listed = text(hearth("model", "list", "--json", "--nats-url", nats.url("observer-1")))
    ((revision,),) = (row["revisions"] for row in json.loads(listed.splitlines()[-1]))
    return [(each["state"], each["host_id"]) for each in revision["states"]]


def test_list_without_heartbeats_has_no_states(
    hearth: Hearth, redis_server: RedisServer, nats: NatsServer
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(REGISTRY, "m", RECORD)
    assert states(hearth, nats) == []
    nats.stop()
    assert states(hearth, nats) == []


def test_states_are_grouped_in_the_table() -> None:
    def view(host_id: str, state: str) -> ModelView:
        return ModelView(
            name="m", revision="d", state=state, host_id=host_id, device="cpu", host_state="ready"
        )

    model = RegisteredModel(name="m", revisions=(RegisteredRevision(name="r1", source="/x"),))
    live = [view("host-1", "hot"), view("host-2", "standby"), view("host-3", "standby")]
    for named, shown in (("d", "hot on host-1, standby on host-2 and host-3"), ("other", "-")):
        revision = msgspec.structs.replace(model.revisions[0], digest=named)
        row = msgspec.structs.replace(model, revisions=(revision,))
        console = text_console(width=250)
        with console.capture() as captured:
            console.print(table_of_registry(RegistryView({"m": row}, [], live)))
        assert captured.get().splitlines()[-1].rstrip().endswith(f"no      {shown}")
