"""Links between sites on real nats-servers with TLS: what crosses them, and what does not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.cli.cluster.site_links import local_links, seed_variable, site_links
from services.local.credentials import named_credentials, nats_config_with_nkeys
from shared import subjects
from shared.errors import ConfigError, DependencyUnavailable, SenderMismatch
from shared.messages import Failure, PrefillAccepted, PrefillFailed, PrefixDigest, Role, RunPrefill
from shared.regions.region_classes import region_classes
from shared.subjects import CredentialRole, in_class, permissions
from shared.transport.bus import NatsBus
from shared.transport.nkeys import UserKey
from tests.support.certificates import Authority
from tests.support.nats_clients import connect_ordered
from tests.support.servers import Server, find_binary, free_port
from tests.support.waiting import LIMIT_S, until
from tests.support.world.site_prefills import run_prefill_of_site

PROCESSES = ["gateway=gw", "scheduler=sch", "worker=w", "operator=op", "host=h", "kv_index=ix"]
TO_B = "hearth.v1.site.b.decode.gw.-.control.sch.-"
TO_C = TO_B.replace(".b.", ".c.")
AT_B = "hearth.v1.linked.a.decode.gw.-.control.sch.-"
TO_A, FROM_B = TO_B.replace(".b.", ".a."), AT_B.replace(".a.", ".b.")
FOR_GATEWAYS = ("models", "tenants", "tokens")  # what may cross a link to a gateway


class Site:
    """A nats-server with a user `spy` among the processes, who may do everything."""

    def __init__(self, folder: Path, name: str, links: Sequence[str], *, port: int) -> None:
        self.seeds, self.port = folder, free_port()
        named = site_links(
            name, links, seeds=folder, host="127.0.0.1", port=port, tls=str(folder / "tls")
        )
        text = nats_config_with_nkeys(
            named_credentials(PROCESSES), folder / name, host="127.0.0.1", port=self.port,
            links=named, classes=region_classes(["k=eu"]),
        )  # fmt: skip
        spied = text.replace(
            "  HEARTH {users: [\n", '  HEARTH {users: [\n{user: "spy", password: "spy"}\n', 1
        )
        assert spied != text
        seeds = {
            seed_variable(each.peer): (folder / f"link-{name}@{each.peer}.nk").read_text().strip()
            for each in named.links
            if each.address
        }
        self.server = started(folder / f"{name}.conf", spied, self.port, seeds)


def started(path: Path, text: str, port: int, seeds: Mapping[str, str]) -> Server:
    path.write_text(text)
    return Server([find_binary("nats-server"), "-c", str(path)], port, {**os.environ, **seeds})


class Spy:
    """A client of one account that records all that it receives."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.received: list[Msg] = []

    @property
    def subjects(self) -> list[str]:
        return [each.subject for each in self.received]

    async def take(self, message: Msg) -> None:
        self.received.append(message)

    async def publish(self, *subjects: str) -> None:
        for each in subjects:
            await self.client.publish(each, b"-")
        await self.client.flush()


@contextlib.asynccontextmanager
async def spy(port: int, user: str = "spy") -> AsyncIterator[Spy]:
    client = await connect_ordered(f"nats://{user}:{user}@127.0.0.1:{port}")
    try:
        made = Spy(client)
        await client.subscribe("hearth.>", cb=made.take)
        await client.flush()
        yield made
    finally:
        await client.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sites")
    Authority(made / "tls").issue("server")
    return made


@pytest.fixture(scope="module")
def leaf_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def sites(folder: Path, leaf_port: int) -> Iterator[dict[str, Site]]:
    """A ring: b and c connect to a, and c to b."""
    to_a, port = f"a@eu=localhost:{leaf_port}", free_port()
    made = {
        "a": Site(folder, "a", ["b@eu", "c"], port=leaf_port),
        "b": Site(folder, "b", [to_a, "c"], port=port),
        "c": Site(folder, "c", [to_a, f"b=localhost:{port}"], port=free_port()),
    }
    yield made
    for each in made.values():
        each.server.stop()


async def linked(near: Spy, far: Spy, subject: str, seen_as: str) -> None:
    """Returns when the link has let one message through, and forgets all messages so far. The
    peer knows by then what is subscribed to at `near`: the link keeps the order.
    """

    async def crosses() -> bool:
        await near.publish(subject)
        return seen_as in far.subjects

    await until(crosses)
    await near.publish(f"{subject[:-1]}last")
    await until(lambda: f"{seen_as[:-1]}last" in far.subjects)
    near.received.clear()
    far.received.clear()


async def test_sites_reach_those_they_are_linked_to_and_no_third(sites: dict[str, Site]) -> None:
    async with spy(sites["a"].port) as a, spy(sites["b"].port) as b, spy(sites["c"].port) as c:
        await linked(a, b, TO_B, AT_B)
        from_b, from_c = AT_B.replace(".a.", ".b."), AT_B.replace(".a.", ".c.")
        await linked(a, c, TO_C, AT_B)
        await linked(b, c, TO_C, from_b)
        await linked(c, b, TO_B, from_c)
        for each in (a, b, c):
            each.received.clear()
        await a.publish("hearth.v1.site.any.gateway.gw.-.state.gw.-", TO_B)
        await until(lambda: AT_B in b.subjects and c.subjects)
        await b.publish(AT_B, from_c, TO_C)  # what arrived from a, as if it came from c, and to c
        await until(lambda: from_b in c.subjects)
        await c.publish(TO_B)
        await until(lambda: b.subjects.count(from_c) == 2)
        state = "hearth.v1.linked.a.gateway.gw.-.state.eu.gw.-"
        assert c.subjects == [state, from_b, TO_B], "a ring doubles nothing"
        sent = [AT_B, from_c, TO_C]
        assert b.subjects == [state, AT_B, *sent, from_c], "the region is that of b's link"
        await b.publish(TO_B.replace(".b.", ".a."))
        await until(lambda: from_b in a.subjects)
        assert a.subjects[2:] == [from_b]


async def test_class_crosses_to_sites_of_its_regions_alone(sites: dict[str, Site]) -> None:
    """The class is that of `eu`, where b is. Nobody names a region for c."""
    start_b, start_c, arrived = (each.replace("control", "start") for each in (TO_B, TO_C, AT_B))
    to_a, from_c = TO_B.replace(".b.", ".a."), AT_B.replace(".a.", ".c.")
    digests = [f"hearth.v1.site.{each}.scheduler.any.-.digest.gw.-" for each in "bc"]
    digest_arrived = "hearth.v1.linked.a.scheduler.any.-.digest.gw.-"
    async with spy(sites["a"].port) as a, spy(sites["b"].port) as b, spy(sites["c"].port) as c:
        await linked(a, b, TO_B, AT_B)
        await linked(a, c, TO_C, AT_B)
        await linked(c, a, to_a, from_c)
        for each in (a, b, c):
            each.received.clear()
        of_class = [in_class(each, "k") for each in (start_b, start_c, *digests, TO_B)]
        await a.publish(*of_class, in_class(start_b, "other"), TO_B, TO_C)
        await until(lambda: AT_B in b.subjects and AT_B in c.subjects)
        assert b.subjects == [*(in_class(each, "k") for each in (arrived, digest_arrived)), AT_B]
        assert c.subjects == [AT_B]
        a.received.clear()
        await c.publish(in_class(to_a.replace("control", "start"), "k"), to_a)
        await until(lambda: from_c in a.subjects)
        assert a.subjects == [from_c], "c names a region for a, and a none for c"


async def test_digest_reaches_every_scheduler_of_one_site(sites: dict[str, Site]) -> None:
    """With the permissions of the processes. Site c is linked to both."""
    gateway = await bus(sites["b"], "b", "gw")
    schedulers = [await bus(sites["a"], "a", "sch") for _ in range(2)]
    received: list[list[PrefixDigest]] = [[], []]
    for scheduler, taken in zip(schedulers, received, strict=True):
        digests = subjects.from_sites("scheduler", subjects.ANY, "digest")
        await scheduler.subscribe(digests, PrefixDigest, taken.append)
        await scheduler.flush()
    async with spy(sites["a"].port) as a, spy(sites["b"].port) as b, spy(sites["c"].port) as c:
        await linked(a, b, TO_B, AT_B)
        await linked(a, c, TO_B.replace(".b.", ".c."), AT_B)
        digest = PrefixDigest(gateway_id="b/gw", epoch=1, sequence_number=1, is_first=True)
        await gateway.publish(subjects.prefix_digest("a"), digest)
        await until(lambda: all(received))
        assert received == [[digest], [digest]]
        last = "hearth.v1.site.any.gateway.gw.-.state.gw.-"
        await a.publish(last)
        await until(lambda: c.subjects)
        assert [each for each in c.subjects if "digest" in each] == []
    for each in (gateway, *schedulers):
        await each.close()


async def test_request_is_answered_over_the_link(sites: dict[str, Site]) -> None:
    """With the permissions of the processes; without a link there is no responder."""
    gateway, scheduler = await bus(sites["b"], "b", "gw"), await bus(sites["a"], "a", "sch")

    async def answer(subject: str, reply: str, data: bytes, headers: bytes) -> None:
        await gateway.untyped.send(reply, data + subject.encode())

    start = subjects.from_anyone(subjects.from_sites("decode", "gw", "start"))
    await gateway.untyped.listen(start, answer)
    await gateway.flush()
    async with spy(sites["a"].port) as a, spy(sites["b"].port) as b:
        await linked(b, a, TO_A, FROM_B)
    to, client = subjects.sent_by(subjects.start_decode("b/gw"), "sch"), scheduler._client
    reply = await client.request(to, b"x ", timeout=LIMIT_S)
    assert reply.data == b"x hearth.v1.linked.a.decode.gw.-.start.sch.-"
    with pytest.raises(nats.errors.NoRespondersError):
        await client.request(to.replace(".b.", ".d."), b"x", timeout=LIMIT_S)
    await gateway.close()
    await scheduler.close()


async def test_prefill_crosses_a_link_and_its_end_comes_back(sites: dict[str, Site]) -> None:
    """With the permissions of a worker there, and of a gateway here."""
    gateway, worker = await bus(sites["b"], "b", "gw"), await bus(sites["a"], "a", "w")
    ended: list[PrefillFailed] = []
    control = subjects.from_sites("decode", "w", "control")
    await worker.subscribe(control, PrefillFailed, ended.append)

    async def run(command: RunPrefill) -> PrefillAccepted:
        failed = PrefillFailed(
            placement_id=command.placement_id,
            prefill_worker_id="b/gw/00ff",
            failure=Failure(code="worker_busy", message="lost"),
        )
        await gateway.publish(subjects.control("decode", command.decode_worker_id), failed)
        return PrefillAccepted(placement_id=command.placement_id)

    await gateway.serve(subjects.from_sites("prefill", "gw", "run"), RunPrefill, run)
    await gateway.flush()
    await worker.flush()
    async with spy(sites["a"].port) as a, spy(sites["b"].port) as b:
        await linked(a, b, TO_B, AT_B)
        await linked(b, a, TO_A, FROM_B)
    command, subject = run_prefill_of_site("a"), subjects.run_prefill("b/gw/00ff")
    with pytest.raises(SenderMismatch, match="a/w sent a RunPrefill that names a/decode-1"):
        await worker.request(subject, command, PrefillAccepted, timeout_s=LIMIT_S)
    own = msgspec.structs.replace(command, decode_worker_id="a/w")
    await worker.request(subject, own, PrefillAccepted, timeout_s=LIMIT_S)
    await until(lambda: ended)
    await gateway.close()
    await worker.close()


async def bus(
    site: Site, name: str, process: str, seed: str = "", timeout_s: float = LIMIT_S
) -> NatsBus:
    path = site.seeds / (seed or f"{name}/{process}.nk")
    url = f"nats://{process}@127.0.0.1:{site.port}?seed={path}"
    return await NatsBus.connect(url, process_id=process, timeout_s=timeout_s)


async def test_key_of_a_link_is_no_key_of_a_client(sites: dict[str, Site]) -> None:
    with pytest.raises(DependencyUnavailable, match="cannot reach NATS"):
        await bus(sites["a"], "a", "gw", seed="link-b@a.nk", timeout_s=2)


def denied_subjects() -> list[str]:
    """Every subject that a process may publish or receive, but those of b's link to a."""
    found = set()
    for role in get_args(CredentialRole):
        for credential in ("gw", "other"):
            allowed = permissions(role, credential, "eu", is_linked=True)
            found |= {*allowed.publish, *allowed.subscribe}
    filled = {each.replace("*", "x").replace(">", "x") for each in found}
    more = {
        f"hearth.v1.{way}.{site}.gateway.gw.-.{verb}.w.-"
        for way in ("site", "linked")
        for site in "abcdh"
        for verb in FOR_GATEWAYS
    }
    more |= {"hearth.v1.site.a.gateway.gw.-.fleet.x.-", "hearth.v1.site.b.gateway.gw.-.fleet.x.-"}
    more |= {f"hearth.v1.linked.{site}.scheduler.any.-.digest.gw.-" for site in "abcdh"}
    more |= {
        in_class(f"hearth.v1.{way}.{site}.{role}.gw.-.{verb}.w.-", name)
        for way in ("site", "linked")
        for site in "abh"
        for role, verb in local_commands(filled)
        for name in ("", "k", "other")
    }
    more |= {in_class(each, name) for each in filled for name in ("k", "other")}
    more |= {f"hearth.v1.site.{site}.scheduler.any.-.digest.gw.-" for site in "cx"}
    return sorted(each for each in filled | more if each.startswith("hearth."))


def local_commands(subjects_of_processes: Iterable[str]) -> set[tuple[str, str]]:
    """Role and verb of all that one process of a site sends to another, and that crosses no link,
    such as receipts, images, and orders to drop what a worker holds of a tenant.
    """
    parts = [each.split(".") for each in subjects_of_processes if each.startswith("hearth.v1.")]
    every = (each for each in parts if len(each) in (8, 9) and each[2] in get_args(Role))
    found = {(each[2], each[5]) for each in every if each[5] != "x"}
    found.difference_update(subjects.LINKED_COMMANDS)
    named = {("gateway", "receipt"), ("encode", "encode"), ("gateway", "pixels")}
    assert found >= named | {("prefill", "tenant_kv"), ("decode", "heartbeat")}
    return found


@contextlib.asynccontextmanager
async def hostile(folder: Path, leafnodes: str, users: str = "") -> AsyncIterator[Spy]:
    """A peer whose account of the link exports and imports nothing: its clients are on the link."""
    port = free_port()
    text = (
        f'listen: "127.0.0.1:{port}"\n'
        f'accounts {{X {{users: [{{user: "spy", password: "spy"}}\n{users}]}}}}\n'
        f"leafnodes {{{leafnodes}}}\n"
    )
    server = started(folder / "hostile.conf", text, port, {})
    try:
        async with spy(port) as made:
            yield made
    finally:
        server.stop()


def files(folder: Path) -> str:
    names = ("cert_file", "server.crt"), ("key_file", "server.key"), ("ca_file", "ca.crt")
    return ", ".join(f'{name}: "{folder / "tls" / file}"' for name, file in names)


async def test_hostile_peer_that_connects_reaches_nothing_else(
    sites: dict[str, Site], folder: Path, leaf_port: int
) -> None:
    """It has the key of site b, and sends and reads all subjects there are."""
    seed = (folder / "link-b@a.nk").read_text().strip()
    remote = (
        f'remotes: [{{url: "tls://localhost:{leaf_port}", nkey: {seed}, '
        f"account: X, tls: {{{files(folder)}}}}}]"
    )
    async with (
        spy(sites["a"].port) as a,
        spy(sites["c"].port) as c,
        hostile(folder, remote) as peer,
    ):
        await refuses_all(a, peer, c, name="a", other="b")


async def test_hostile_peer_that_is_connected_to_reaches_nothing_else(folder: Path) -> None:
    """Site d connects to it."""
    port = free_port()
    key = site_links("h", ["d"], seeds=folder, host="h", port=1).links[0].key
    listen = f'listen: "127.0.0.1:{port}", tls: {{{files(folder)}, verify: true}}'
    async with hostile(folder, listen, users=f"{{nkey: {key}}}") as peer:
        site = Site(folder, "d", [f"h=localhost:{port}"], port=free_port())
        try:
            async with spy(site.port) as d:
                await refuses_all(d, peer, None, name="d", other="h")
        finally:
            site.server.stop()


async def refuses_all(own: Spy, peer: Spy, third: Spy | None, *, name: str, other: str) -> None:
    """`name` is the site of `own`, which knows the peer as `other`."""
    marker, seen = (
        f"site.{name}.decode.gw.-.control.sch.-",
        f"linked.{other}.decode.gw.-.control.sch.-",
    )
    await linked(peer, own, f"hearth.v1.{marker}", f"hearth.v1.{seen}")
    for verb in FOR_GATEWAYS:
        ended = [
            each.replace("decode.gw.-.control.sch", f"gateway.gw.-.{verb}.w")
            for each in (marker, seen)
        ]
        await linked(peer, own, f"hearth.v1.{ended[0]}", f"hearth.v1.{ended[1]}")
    if third is not None:
        third.received.clear()
    every = denied_subjects()
    await peer.publish(*every, f"hearth.v1.{marker}")
    await until(lambda: f"hearth.v1.{seen}" in own.subjects[-1:])
    may_arrive = [f"hearth.v1.linked.{other}.gateway.gw.-.{verb}.w.-" for verb in FOR_GATEWAYS]
    assert own.subjects == [*may_arrive, f"hearth.v1.{seen}"], "from the peer"
    if third is not None:
        sync = "decode.gw.-.control.sch.sync"
        await own.publish(f"hearth.v1.site.c.{sync}")
        await until(lambda: third.received)
        assert third.subjects == [f"hearth.v1.linked.{name}.{sync}"], "no site relays"
    peer.received.clear()
    end = f"hearth.v1.site.{other}.decode.gw.-.control.sch.-"
    await own.publish(*every, end)
    await until(lambda: end in peer.subjects[-1:])
    arrived = [each for each in peer.subjects if ".state." not in each]
    may_arrive = [f"hearth.v1.site.{other}.gateway.gw.-.{verb}.w.-" for verb in FOR_GATEWAYS]
    assert arrived == [*may_arrive, end]


def test_sites_of_one_user_share_the_keys_of_their_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="site 'a' creates this key"):
        local_links("b", ["a=h:1"], host="h", port=1)
    accepting = local_links("a", ["b"], host="h", port=1)
    opening = local_links("b", ["a=h:1"], host="h", port=1)
    (seed,) = opening["link_seeds"].values()
    assert UserKey.of_seed(seed).public == accepting["links"].links[0].key
    assert local_links("", [], host="h", port=1) == {}
    with pytest.raises(ConfigError, match="--site and --link belong together"):
        local_links("a", [], host="h", port=1)


@pytest.mark.parametrize(
    ("site", "links", "reason"),
    [
        ("a", ["a"], "site 'a' cannot have a link to itself"),
        ("a", ["b", "b@eu"], "two links to site 'b'"),
        ("a", ["b", "b=h:1"], "two links to site 'b'"),
        ("a", ["b=h"], "'b=h' is not PEER"),
        ("a", ["b=h:70000"], "'b=h:70000' is not PEER"),
        ("a", ['b=h" }:7'], "is not PEER"),
        ("a", ["e-1", "e_1"], "HEARTH_LINK_E_1_SEED would be the key of several links: 'e-1'"),
        ("a", ["b@e.u"], "region 'e.u' may have"),
        ("a.b", ["c"], "site 'a.b' may have"),
        ("any", ["c"], "cannot have the name 'any'"),
        ("c", ["b=h:1"], "site 'b' creates this key"),
    ],
)
def test_bad_links_are_one_clear_line(
    tmp_path: Path, site: str, links: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        site_links(site, links, seeds=tmp_path, host="h", port=1)
    assert "\n" not in caught.value.message
