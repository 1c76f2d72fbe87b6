"""Tenants of a whole cluster with two gateways: limits, keys, usage, and what is kept of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
import redis

from services.cli.service_options import DEMO_MODEL_NAME
from shared.messages import Heartbeat
from shared.packing import pack_token_ids
from shared.subjects import HEARTBEATS
from shared.transport.bus import NatsBus
from tests.chaos.world.cluster import ChaosCluster
from tests.services.cli.running import run_hearth

SERVICES = ("kv_index-1", "scheduler-1", "prefill-1", "decode-1")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT_S = 15.0


class Site:
    """The cluster, and an operator's hands."""

    def __init__(self, cluster: ChaosCluster, state_home: Path) -> None:
        self.cluster = cluster
        self._state_home = state_home

    def hearth(self, *arguments: str) -> str:
        url = ("--redis-url", self.cluster._redis_url)
        result = run_hearth(self._state_home, *arguments, *url)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def client(self, api_key: str, gateway: str = "gateway-1") -> httpx.Client:
        headers = {"Authorization": f"Bearer {api_key}"}
        url = self.cluster.urls[gateway]
        return httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)

    @property
    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.cluster._redis_url)


@contextlib.contextmanager
def running(folder: Path, services: Sequence[str], *, step_s: float | None) -> Iterator[Site]:
    cluster = ChaosCluster(folder, step_s=step_s, services=services)
    try:
        asyncio.run(cluster.start())
        yield Site(cluster, folder / "state")
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Everything is real but the engine, which keeps time and draws tokens by a formula."""
    services = (*SERVICES, "decode-2", "gateway-1", "gateway-2")
    with running(tmp_path_factory.mktemp("tenants"), services, step_s=0.005) as site:
        yield site


@pytest.fixture
def real_site(tmp_path: Path) -> Iterator[Site]:
    """The demo model, which logs what an engine logs."""
    with running(tmp_path, (*SERVICES, "gateway-1"), step_s=None) as site:
        yield site


def body(text: str = "What is a token?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": DEMO_MODEL_NAME, "messages": messages, "temperature": 0, **fields}


def until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < limit_s
        time.sleep(0.02)
    return time.monotonic() - began


def test_one_limit_for_both_gateways_and_a_change_that_both_follow(site: Site) -> None:
    key = site.hearth("tenant", "add", "shared", "--requests-per-min", "3")
    with site.client(key) as one, site.client(key, "gateway-2") as other:
        ask = {"json": body(max_tokens=4)}
        statuses = [gateway.post(CHAT, **ask).status_code for gateway in (one, other, one)]
        assert statuses == [200, 200, 200]
        for gateway in (one, other):
            refused = gateway.post(CHAT, **ask)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "requests_per_min_exceeded"
            assert 0 < int(refused.headers["retry-after"]) <= 20
        site.hearth("tenant", "limits", "shared", "--requests-per-min", "unlimited")
        until(lambda: other.post(CHAT, **ask).status_code == 200, 5)
        site.hearth("tenant", "limits", "shared", "--concurrency", "0")
        until(lambda: other.post(CHAT, **ask).status_code == 403, 5)


def test_rotation_without_a_failed_request_then_revocation(site: Site) -> None:
    old = site.hearth("tenant", "add", "turning")
    new = site.hearth("tenant", "rotate", "turning", "--keep-s", "600")
    keys = json.loads(site.hearth("tenant", "show", "turning", "--json"))["keys"]
    first, second = (each["key_id"] for each in keys)
    assert keys[0]["expires_at"] > keys[0]["created_at"] + 590
    for gateway in ("gateway-1", "gateway-2"):
        for key in (old, new):
            with site.client(key, gateway) as client:
                assert client.get("/v1/models").status_code == 200
    assert site.hearth("tenant", "revoke", "turning", "--key", first) == first
    with site.client(old) as with_old, site.client(new) as with_new:
        until(lambda: with_old.get("/v1/models").status_code == 401, 5)
        assert "revoked" in with_old.get("/v1/models").json()["error"]["message"]
        assert with_new.get("/v1/models").status_code == 200
    assert second not in site.cluster.log_of("gateway-1")


def test_usage_is_the_sum_of_what_clients_were_told_even_when_a_worker_dies(site: Site) -> None:
    key = site.hearth("tenant", "add", "metered")
    told: list[dict[str, Any]] = []
    for gateway in ("gateway-1", "gateway-2", "gateway-1"):
        with site.client(key, gateway) as client:
            told.append(client.post(CHAT, json=body(max_tokens=9)).json())
    with site.client(key) as client:
        fields = {"max_tokens": 300, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        with client.stream("POST", CHAT, json=body(**fields, **options)) as response:
            lines = response.iter_lines()
            next(lines)
            workers = [name for name in ("decode-1", "decode-2") if is_running(site, name)]
            site.cluster.kill(workers[0])
            chunks = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
        told.append(chunks[-1])
    asyncio.run(site.cluster.restart(workers[0]))
    assert told[-1]["hearth"]["num_resubmissions"] >= 1

    def row() -> dict[str, Any]:
        rows = json.loads(site.hearth("usage", "--tenant", "metered", "--days", "2", "--json"))
        return rows[0] if rows else {"requests": 0}

    until(lambda: row()["requests"] == len(told))
    usages = [each["usage"] for each in told]
    assert row()["input_tokens"] == sum(each["prompt_tokens"] for each in usages)
    assert row()["output_tokens"] == sum(each["completion_tokens"] for each in usages)
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usages]
    assert row()["cached_tokens"] == sum(cached)
    assert row()["model"] == DEMO_MODEL_NAME


def is_running(site: Site, worker_id: str) -> bool:
    return asyncio.run(_num_running(site)).get(worker_id, 0) > 0


async def _num_running(site: Site) -> dict[str, int]:
    """By decode worker, once one is busy."""
    running: dict[str, int] = {}

    def hear(beat: Heartbeat) -> None:
        if beat.load is not None and "decode" in beat.roles:
            running[beat.process_id] = beat.load.num_running

    bus = await NatsBus.connect(site.cluster.nats_url, process_id="monitor")
    await bus.subscribe(HEARTBEATS, Heartbeat, hear)
    async with asyncio.timeout(10):
        while len(running) < 2 or not any(running.values()):
            await asyncio.sleep(0.02)
    await bus.close()
    return running


def test_without_redis_tenants_keep_their_limits_and_nothing_counts_twice(site: Site) -> None:
    key = site.hearth("tenant", "add", "static", "--concurrency", "2", "--requests-per-min", "4")
    ask = {"json": body(max_tokens=4)}
    with site.client(key) as client:
        assert client.post(CHAT, **ask).status_code == 200
        os.kill(site.cluster.pid("redis-server"), signal.SIGSTOP)
        try:
            statuses = [client.post(CHAT, **ask).status_code for _ in range(4)]
            assert statuses == [200, 200, 200, 429]
        finally:
            os.kill(site.cluster.pid("redis-server"), signal.SIGCONT)

    def requests() -> int:
        rows = json.loads(site.hearth("usage", "--tenant", "static", "--json"))
        return rows[0]["requests"] if rows else 0

    until(lambda: requests() == 4)
    time.sleep(1.2)  # two more rounds of the writer
    assert requests() == 4
    open_now = "return redis.call('ZCARD', 'hearth:static:open')"
    until(lambda: site.redis.eval(open_now, 0) == 0, 30)


# ── zero retention ───────────────────────────────────────────────────────────────────────────────

CANARY = "CANARY-zq7x-Vorpal"
CANARY_TOKENS = [301, 77, 415, 209, 333, 58, 487, 120, 266, 391]
FORMS = {
    "text": CANARY.encode(),
    "lower case": CANARY.lower().encode(),
    "hex": CANARY.encode().hex().encode(),
    "base64": base64.b64encode(CANARY.encode())[:16],
    "packed tokens": pack_token_ids(CANARY_TOKENS),
    "packed tokens in hex": pack_token_ids(CANARY_TOKENS).hex().encode(),
    "listed tokens": ", ".join(map(str, CANARY_TOKENS[:5])).encode(),
    "packed list": ",".join(map(str, CANARY_TOKENS[:5])).encode(),
}


def forms_in(data: bytes) -> list[str]:
    return [name for name, form in FORMS.items() if form in data]


class Ear:
    """Hears everything that is said on NATS, as no process of a cluster may."""

    def __init__(self) -> None:
        self.subjects = b""
        self.payloads = b""
        self.has_stored = True

    async def listen(self, url: str, act: Callable[[], None]) -> None:
        client = await nats.connect(url)

        async def hear(message: Any) -> None:
            self.subjects += b"\n" + f"{message.subject} {message.reply}".encode()
            self.subjects += str(message.headers or "").encode()
            self.payloads += message.data

        everything = await client.subscribe(">", cb=hear)
        await client.flush()
        await asyncio.to_thread(act)
        await client.flush()
        await everything.unsubscribe()  # it would answer for JetStream
        try:
            await client.request("$JS.API.INFO", b"", timeout=5)
        except nats.errors.NoRespondersError:
            self.has_stored = False  # no JetStream: nothing outlives its delivery
        await client.close()


def dump(server: redis.Redis) -> bytes:
    """Every key and value."""
    everything = []
    for key in server.scan_iter():
        match server.type(key):
            case b"string":
                value: Any = server.get(key)
            case b"hash":
                value = b"\n".join(b"%b %b" % pair for pair in server.hgetall(key).items())
            case b"zset":
                value = b"\n".join(server.zrange(key, 0, -1))
            case b"set":
                value = b"\n".join(server.smembers(key))
            case other:
                raise AssertionError(f"{key!r} is a {other!r}: look into it, too")
        everything.append(b"%b\n%b" % (key, value))
    return b"\n".join(everything)


def test_nothing_of_a_zero_retention_tenant_is_kept_anywhere(real_site: Site) -> None:
    site = real_site
    key = site.hearth(
        *("tenant", "add", "forgetful", "--zero-retention", "--output-tokens-per-min", "100000")
    )
    statuses: list[int] = []

    def act() -> None:
        with site.client(key) as client:
            speak(client, statuses)

    ear = Ear()
    asyncio.run(ear.listen(site.cluster.nats_url, act))
    assert statuses == [200, 200, 200, 200, 400, 404, 413, 499]
    until(lambda: b"forgetful" in dump(site.redis) and b":usage:" in dump(site.redis))
    # the grep finds what is there: prompts do travel to workers, as tokens
    assert "packed tokens" in forms_in(ear.payloads)
    assert not ear.has_stored
    assert forms_in(ear.subjects) == []
    assert forms_in(dump(site.redis)) == []
    for name in site.cluster.services:
        assert forms_in(site.cluster.log_of(name).encode()) == [], name
    for url in site.cluster.urls.values():
        assert forms_in(httpx.get(f"{url}/metrics", trust_env=False).content) == []
    for path in site.cluster.folder.rglob("*"):
        if path.is_file():
            assert forms_in(path.read_bytes()) == [], path


def speak(client: httpx.Client, statuses: list[int]) -> None:
    """Well and badly: what goes wrong is what gets logged."""
    said = f"Remember {CANARY}. {CANARY}!"
    marked = {"user": CANARY, "cache_salt": CANARY, "stop": [CANARY], "max_tokens": 8}
    tokens = {"model": DEMO_MODEL_NAME, "prompt": CANARY_TOKENS * 4, "max_tokens": 8}
    for path, asked in (
        (CHAT, body(said, **marked)),
        (CHAT, body(said, max_tokens=8, stream=True)),
        (COMPLETIONS, {**tokens, "echo": True, "logprobs": 1}),
        ("/v1/embeddings", {"model": DEMO_MODEL_NAME, "input": [CANARY, said]}),
        (CHAT, body(said, top_p=CANARY)),
        (CHAT, {**body(said), "model": CANARY}),
        (CHAT, body(said * 4000)),
    ):
        statuses.append(client.post(path, json=asked).status_code)
    with client.stream("POST", COMPLETIONS, json={**tokens, "stream": True, "max_tokens": 500}):
        statuses.append(499)  # who leaves
