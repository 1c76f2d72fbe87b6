"""`hearth bench`: its HTTP client finds every event, however the bytes are split."""

import asyncio
import random
import ssl
from pathlib import Path

import pytest

from services.client.http_client import BodyReader, Connection, Sample
from services.client.load_test import LoadTestOptions, Quota, row_of
from shared.errors import DependencyUnavailable, HearthError
from shared.tls import pinned_context
from tests.support.certificates import Authority
from tests.support.grids import in_one_test
from tests.support.waiting import LIMIT_S

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"Hearth"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b"data: [DONE]\n\n",
)


def chunked(parts: tuple[bytes, ...]) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in (*parts, b""))


@in_one_test("seed", range(20))
def test_chunked_body_is_complete_however_it_is_split(seed: int) -> None:
    response, randomness = chunked(EVENTS), random.Random(seed)
    reader, body = BodyReader(), b""
    while response:
        size = randomness.choice((1, 2, 3, 17, 400))
        assert not reader.is_complete
        body += reader.feed(response[:size])
        response = response[size:]
    assert (reader.status, reader.is_complete, body) == (200, True, b"".join(EVENTS))


def test_body_with_a_content_length_is_complete() -> None:
    reader = BodyReader()
    assert reader.feed(b"HTTP/1.1 429 Too Many\r\nContent-Length: 5\r\n\r\nab") == b"ab"
    assert not reader.is_complete
    assert reader.feed(b"cde") == b"cde"
    assert (reader.status, reader.is_complete) == (429, True)


async def sample_of(response: bytes) -> Sample:
    """Sends two requests on one connection; the server always responds with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(response)
            if not response.startswith(b"HTTP"):
                writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = await Connection.open(f"http://127.0.0.1:{port}")
    async with asyncio.timeout(LIMIT_S):
        sample = await connection.request(b"POST / HTTP/1.1\r\n\r\n")
        if not sample.error:
            again = await connection.request(b"POST / HTTP/1.1\r\n\r\n")
            assert len(again.arrivals) == len(sample.arrivals)
    connection.close()
    server.close()
    return sample


async def test_text_is_timed_and_usage_is_read() -> None:
    sample = await sample_of(chunked(EVENTS))
    assert sample.error == ""
    assert len(sample.arrivals) == 2
    assert (sample.num_prompt_tokens, sample.num_cached_tokens, sample.num_output_tokens) == (
        *(9, 4),
        2,
    )


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nbusy", "status 429: busy"),
        (chunked(EVENTS[:2]), "no text or no usage"),
        (b"", "the connection ended"),
    ],
)
async def test_incomplete_response_is_an_error(response: bytes, words: str) -> None:
    assert words in (await sample_of(response)).error


def sample(started: float, gaps: tuple[float, ...], error: str = "") -> Sample:
    arrivals = [started + gaps[0]]
    for gap in gaps[1:]:
        arrivals.append(arrivals[-1] + gap)
    return Sample(
        started=started,
        arrivals=tuple(arrivals),
        ended=arrivals[-1],
        num_output_tokens=len(gaps),
        error=error,
    )


def test_goodput_counts_requests_within_both_limits() -> None:
    samples = [
        sample(0.0, (0.1, 0.01, 0.01)),
        sample(1.0, (0.9, 0.01)),  # first token too late
        sample(2.0, (0.1, 0.2)),  # tokens too slow
        sample(3.0, (1.0, 0.0), error="broken"),
    ]
    limits = LoadTestOptions(ttft_limit_s=0.5, itl_limit_s=0.05)
    row = row_of("closed 1", samples, limits)
    assert (row["num_requests"], row["num_errors"]) == (3, 1)
    assert row["requests_per_s"] == 0.75  # three requests in four seconds
    assert row["goodput_per_s"] == 0.25
    assert row["tokens_per_s"] == 1.8
    assert row["ttft_p50_ms"] == pytest.approx(100.0)
    with pytest.raises(HearthError, match="broken"):
        row_of("closed 1", samples[3:], limits)


def test_quota_limits_requests_or_time() -> None:
    quota = Quota(3, 0.0)
    assert [quota.take() for _ in range(5)] == [True, True, True, False, False]
    assert not Quota(None, 0.0).take()
    assert Quota(None, 100.0).take()


async def test_unreachable_url_is_in_the_error() -> None:
    with pytest.raises(DependencyUnavailable, match=r"cannot reach http://127\.0\.0\.1:9"):
        await Connection.open("http://127.0.0.1:9")


async def test_pinned_certificate_is_accepted_at_any_address_and_no_other_is(
    tmp_path: Path,
) -> None:
    own = Authority(tmp_path / "own").issue("gateway", host="a.example")
    other = Authority(tmp_path / "other").issue("gateway", host="a.example")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own.cert, own.key)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection = await Connection.open(url, pinned_context(own.cert))
    assert connection.is_open
    connection.close()
    for trust in (pinned_context(other.cert), None):
        with pytest.raises(DependencyUnavailable, match="certificate verify failed"):
            await Connection.open(url, trust)
    server.close()
