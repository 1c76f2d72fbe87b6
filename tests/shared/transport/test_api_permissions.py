"""What a client of the NATS API may do, on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import nats
import pytest
import structlog.testing
from msgspec import structs
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared import subjects
from shared.config import GatewayConfig
from shared.lifecycle.identity import connect_to_clients
from shared.subjects import api_request, sent_by
from tests.shared.transport.test_bus import raw_client
from tests.support.nats_clients import connect_ordered
from tests.support.servers import NatsServer
from tests.support.waiting import LIMIT_S, until

OWN_INBOX = "_INBOX.client-1.abc"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Another one than that of the run, where a gateway may serve."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


ALLOWED = [
    *(api_request(endpoint, "client-1") for endpoint in ("chat", "cancel", "anything")),
    subjects.api_cancel("client-1", "gateway-1"),
    *("$SRV.PING", "$SRV.INFO.hearth", "$SRV.STATS.hearth.id"),
]
FORBIDDEN = [
    api_request("chat", "client-2"),
    api_request("chat.more", "client-1"),
    subjects.api_cancel("client-2", "gateway-1"),
    "hearth.v1.api.chat",
    # the inboxes of other clients and of processes, and its own: only replies go there
    *("_INBOX.client-2.abc", "_INBOX.gateway-1.-.abc", OWN_INBOX),
    # commands and events of processes, in its own name and in others'
    *(
        sent_by(subject, sender)
        for sender in ("client-1", "gateway-1")
        for subject in (
            subjects.SUBMIT,
            subjects.submit_to("scheduler-1"),
            subjects.cancel("scheduler-1"),
            subjects.MATCH,
            subjects.start_decode("decode-1"),
            subjects.control("decode", "decode-1"),
            subjects.control("prefill", "prefill-1"),
            subjects.run_prefill("prefill-1"),
            subjects.resend("decode-1"),
            subjects.list_blocks("decode", "decode-1"),
            subjects.pins("decode", "decode-1"),
            subjects.tokens("gateway-1"),
            subjects.placement("gateway-1"),
            subjects.heartbeat(("decode",), "decode-1"),
            subjects.kv_events("decode", "decode-1"),
            subjects.alive("gateway", "gateway-1"),
        )
    ),
    *("$SYS.REQ.USER.INFO", "anything"),
]
NOT_SUBSCRIBED = [
    *("_INBOX.client-2.>", "_INBOX.>", "_INBOX.*.abc", "_INBOX.gateway-1.*.>", ">", "$SRV.>"),
    *(subjects.API_REQUESTS, api_request("chat", "client-1"), api_request("chat", "client-2")),
    *(subjects.from_anyone(each) for each in (subjects.HEARTBEATS, subjects.KV_EVENTS)),
    *(subjects.from_anyone(each) for each in (subjects.SUBMIT, subjects.tokens("gateway-1"))),
]


async def rejections(client: Client, errors: asyncio.Queue[str]) -> list[str]:
    """What the server has rejected until now, one line each."""
    await client.flush()
    return [errors.get_nowait() for _ in range(errors.qsize())]


async def test_client_publishes_only_requests_in_its_name(server: NatsServer) -> None:
    async with raw_client(server, "client-1") as (client, errors):
        for subject in ALLOWED:
            await client.publish(subject, b"{}", reply=OWN_INBOX)
        assert await rejections(client, errors) == []
        for subject in FORBIDDEN:
            await client.publish(subject, b"{}", reply=OWN_INBOX)
        found = await rejections(client, errors)
    for subject, rejection in zip(FORBIDDEN, found, strict=True):
        assert f'permissions violation for publish to "{subject}"'.lower() in rejection


async def test_only_processes_send_more_than_a_body(server: NatsServer) -> None:
    async with (
        raw_client(server, "gateway-1") as (process, _),
        raw_client(server, "gateway-1.api") as (gateway, _),
        raw_client(server, "client-1") as (client, _),
    ):
        requests = await gateway.subscribe(subjects.API_REQUESTS)
        await gateway.flush()
        await client.publish(api_request("chat", "client-1"), bytes(4 << 20), reply=OWN_INBOX)
        assert len((await requests.next_msg(timeout=LIMIT_S)).data) == 4 << 20
        await client.publish(api_request("chat", "client-1"), bytes(5 << 20), reply=OWN_INBOX)
        with pytest.raises((nats.errors.Error, OSError)):
            await client.flush()
        await process.publish(sent_by(subjects.SUBMIT, "gateway-1.-"), bytes(7 << 20))
        await process.flush()
        assert requests.pending_msgs == 0


async def test_client_subscribes_only_to_its_inbox(server: NatsServer) -> None:
    async with raw_client(server, "client-1") as (client, errors):
        await client.subscribe("_INBOX.client-1.>")
        await client.subscribe("_INBOX.client-1.abc.*")
        assert await rejections(client, errors) == []
        for subject in NOT_SUBSCRIBED:
            await client.subscribe(subject)
        found = await rejections(client, errors)
    for subject, rejection in zip(NOT_SUBSCRIBED, found, strict=True):
        assert f'permissions violation for subscription to "{subject}"'.lower() in rejection


async def test_only_gateways_receive_requests(server: NatsServer) -> None:
    async with raw_client(server, "gateway-1.api") as (gateway, errors):
        await gateway.subscribe(subjects.API_REQUESTS, queue=subjects.API_GROUP)
        await gateway.subscribe("$SRV.>")
        assert await rejections(gateway, errors) == []
        await gateway.subscribe(subjects.api_cancel("*", "gateway-1.one"))
        assert await rejections(gateway, errors) == []
        await gateway.subscribe(subjects.api_cancel("*", "gateway-2.one"))
        await gateway.publish(subjects.SUBMIT, b"x")
        assert len(await rejections(gateway, errors)) == 2
    for name in ("gateway-1", "scheduler-1", "decode-1", "prefill-1", "kv_index-1", "worker-1"):
        async with raw_client(server, name) as (process, errors):
            await process.subscribe(subjects.API_REQUESTS)
            await process.subscribe("$SRV.>")
            await process.publish(api_request("chat", "client-1"), b"{}")
            assert len(await rejections(process, errors)) == 3, name


async def test_gateway_serves_clients_of_a_server_without_their_account(server: NatsServer) -> None:
    """Its configuration is older than the account: no other credential has a user `.api`."""
    config = GatewayConfig(
        nats_url=server.url("scheduler-1"), process_id="scheduler-1", redis_url="redis://none"
    )
    with structlog.testing.capture_logs() as logged:
        bus = await connect_to_clients(config)
    assert "no_account_of_clients" in [line["event"] for line in logged]
    await bus.flush()
    await bus.close()
    gateway = structs.replace(config, nats_url=server.url("gateway-1"), process_id="gateway-1")
    with structlog.testing.capture_logs() as logged:
        await (await connect_to_clients(gateway)).close()
    assert "no_account_of_clients" not in [line["event"] for line in logged]


async def test_gateway_sends_many_replies_to_clients_alone(server: NatsServer) -> None:
    """And the client answers a message with a reply subject of the gateway, once it came."""
    check = "_INBOX.gateway-1.-.check"
    async with (
        raw_client(server, "gateway-1.api") as (gateway, errors),
        raw_client(server, "client-1") as (client, client_errors),
    ):
        answers: asyncio.Queue[bytes] = asyncio.Queue()

        async def stream(request: Msg) -> None:
            for number in range(99):
                await gateway.publish(request.reply, b"%d" % number)
            await gateway.publish(request.reply, b"99", reply=check)

        async def take_answer(message: Msg) -> None:
            answers.put_nowait(message.data)

        await gateway.subscribe(subjects.API_REQUESTS, cb=stream)
        await gateway.subscribe("_INBOX.gateway-1.*.check", cb=take_answer)
        inbox = await client.subscribe("_INBOX.client-1.>")
        await gateway.flush()
        await client.publish(check, b"too early")
        assert len(await rejections(client, client_errors)) == 1
        await client.publish(api_request("chat", "client-1"), b"{}", reply=OWN_INBOX)
        received = [await inbox.next_msg(timeout=LIMIT_S) for _ in range(100)]
        assert [message.data for message in received] == [b"%d" % number for number in range(100)]
        await client.publish(check, b"here")
        assert await asyncio.wait_for(answers.get(), timeout=LIMIT_S) == b"here"
        assert await rejections(gateway, errors) == []
        for subject in (api_request("chat", "client-1"), "_INBOX", "hearth.v1.anything"):
            await gateway.publish(subject, b"x")
        found = await rejections(gateway, errors)
    assert ["permissions violation for publish" in each for each in found] == [True] * 3


async def test_stream_goes_on_when_the_server_reads_its_configuration(server: NatsServer) -> None:
    """A worker joins: the server then forgets whose replies it has permitted."""
    async with (
        raw_client(server, "gateway-1.api") as (gateway, errors),
        raw_client(server, "client-1") as (client, _),
    ):
        requests = await gateway.subscribe(subjects.API_REQUESTS)
        inbox = await client.subscribe("_INBOX.client-1.>")
        await gateway.flush()
        await client.publish(api_request("chat", "client-1"), b"{}", reply=OWN_INBOX)
        request = await requests.next_msg(timeout=LIMIT_S)
        await gateway.publish(request.reply, b"before")
        assert (await inbox.next_msg(timeout=LIMIT_S)).data == b"before"
        server.add_user("decode", "decode-9")
        await until(lambda: is_accepted(server, "decode-9"))
        await gateway.publish(request.reply, b"after")
        assert await rejections(gateway, errors) == []
        assert (await inbox.next_msg(timeout=LIMIT_S)).data == b"after"


async def is_accepted(server: NatsServer, user: str) -> bool:
    try:
        await (await nats.connect(server.url(user), allow_reconnect=False)).close()
    except (nats.errors.Error, OSError):
        return False
    return True


async def test_other_processes_send_few_replies(server: NatsServer) -> None:
    """As many as the bus needs: a stolen worker credential is no way into an inbox."""
    subject = subjects.list_blocks("decode", "decode-1")
    async with (
        raw_client(server, "decode-1") as (worker, errors),
        raw_client(server, "kv_index-1") as (index, _),
    ):
        requests = await worker.subscribe(subjects.from_anyone(subject))
        await worker.flush()
        reply = "_INBOX.kv_index-1.-.abc"
        await index.publish(sent_by(subject, "kv_index-1"), b"", reply=reply)
        await requests.next_msg(timeout=LIMIT_S)
        for _ in range(5):
            await worker.publish(reply, b"x")
        assert len(await rejections(worker, errors)) == 1


async def test_request_without_gateway_fails_at_once(server: NatsServer) -> None:
    client = await connect_ordered(server.url("client-2"), inbox_prefix="_INBOX.client-2")
    with pytest.raises(nats.errors.NoRespondersError):
        await client.request(api_request("chat", "client-2"), b"{}", timeout=20)
    await client.close()
