"""Three linked sites in three regions, each `hearth up` with the demo model: what a tenant may not
leave elsewhere is on no link, and in no Redis, log, span or file of the other sites.

    a (fr) ◀──relay── b (de)     Each relay records what crosses a link. The same search finds a
      ▲ ◀──relay── c (us) ──relay──▶ b     tenant without bounds, and leaks that are planted.

A tenant whose class has both fr and de leaves KV at b, and a knows of it; c does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest

from services.local.state_home import state_home
from shared.block_hash import extend_chain, root_hash, root_key
from shared.clock import MonotonicClock
from shared.errors import ConfigError
from shared.messages import FINGERPRINT_BYTES, ModelCard
from shared.packing import pack_token_ids
from shared.sites.prefix_fingerprints import PrefixFingerprints, pack_fingerprints
from shared.store import RedisStore
from shared.subjects import at_site, control, sent_by
from shared.tenancy.deletion import kv_drops
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.telemetry.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.canaries.canary import Canary
from tests.support.canaries.redis_data import redis_data
from tests.support.canaries.search import CanarySearch
from tests.support.cluster.hearth_up import Cluster, run_cluster
from tests.support.nats_clients import connect_ordered
from tests.support.recording_relay import RecordingRelay, relay_to
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import until

pytestmark = pytest.mark.long
REGIONS = {"a": "fr", "b": "de", "c": "us"}
CLASSES = ("--class", "eu=fr,de", "--class", "home=fr")
# Tenants of site a: by a class, by allowed regions that are those of one, one without bounds, and
# one whose class has another site.
CLASSED, ALLOWED, FREE, SPREAD = "classed", "allowed", "free", "spread"
LIMITS = {
    CLASSED: {"region_class": "home"},
    ALLOWED: {"allowed_regions": ("fr",)},
    FREE: {},
    SPREAD: {"region_class": "eu"},
}
BOUND = (CLASSED, ALLOWED)
NUM_REQUESTS = 4  # of each tenant
LIMIT_S = 120.0
WITHDRAWN_S = 5.0  # two heartbeats and the link's delay, on a busy machine
RANDOM = Random(46)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
DIGEST_OF_CLASS = b"hearth.v1.in.eu.site.a.scheduler.any.-.digest."


@dataclass
class Sites:
    """The clusters by site, their folders, and the relays by the pair of sites."""

    folder: Path
    receiver: OtlpReceiver
    clusters: dict[str, Cluster] = field(default_factory=dict)
    relays: dict[str, RecordingRelay] = field(default_factory=dict)
    canaries: list[Canary] = field(default_factory=list)

    async def card(self) -> ModelCard:
        def of_worker() -> ModelCard:
            found = self.clusters["a"].wait_for_heartbeats(
                lambda beats: any(each.model is not None for each in beats.values())
            )
            return next(each.model for each in found.values() if each.model is not None)

        return await asyncio.to_thread(of_worker)

    async def ask(self, site: str, tenant_id: str, card: ModelCard) -> tuple[int, str]:
        """Sends a new secret of a tenant; returns the status, and the worker or the error code."""
        content = secret_text(120)
        self.canaries.append(await self._canary_of(tenant_id, content, card))
        answer = await self.chat(site, tenant_id, card, content)
        found = answer.json()
        if answer.status_code != 200:
            return answer.status_code, found["error"]["code"]
        return 200, found["hearth"]["decode_worker"]

    async def chat(
        self, site: str, tenant_id: str, card: ModelCard, content: str
    ) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": card.name, "messages": messages, "max_tokens": 8, "temperature": 0}
        async with httpx.AsyncClient(
            base_url=self.clusters[site].url,
            headers={"authorization": f"Bearer key of {tenant_id}"},
            timeout=LIMIT_S,
            trust_env=False,
        ) as client:
            return await client.post("/v1/chat/completions", json=body)

    async def fingerprints_of(self, tenant_id: str, content: str, card: ModelCard) -> bytes:
        """Returns what a digest says of a prompt of site a."""
        messages = [{"role": "user", "content": content}]
        prompt = await self._tokens(model=card.name, messages=messages)
        root = root_hash(tenant_id, card.revision, key=root_key(secret_of("a")))
        hashes = b"".join(extend_chain(root, prompt, card.block_size))
        named = PrefixFingerprints(root, hashes, card.block_size)
        return pack_fingerprints(map(named.at, range(len(named))))

    async def _canary_of(self, tenant_id: str, content: str, card: ModelCard) -> Canary:
        messages = [{"role": "user", "content": content}]
        prompt = await self._tokens(model=card.name, messages=messages)
        root = root_hash(tenant_id, card.revision, key=root_key(secret_of("a")))
        roots = [root]
        for site in ("b", "c"):
            key = root_key(secret_of(site))
            name = at_site("a", tenant_id)
            roots.append(root_hash(name, card.revision, cache_salt=root.hex(), key=key))
        hashes = [each for own in roots for each in extend_chain(own, prompt, card.block_size)]
        # the first block is that of the template, the same for all, but its hash is the tenant's
        own = await self._tokens(model=card.name, prompt=content, add_special_tokens=False)
        return Canary(
            tenant_id=tenant_id,
            texts=(content,),
            token_ids=(own,),
            block_hashes=tuple(hashes),
        )

    async def _tokens(self, **body: object) -> list[int]:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            key = self.clusters["a"].state.api_key
            headers = {"authorization": f"Bearer {key}"}
            url = f"{self.clusters['a'].url}/tokenize"
            answer = await client.post(url, json=body, headers=headers)
        return list(answer.raise_for_status().json()["tokens"])

    async def found(self, place: str) -> dict[str, set[str]]:
        """Returns the forms in which each tenant is found in a place."""
        search, seen = CanarySearch(self.canaries), dict[str, set[str]]()
        for data in await self.data(place):
            for each in search.find(data):
                seen.setdefault(each.tenant_id, set()).add(each.form)
        return seen

    async def data(self, place: str) -> list[bytes]:
        kind, _, site = place.partition(" ")
        match kind:
            case "link":
                return [self.relays[site].recorded]
            case "redis":
                return [await redis_data(self.clusters[site].state.redis_url)]
            case "files":  # logs as well
                folder = self.folder / site
                return [each.read_bytes() for each in folder.rglob("*") if each.is_file()]
            case "spans":
                return [span.SerializeToString() for _, span in list(self.receiver.spans)]
            case _:
                raise ValueError(place)

    def store(self, site: str) -> RedisStore:
        url = self.clusters[site].state.redis_url
        return RedisStore(url, MonotonicClock(), timeout_s=LIMIT_S)


LINKS = ("link ab", "link ac", "link bc")
ELSEWHERE = (*LINKS, "redis b", "redis c", "files b", "files c", "spans")


def secret_text(length: int) -> str:
    return "".join(RANDOM.choice(LETTERS) for _ in range(length))


def secret_of(site: str) -> str:
    return f"the secret of site {site}" * 2


@contextlib.contextmanager
def running(sites: Sites, site: str, *options: str) -> Iterator[Cluster]:
    """`hearth up` of one site. All sites find the keys of their links in one folder."""
    home = sites.folder / site
    links = home / "hearth" / "links"
    links.parent.mkdir(parents=True)
    links.symlink_to(sites.folder / "links")
    region = REGIONS[site]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEARTH_CLUSTER_SECRET", secret_of(site))
        patch.setenv("XDG_STATE_HOME", str(home))
        assert state_home() == home
        options = ("--site", site, "--region", region, *CLASSES, "--both", "1", *options)
        with run_cluster(home, *options) as cluster:
            yield cluster


@asynccontextmanager
async def three_sites(folder: Path, receiver: OtlpReceiver) -> AsyncIterator[Sites]:
    (folder / "links").mkdir()
    sites, ports = Sites(folder, receiver), {each: free_port() for each in REGIONS}
    async with AsyncExitStack() as stack:
        addresses = {}
        for pair in ("ab", "ac", "bc"):
            sites.relays[pair], port = await stack.enter_async_context(relay_to(ports[pair[0]]))
            addresses[pair] = f"127.0.0.1:{port}"
        links = {
            "a": ("--link", "b@de", "--link", "c@us"),
            "b": ("--link", f"a@fr={addresses['ab']}", "--link", "c@us"),
            "c": ("--link", f"a@fr={addresses['ac']}", "--link", f"b@de={addresses['bc']}"),
        }
        for site in REGIONS:
            redis = RedisServer()  # the users of its own one may not list the keys
            stack.callback(redis.stop)
            arguments = (*links[site], "--link-port", str(ports[site]), "--redis", redis.url)
            started = running(sites, site, *arguments)
            sites.clusters[site] = await asyncio.to_thread(started.__enter__)
            stack.push_async_callback(asyncio.to_thread, started.__exit__, None, None, None)
        yield sites


async def test_bound_tenants_stay_in_their_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        async with three_sites(tmp_path, receiver) as sites:
            await _add_tenants(sites)
            card = await sites.card()
            await _served_at_home(sites, card)
            pid = await asyncio.to_thread(sites.clusters["a"].pid_of, "worker-1")
            with sites.clusters["a"].frozen(pid):
                await _served_elsewhere(sites, card)
                named = await _cached_in_its_class(sites, card)
            await _nothing_elsewhere(sites)
            await _refused_elsewhere(sites, card)
            await _refused_by_commands(sites)
            await _withdrawn(sites)
            await _nothing_elsewhere(sites, FREE, places=("redis b", "redis c"))
            await _withdrawn_silently(sites, named)
            await _planted_leaks_are_found(sites, named)


async def _add_tenants(sites: Sites) -> None:
    """Sites b and c have tenants of the same names, whose clients call the wrong region."""
    for site in REGIONS:
        store = sites.store(site)
        admin = TenantAdmin(store, lambda: 1.0)
        for name in LIMITS if site == "a" else (CLASSED,):
            await admin.add(name, LIMITS[name], f"key of {name}")
        await store.close()


async def _served_at_home(sites: Sites, card: ModelCard) -> None:
    asked = [sites.ask("a", name, card) for name in LIMITS for _ in range(NUM_REQUESTS)]
    served = await asyncio.gather(*asked)
    assert {status for status, _ in served} == {200}, served
    assert {where for _, where in served[: len(BOUND) * NUM_REQUESTS]} == {"worker-1"}
    home = await until(lambda: _all_found(sites, "redis a"))
    assert all("block hash, hexadecimal" in home[name] for name in LIMITS), "the search finds them"


async def _all_found(sites: Sites, place: str) -> dict[str, set[str]]:
    found = await sites.found(place)
    return found if set(found) >= set(LIMITS) else {}


async def _served_elsewhere(sites: Sites, card: ModelCard) -> None:
    """Without a worker at home: bound tenants get an error, the other one goes over a link."""

    async def free_leaves() -> bool:
        _, where = await sites.ask("a", FREE, card)
        return where[:2] in ("b/", "c/")

    await until(free_leaves)
    for name in BOUND:
        status, code = await sites.ask("a", name, card)
        assert (status, code) == (503, "no_capacity")
    for _ in range(NUM_REQUESTS):
        assert (await sites.ask("a", FREE, card))[1][:2] in ("b/", "c/")
    crossed = [await sites.found(each) for each in ("link ab", "link ac")]
    forms = set().union(*(each.get(FREE, set()) for each in crossed))
    assert {"token ids, packed", "block hash"} <= forms, "the search finds what may cross"


async def _cached_in_its_class(sites: Sites, card: ModelCard) -> bytes:
    """Without a worker at home: site b has the prompt for the next turn, site a knows it, and
    nobody else. Returns the prompt's fingerprints.
    """
    content = secret_text(1000)
    sites.canaries.append(await sites._canary_of(SPREAD, content, card))
    named = await sites.fingerprints_of(SPREAD, content, card)
    assert len(named) >= 2 * FINGERPRINT_BYTES
    first = (await sites.chat("a", SPREAD, card, content)).json()
    assert first["hearth"]["decode_worker"].startswith("b/")

    async def is_reported() -> bool:
        return named in sites.relays["ab"].recorded

    await until(is_reported)
    assert DIGEST_OF_CLASS in sites.relays["ab"].recorded
    again = (await sites.chat("a", SPREAD, card, content)).json()
    assert again["hearth"]["decode_worker"].startswith("b/")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for each in ("ac", "bc"):
        recorded = sites.relays[each].recorded
        assert named[: 2 * FINGERPRINT_BYTES] not in recorded and b".in.eu." not in recorded
    await _nothing_elsewhere(sites, SPREAD, places=("link ac", "link bc", "redis c", "files c"))
    return named


async def _withdrawn_silently(sites: Sites, named: bytes) -> None:
    """The tenant leaves site b: its KV goes, and no digest says what there was."""
    relay, store = sites.relays["ab"], sites.store("a")
    mark = relay.mark()
    await TenantAdmin(store, time.time).change(SPREAD, LIMITS[CLASSED])
    await store.close()
    await until(lambda: DIGEST_OF_CLASS in relay.since(mark))
    store = sites.store("b")

    async def is_dropped() -> bool:
        found = [each for each in await kv_drops.orders(store) if each.is_finished]
        return at_site("a", SPREAD) in {each.drop.tenant_id for each in found}

    await until(is_dropped)
    await store.close()
    words = {named[at : at + FINGERPRINT_BYTES] for at in range(0, len(named), FINGERPRINT_BYTES)}
    assert not [each for each in words if each in relay.since(mark)]
    await _nothing_elsewhere(sites, SPREAD, places=("redis b", "redis c"))


async def _nothing_elsewhere(
    sites: Sites, *names: str, places: tuple[str, ...] = ELSEWHERE
) -> None:
    assert sites.receiver.spans
    for place in places:
        found = await sites.found(place)
        assert not found.keys() & set(names or BOUND), (place, found)
        if place.partition(" ")[0] in ("spans", "files"):
            assert not found, (place, found)


async def _refused_elsewhere(sites: Sites, card: ModelCard) -> None:
    """The gateway of site c refuses, counts and has it audited."""
    status, code = await sites.ask("c", CLASSED, card)
    assert (status, code) == (403, "no_region_allowed")
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:

        async def is_counted() -> bool:
            metrics = (await client.get(f"{sites.clusters['c'].url}/metrics")).text
            lines = [each for each in metrics.splitlines() if 'check="gateway"' in each]
            own = [each for each in lines if each.startswith("hearth_residency_refusals_total")]
            return sum(float(each.rpartition(" ")[2]) for each in own) >= 1

        await until(is_counted)

    async def is_audited() -> bool:
        lines = await redis_data(sites.clusters["c"].state.redis_url, "hearth:audit:refusals")
        return CLASSED.encode() in lines

    await until(is_audited)
    await _nothing_elsewhere(sites)


async def _refused_by_commands(sites: Sites) -> None:
    """Site a is linked, and no class has these regions."""
    store = sites.store("a")
    with pytest.raises(ConfigError, match="declare a class"):
        await TenantAdmin(store, time.time).add("unnamed", {"allowed_regions": ("de",)}, "key")
    await store.close()


async def _withdrawn(sites: Sites) -> None:
    """The tenant that may be everywhere is bound to home: other sites drop what they have."""
    held = [await sites.found(each) for each in ("redis b", "redis c")]
    assert any(FREE in each for each in held)
    store = sites.store("a")
    began = time.time()
    await TenantAdmin(store, time.time).change(FREE, LIMITS[CLASSED])
    await store.close()
    for site in ("b", "c"):
        store = sites.store(site)

        async def dropped_at(store: RedisStore = store) -> float | None:
            found = await kv_drops.orders(store)
            own = [each for each in found if each.drop.tenant_id == at_site("a", FREE)]
            ends = [each.progress.finished_at for each in own if each.progress is not None]
            return ends[0] if ends else None

        ended = await until(dropped_at)
        print(f"site {site} has dropped it {ended - began:.2f} s after the command")
        assert ended - began < WITHDRAWN_S
        url = sites.clusters[site].state.redis_url
        lines = await redis_data(url, "hearth:audit:deletions")
        assert at_site("a", FREE).encode() in lines
        await store.close()


async def _planted_leaks_are_found(sites: Sites, named: bytes) -> None:
    canary = next(each for each in sites.canaries if each.tenant_id == CLASSED)
    text, tokens = canary.texts[0].encode(), pack_token_ids(canary.token_ids[0])
    store = sites.store("c")
    hexadecimal = canary.block_hashes[0].hex()
    await store.write([("SET", f"planted:{hexadecimal}", "1"), ("SET", "planted", tokens)])
    await store.close()
    (sites.folder / "c" / "planted.log").write_bytes(b'{"prompt": "' + text + b'"}\n')
    gateway = next(each for each in sites.clusters["a"].state.credentials if each.role == "gateway")
    url = sites.clusters["a"].state.nats_url_of("gateway")
    assert url is not None
    peer = await connect_ordered(url)
    subject = sent_by(control("decode", at_site("c", gateway.process_id)), gateway.process_id)
    await peer.publish(subject, text)
    await peer.publish(subject, named)
    await peer.flush()
    await peer.close()
    await until(lambda: _finds(sites, "link ac", "text"))
    await until(lambda: named in sites.relays["ac"].recorded)
    assert (await sites.found("redis c"))[CLASSED] == {
        "block hash, hexadecimal",
        "token ids, packed",
    }
    assert (await sites.found("files c"))[CLASSED] == {"text"}


async def _finds(sites: Sites, place: str, form: str) -> bool:
    return form in (await sites.found(place)).get(CLASSED, set())
