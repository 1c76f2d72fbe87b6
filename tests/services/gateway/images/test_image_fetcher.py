"""Images at addresses: only from hosts that are named, only over addresses that were checked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from msgspec import structs

from services.gateway.body_budget import BodyBudget
from services.gateway.images.addresses.allowed_hosts import AllowedHosts, is_public
from services.gateway.images.addresses.image_fetcher import ImageFetcher
from services.gateway.images.input_image import InputImage
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, Overloaded

GOOD = GatewayConfig(nats_url="nats://a", redis_url="redis://a", process_id="gateway-1")
PLACE = "messages[0].content[1]"
DATA = bytes(range(256)) * 40
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def image(url: str) -> InputImage:
    return InputImage(PLACE, b"", address=url)


class Names:
    """A resolver: the answers of each name, one list for each time that it is asked."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): found for name, found in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.answers.get(host)
        if not answers:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@contextlib.asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[int]:
    """Serves a port of this machine."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def sends(data: bytes, heads: list[bytes] | None = None) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head)
        writer.write(data)
        await writer.drain()

    return answer


def fetcher(
    port: int, names: Names | None = None, budget: BodyBudget | None = None, **options
) -> ImageFetcher:
    """`may_connect` allows this machine, which stands for the public internet."""
    options.setdefault("may_connect", lambda ip: ip == "127.0.0.1")
    return ImageFetcher(
        AllowedHosts.of((f"http://pictures.example:{port}",)),
        budget or BodyBudget(),
        resolve=names or Names(pictures_example=[["127.0.0.1"]]),
        **options,
    )


async def fetched(own: ImageFetcher, *urls: str) -> list[bytes]:
    counted = own.bytes_of("tenant")
    try:
        return [each.content for each in await own.fetched([*map(image, urls)], counted)]
    finally:
        counted.release()


async def refused(own: ImageFetcher, url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await fetched(own, url)
    assert caught.value.param == PLACE


async def test_an_image_of_a_named_host_is_fetched_without_anything_of_the_client() -> None:
    heads: list[bytes] = []
    async with listening(sends(OK % len(DATA) + DATA, heads)) as port:
        url = f"http://PICTURES.example:{port}/a b/ü.png?x=1#part"
        names = Names(pictures_example=[["127.0.0.1"]])
        assert await fetched(fetcher(port, names), url) == [DATA]
    lines = heads[0].decode().lower().split("\r\n")
    assert lines[0] == "get /a%20b/%c3%bc.png?x=1 http/1.1"
    sent = dict(line.split(": ", 1) for line in lines[1:] if line)
    assert sent.pop("host") == f"pictures.example:{port}"
    assert sent.keys() == {"accept", "accept-encoding", "user-agent", "connection"}
    assert names.asked == ["pictures.example"]


@pytest.mark.parametrize(
    "url",
    [
        "https://pictures.example/a.png",  # only its unencrypted port is named
        "http://pictures.example/a.png",
        "http://other.example:{port}/a.png",
        "http://a.pictures.example:{port}/a.png",
        "http://pictures.example.evil.test:{port}/",
        "http://127.0.0.1:{port}/a.png",
        "http://[::1]:{port}/",
    ],
)
async def test_other_hosts_are_not_even_resolved(url: str) -> None:
    names = Names()
    own = fetcher(8000, names)
    await refused(own, url.format(port=8000), "images are not fetched from http")
    assert names.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "http://user@pictures.example:8000/",
        "http://pictures.example:8000:1/",
        "http://pictures.example:x/",
        "http:///a.png",
        "http://[::1/",
        "http://" + "a" * 9000,
    ],
)
async def test_addresses_that_are_none_are_refused(url: str) -> None:
    await refused(fetcher(8000), url, "the address")


async def test_nothing_is_fetched_where_no_host_is_named() -> None:
    own = ImageFetcher(AllowedHosts.of(()), BodyBudget(), resolve=Names())
    await refused(own, "https://pictures.example/a.png", "not fetched from addresses")


PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1%eth0",
    "fd00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
]


@pytest.mark.parametrize("ip", PRIVATE)
async def test_a_named_host_with_a_private_address_is_refused(ip: str) -> None:
    assert not is_public(ip)
    names = Names(pictures_example=[["93.184.215.14", ip]])
    own = fetcher(8000, names, may_connect=is_public)
    await refused(own, "http://pictures.example:8000/", "not a host of the public internet")


def test_public_addresses_are_public() -> None:
    for ip in ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:93.184.215.14"):
        assert is_public(ip)


async def test_a_second_answer_of_the_name_is_never_used() -> None:
    """The name rebinds to a private address after it was checked."""
    async with listening(sends(OK % len(DATA) + DATA)) as port:
        names = Names(pictures_example=[["127.0.0.1"], ["127.0.0.2"]])
        assert await fetched(fetcher(port, names), f"http://pictures.example:{port}/") == [DATA]
        assert len(names.asked) == 1
        await refused(fetcher(port, names), f"http://pictures.example:{port}/", "not a host of")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest\r\n\r\n",
            "redirects, which is not followed",
        ),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "answers 404"),
        (OK.replace(b"200 OK", b"206 Partial") % 0, "answers 206"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", "compresses"),
        (OK % 1001 + b"x", "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001, "more than 1000 bytes"),
        (OK % 900 + b"x", "cannot be fetched: RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", "cannot be fetched"),
        (b"SSH-2.0-OpenSSH\r\n", "cannot be fetched: RemoteProtocolError"),
        (b"", "cannot be fetched: RemoteProtocolError"),
    ],
)
async def test_answers_without_an_image_are_refused(answer: bytes, reason: str) -> None:
    async with listening(sends(answer)) as port:
        own = fetcher(port, max_bytes=1000)
        await refused(own, f"http://pictures.example:{port}/", reason)


async def test_a_slow_body_ends_at_its_limit() -> None:
    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK % 100)
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with listening(drips) as port:
        own = fetcher(port, timeout_s=0.1)
        await refused(own, f"http://pictures.example:{port}/", "not come within 0.1 s")


async def test_a_host_that_is_not_there_is_named() -> None:
    await refused(fetcher(1), "http://pictures.example:1/", "cannot be fetched: ConnectError")
    own = fetcher(1, Names())
    await refused(own, "http://pictures.example:1/", "cannot be fetched: OSError")


async def test_fetched_bytes_are_those_of_the_tenants_bodies() -> None:
    async with listening(sends(OK % len(DATA) + DATA)) as port:
        budget = BodyBudget(max_tenant_bytes=len(DATA) * 3 // 2)
        own = fetcher(port, budget=budget)
        url = f"http://pictures.example:{port}/"
        counted = own.bytes_of("tenant")
        await own.fetched([image(url)], counted)
        assert budget.num_bytes == len(DATA)
        with pytest.raises(Overloaded, match="too many body bytes"):
            await own.fetched([image(url)], counted)
        counted.release()
        assert budget.num_bytes == 0
        assert await fetched(own, url) == [DATA]


def test_a_host_that_is_none_is_refused_with_the_configuration() -> None:
    for host in ("*", "https://a.example/path", "user@a.example", "a example", "a.example:0"):
        config = structs.replace(GOOD, image_host=(host,))
        assert any("image_host" in each for each in config.problems()), host
