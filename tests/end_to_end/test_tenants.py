"""Tenants on a full cluster with two gateways: limits, keys, usage and zero retention."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
import redis

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from shared.messages import Heartbeat
from shared.packing import pack_token_ids
from shared.subjects import HEARTBEATS
from shared.tenancy.tenant import usage_of
from shared.transport.bus import NatsBus
from tests.services.cli.in_process import call_hearth
from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.nats_clients import connect_ordered
from tests.support.services.running import environ_for
from tests.support.waiting import until, wait_until

SERVICES = (
    *("kv_index-1", "scheduler-1", "prefill-1", "decode-1", "decode-2"),
    *("gateway-1", "gateway-2"),
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Site:
    """The cluster, an operator's commands and a tenant's clients."""

    def __init__(self, cluster: ChaosCluster, state_home: Path) -> None:
        self.cluster = cluster
        self._state_home = state_home

    def hearth(self, *arguments: str) -> str:
        url = ("--redis-url", self.cluster.redis_url)
        environ = environ_for(self._state_home)
        result = call_hearth((*arguments, *url), environ)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def client(self, api_key: str, gateway: str = "gateway-1") -> httpx.Client:
        headers = {"Authorization": f"Bearer {api_key}"}
        url = self.cluster.urls[gateway]
        return httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)

    @property
    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.cluster.redis_url)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With the demo model, for the logs of a real engine."""
    folder = tmp_path_factory.mktemp("tenants")
    cluster = ChaosCluster(folder, step_s=None, services=SERVICES)
    try:
        asyncio.run(cluster.start())
        yield Site(cluster, folder / "state")
    finally:
        cluster.stop()


def body(text: str = "What is a token?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": DEMO_MODEL_NAME, "messages": messages, "temperature": 0, **fields}


def test_gateways_share_limits_and_follow_changes(site: Site) -> None:
    key = site.hearth("tenant", "add", "shared", "--requests-per-min", "3")
    with site.client(key) as one, site.client(key, "gateway-2") as other:
        chat_request = {"json": body(max_tokens=4)}
        statuses = [gateway.post(CHAT, **chat_request).status_code for gateway in (one, other, one)]
        assert statuses == [200, 200, 200]
        for gateway in (one, other):
            rejection = gateway.post(CHAT, **chat_request)
            assert rejection.status_code == 429
            assert rejection.json()["error"]["code"] == "requests_per_min_exceeded"
            assert 0 < int(rejection.headers["retry-after"]) <= 20
        site.hearth("tenant", "limits", "shared", "--requests-per-min", "unlimited")
        wait_until(lambda: other.post(CHAT, **chat_request).status_code == 200)
        site.hearth("tenant", "limits", "shared", "--concurrency", "0")
        wait_until(lambda: other.post(CHAT, **chat_request).status_code == 403)


def test_rotated_key_works_until_revoked(site: Site) -> None:
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
        wait_until(lambda: with_old.get("/v1/models").status_code == 401)
        assert "revoked" in with_old.get("/v1/models").json()["error"]["message"]
        assert with_new.get("/v1/models").status_code == 200
    assert second not in site.cluster.log_of("gateway-1")


def test_usage_equals_reported_tokens_after_a_worker_death(site: Site) -> None:
    key = site.hearth("tenant", "add", "metered")
    responses: list[dict[str, Any]] = []
    for gateway in ("gateway-1", "gateway-2", "gateway-1"):
        with site.client(key, gateway) as client:
            responses.append(client.post(CHAT, json=body(max_tokens=9)).json())
    with site.client(key) as client:
        fields = {"max_tokens": 250, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        with client.stream("POST", CHAT, json=body(**fields, **options)) as response:
            lines = response.iter_lines()
            next(lines)
            lost = asyncio.run(running_worker(site))
            site.cluster.kill(lost)
            chunks = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
        responses.append(chunks[-1])
    asyncio.run(site.cluster.restart(lost))
    assert responses[-1]["hearth"]["num_resubmissions"] >= 1

    def row() -> dict[str, Any]:
        rows = json.loads(site.hearth("usage", "--tenant", "metered", "--days", "2", "--json"))
        return rows[0] if rows else {"requests": 0}

    usages = [each["usage"] for each in responses]
    expected = {
        "model": DEMO_MODEL_NAME,
        "requests": len(responses),
        "input_tokens": sum(each["prompt_tokens"] for each in usages),
        "output_tokens": sum(each["completion_tokens"] for each in usages),
        "cached_tokens": sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages),
    }
    # a running request is counted, too: its cached tokens at its end
    wait_until(lambda: expected.items() <= row().items(), seen=lambda: (expected, row()))


async def running_worker(site: Site) -> str:
    """Returns the decode worker of the only running request."""
    running: list[str] = []

    def on_message(beat: Heartbeat) -> None:
        if beat.load is not None and "decode" in beat.roles and beat.load.num_running:
            running.append(beat.process_id)

    bus = await NatsBus.connect(site.cluster.nats_url, process_id="monitor")
    await bus.subscribe(HEARTBEATS, Heartbeat, on_message)
    await until(lambda: bool(running), poll_s=0.02)
    await bus.close()
    return running[0]


def test_limits_hold_without_redis_and_usage_counts_once(site: Site) -> None:
    key = site.hearth("tenant", "add", "static", "--concurrency", "2", "--requests-per-min", "4")
    chat_request = {"json": body(max_tokens=4)}
    with site.client(key) as client:
        assert client.post(CHAT, **chat_request).status_code == 200
        os.kill(site.cluster.pid("redis-server"), signal.SIGSTOP)
        try:
            found = [client.post(CHAT, **chat_request) for _ in range(4)]
            statuses = [each.status_code for each in found]
            # its part of a limit of two gateways
            assert statuses == [200, 429, 429, 429], [each.text for each in found]
        finally:
            os.kill(site.cluster.pid("redis-server"), signal.SIGCONT)

    def requests() -> int:
        rows = json.loads(site.hearth("usage", "--tenant", "static", "--json"))
        return rows[0]["requests"] if rows else 0

    wait_until(lambda: requests() == 2)
    time.sleep(1.2)  # two more flushes of the usage writer
    assert requests() == 2
    open_now = "return redis.call('ZCARD', 'hearth:static:open')"
    wait_until(lambda: site.redis.eval(open_now, 0) == 0)


# ── removal ──────────────────────────────────────────────────────────────────────────────────────


def held_of(site: Site, tenant_id: str) -> dict[str, Any]:
    """What `hearth tenant show --where` finds."""
    nats_url = ("--nats-url", site.cluster.nats_url)
    found = json.loads(site.hearth("tenant", "show", tenant_id, "--where", "--json", *nats_url))
    records = {name: count for name, count in found["records"].items() if count}
    names = ("cached_tokens", "held_tokens")
    tokens = sum(each.get(name, 0) for each in found["workers"] for name in names)
    assert {"prefill-1", "decode-1"} <= {each["worker"] for each in found["workers"]}
    return {"records": records, "tokens": tokens, "unfinished": found["unfinished"]}


def test_removed_tenant_leaves_nothing(site: Site) -> None:
    key = site.hearth("tenant", "add", "leaving", "--output-tokens-per-min", "100000")
    with site.client(key) as client:
        text = "What is a token? " * 20  # some blocks
        stored = {"model": DEMO_MODEL_NAME, "input": text, "max_output_tokens": 4}
        assert client.post("/v1/responses", json=stored).status_code == 200
        wait_until(lambda: site.redis.exists("hearth:leaving:prefixes"))
        before = held_of(site, "leaving")
        assert before["tokens"] > 0
        assert {"API keys": 1, "stored responses": 1}.items() <= before["records"].items()
        fields = {"max_tokens": 900, "ignore_eos": True, "stream": True}
        with client.stream("POST", CHAT, json=body(**fields)) as response:
            lines = response.iter_lines()
            next(lines)
            site.hearth("tenant", "remove", "leaving", "--with-usage")
            ending = [each for each in lines if "unknown_tenant" in each]
        assert ending, "the running request ends, with the reason"
        assert client.post(CHAT, json=body()).status_code == 401
    # the order itself names the tenant for a day; the audit log names it
    site.redis.delete("hearth:kv_drops", "hearth:kv_drops:progress")
    assert b"hearth:leaving:" not in dump(site.redis)
    lines = json.loads(site.hearth("audit", "--json", "--count", "5"))
    own = [each for each in lines if "leaving" in each["arguments"]]
    assert {each["kind"] for each in own} == {"command", "deletion"}
    again = call_hearth(
        ("tenant", "remove", "leaving", "--redis-url", site.cluster.redis_url), environ_for(Path())
    )
    assert again.returncode == 2 and "does not exist" in again.stderr


def test_switch_to_zero_retention_drops_what_is_cached(site: Site) -> None:
    key = site.hearth("tenant", "add", "switched")
    with site.client(key) as client:
        chat = body("What is a token? " * 20, max_tokens=4)
        assert client.post(CHAT, json=chat).status_code == 200
        wait_until(lambda: site.redis.exists("hearth:switched:prefixes"))
        assert held_of(site, "switched")["tokens"] > 0
        site.hearth("tenant", "limits", "switched", "--zero-retention")
        wait_until(lambda: held_of(site, "switched")["tokens"] == 0)
        assert client.post(CHAT, json=chat).status_code == 200
    wait_until(lambda: held_of(site, "switched")["tokens"] == 0, timeout_s=30)
    found = held_of(site, "switched")
    assert found["unfinished"] == [] and "records of cached prefixes" not in found["records"]


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


class MessageRecorder:
    """Records all messages on NATS; no process of a cluster has that permission."""

    def __init__(self) -> None:
        self.subjects = b""
        self.payloads = b""
        self.has_jetstream = True

    async def record(self, url: str, action: Callable[[], None]) -> None:
        client = await connect_ordered(url)

        async def on_message(message: Any) -> None:
            self.subjects += b"\n" + f"{message.subject} {message.reply}".encode()
            self.subjects += str(message.headers or "").encode()
            self.payloads += message.data

        everything = await client.subscribe(">", cb=on_message)
        await client.flush()
        await asyncio.to_thread(action)
        await client.flush()
        await everything.unsubscribe()  # this subscription would answer for JetStream
        try:
            await client.request("$JS.API.INFO", b"", timeout=5)
        except nats.errors.NoRespondersError:
            self.has_jetstream = False  # messages are not stored after delivery
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
            case b"stream":
                entries = [fields for _, fields in server.xrange(key)]
                value = b"\n".join(b"%b %b" % pair for each in entries for pair in each.items())
            case other:
                raise AssertionError(f"{key!r} is a {other!r}: search it, too")
        everything.append(b"%b\n%b" % (key, value))
    return b"\n".join(everything)


def test_zero_retention_tenant_data_is_not_stored(site: Site) -> None:
    key = site.hearth(
        "tenant", "add", "forgetful", "--zero-retention", "--output-tokens-per-min", "100000"
    )
    statuses: list[int] = []

    def action() -> None:
        with site.client(key) as client:
            send_requests(client, statuses)

    recorder = MessageRecorder()
    asyncio.run(recorder.record(site.cluster.nats_url, action))
    assert statuses == [200, 200, 200, 200, 400, 404, 400, 499]
    wait_until(lambda: usage_of("forgetful", "").encode() in dump(site.redis))
    assert held_of(site, "forgetful")["tokens"] == 0
    # `forms_in` detects leaks: workers do receive prompts as packed tokens
    assert "packed tokens" in forms_in(recorder.payloads)
    assert not recorder.has_jetstream
    assert forms_in(recorder.subjects) == []
    assert forms_in(dump(site.redis)) == []
    for name in site.cluster.services:
        assert forms_in(site.cluster.log_of(name).encode()) == [], name
    for url in site.cluster.urls.values():
        assert forms_in(httpx.get(f"{url}/metrics", trust_env=False).content) == []
    for path in site.cluster.folder.rglob("*"):
        if path.is_file():
            assert forms_in(path.read_bytes()) == [], path


def send_requests(client: httpx.Client, statuses: list[int]) -> None:
    """Sends valid and invalid requests; services log the invalid ones."""
    prompt = f"Remember {CANARY}. {CANARY}!"
    marked = {"user": CANARY, "cache_salt": CANARY, "stop": [CANARY], "max_tokens": 8}
    tokens = {"model": DEMO_MODEL_NAME, "prompt": CANARY_TOKENS * 4, "max_tokens": 8}
    for path, json_body in (
        (CHAT, body(prompt, **marked)),
        (CHAT, body(prompt, max_tokens=8, stream=True)),
        (COMPLETIONS, {**tokens, "echo": True, "logprobs": 1}),
        ("/v1/embeddings", {"model": DEMO_MODEL_NAME, "input": [CANARY, prompt]}),
        (CHAT, body(prompt, top_p=CANARY)),
        (CHAT, {**body(prompt), "model": CANARY}),
        (CHAT, body(prompt * 4000)),
    ):
        statuses.append(client.post(path, json=json_body).status_code)
    with client.stream("POST", COMPLETIONS, json={**tokens, "stream": True, "max_tokens": 500}):
        statuses.append(499)  # the client disconnects
