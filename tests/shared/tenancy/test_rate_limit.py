"""The rate limit counter in Python, and its Lua version in Redis, which must match it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.tenancy.ratelimit_headers import duration, ratelimit_headers
from shared.messages import LeaseState, LeaseStep
from shared.tenancy.leases.rates import METERED, RATES
from shared.tenancy.rate_limit import (
    APPLY_EACH_LUA,
    APPLY_LUA,
    IDLE_S,
    LimitCommand,
    LimitState,
    RateLimitCounter,
    RequestedTokens,
    Settled,
    to_limit_state,
)
from tests.support.servers import RedisServer

LEASE_S = 15.0
UNLIMITED: dict[str, int] = {}


def asked(lease_id: str, requests: int = 1, inputs: int = 0, outputs: int = 0) -> RequestedTokens:
    return RequestedTokens(lease_id, dict(zip(RATES, (requests, inputs, outputs), strict=True)))


def command(limits: dict[str, int], **parts: Any) -> LimitCommand:
    return LimitCommand(limits=limits, lease_s=LEASE_S, **parts)


def apply_request(
    counter: RateLimitCounter, limits: dict[str, int], number: int, now: float
) -> LimitState:
    return counter.apply(command(limits, asked=asked(f"r{number}")), now)


# ── in Python ────────────────────────────────────────────────────────────────────────────────────


def test_limit_per_minute_refills_evenly() -> None:
    counter, limits = RateLimitCounter(), {"requests_per_min": 7}
    assert all(not apply_request(counter, limits, n, 0.0).rejected_by for n in range(7))
    rejection = apply_request(counter, limits, 7, 0.0)
    assert rejection.rejected_by == "requests_per_min"
    assert rejection.wait_s == pytest.approx(60 / 7)
    assert apply_request(counter, limits, 8, 60 / 7 - 0.001).rejected_by
    assert not apply_request(counter, limits, 9, 60 / 7).rejected_by
    assert apply_request(counter, limits, 10, 60 / 7).rejected_by
    assert [not apply_request(counter, limits, n, 1000.0).rejected_by for n in range(20, 28)] == [
        *[True] * 7,
        False,
    ]


def test_limit_with_longest_wait_is_reported() -> None:
    limits = {"requests_per_min": 60, "input_tokens_per_min": 60, "concurrency": 1}
    counter = RateLimitCounter()
    counter.apply(command(limits, asked=asked("a", 60, 30)), 0.0)
    state = counter.apply(command(limits, asked=asked("b", 1, 40)), 0.0)
    assert (state.rejected_by, state.wait_s) == ("input_tokens_per_min", pytest.approx(10))
    state = counter.apply(command(limits, asked=asked("b", 1, 0)), 14.0)
    assert (state.rejected_by, state.wait_s) == ("concurrency", 1.0)


def test_leases_are_released_once_and_expire() -> None:
    counter, limits = RateLimitCounter(), {"concurrency": 2}
    for name in ("a", "b"):
        assert not counter.apply(command(limits, asked=asked(name)), 0.0).rejected_by
    assert counter.apply(command(limits, asked=asked("c")), 0.0).rejected_by == "concurrency"
    twice = (Settled("a", 0), Settled("a", 0), Settled("nobody", 0))
    state = counter.apply(command(limits, settled=twice, asked=asked("c")), 1.0)
    assert (state.rejected_by, state.num_open) == ("", 2)
    state = counter.apply(command(limits, renewed=("b",)), 14.0)
    assert state.num_open == 2
    assert counter.apply(command(limits), 1.0 + LEASE_S).num_open == 1  # lease of c expired
    assert counter.apply(command(limits), 14.0 + LEASE_S).num_open == 0


def test_unused_output_tokens_are_refunded_once() -> None:
    counter, limits = RateLimitCounter(), {"output_tokens_per_min": 600}
    counter.apply(command(limits, asked=asked("a", outputs=500)), 0.0)
    assert counter.apply(command(limits, asked=asked("b", outputs=200)), 0.0).rejected_by
    state = counter.apply(command(limits, settled=(Settled("a", 400),)), 0.0)
    assert state.used["output_tokens_per_min"] == 100
    state = counter.apply(command(limits, settled=(Settled("a", 400),)), 0.0)
    assert state.used["output_tokens_per_min"] == 100


def test_lowered_limit_adds_no_wait() -> None:
    counter = RateLimitCounter()
    counter.apply(command({"requests_per_min": 1000}, asked=asked("a", 1000)), 0.0)
    state = counter.apply(command({"requests_per_min": 10}, asked=asked("b")), 0.0)
    assert state.wait_s == pytest.approx(6)


def test_unused_counter_without_leases_is_idle() -> None:
    counter = RateLimitCounter()
    counter.apply(LimitCommand(limits={"concurrency": 1}, lease_s=1e9, asked=asked("a")), 0.0)
    assert not counter.is_idle(2 * IDLE_S)
    counter.apply(command({"concurrency": 1}, settled=(Settled("a", 0),)), 1.0)
    assert not counter.is_idle(IDLE_S)
    assert counter.is_idle(2 + IDLE_S)


def test_headers_match_openai() -> None:
    used = {"requests_per_min": 10.0, "input_tokens_per_min": 75.5, "output_tokens_per_min": 30.0}
    limits = {"requests_per_min": 60, "input_tokens_per_min": 100, "output_tokens_per_min": 120}
    headers = ratelimit_headers(limits, LimitState("", 0.0, used, 0))
    assert headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "50",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "24",
        "x-ratelimit-reset-tokens": "45.3s",
        "x-ratelimit-limit-input-tokens": "100",
        "x-ratelimit-remaining-input-tokens": "24",
        "x-ratelimit-reset-input-tokens": "45.3s",
        "x-ratelimit-limit-output-tokens": "120",
        "x-ratelimit-remaining-output-tokens": "90",
        "x-ratelimit-reset-output-tokens": "15s",
    }
    assert ratelimit_headers({"concurrency": 3}, LimitState("", 0.0, used, 1)) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (66.25, "1m6.25s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ── in Redis ─────────────────────────────────────────────────────────────────────────────────────

TIMED = APPLY_LUA.replace("redis.call('TIME')", "{ARGV[2], '0'}")
names = st.sampled_from("abcde")
limit = st.integers(1, 50)
amounts = st.fixed_dictionaries({}, optional=dict.fromkeys(METERED, st.integers(0, 30)))
lease_steps = st.builds(
    LeaseStep,
    lease_id=st.sampled_from(("s", "t")),
    number=st.integers(0, 6),
    spent=amounts,
    num_refunded=st.integers(0, 30),
    pool=amounts,
    num_open=st.integers(0, 5),
    asked=st.lists(amounts, max_size=3).map(tuple),
    ahead=amounts,
)
commands = st.builds(
    command,
    st.fixed_dictionaries({}, optional=dict.fromkeys((*RATES, "concurrency"), limit)),
    settled=st.lists(st.builds(Settled, names, st.integers(0, 30)), max_size=2).map(tuple),
    renewed=st.lists(names, max_size=2).map(tuple),
    asked=st.none() | st.builds(asked, names, *[st.integers(0, 30)] * 3),
    holder=st.sampled_from(("b/1", "b/2", "c/1")),
    leased=st.none() | lease_steps,
)
steps = st.lists(st.tuples(commands, st.sampled_from((0, 0, 1, 7, 20, 90))), max_size=12)


@pytest.fixture(scope="module")
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps)
def test_redis_matches_the_python_counter(client: redis.Redis, steps: list[Any]) -> None:
    assert TIMED != APPLY_LUA
    client.delete("meter", "open")
    counter, now = RateLimitCounter(), 1_700_000_000
    for each, pause_s in steps:
        now += pause_s
        own = counter.apply(each, float(now))
        # Redis would expire the keys on its own clock; an expired counter is empty in any case
        reply = client.eval(TIMED, 2, "meter", "open", msgspec.json.encode(each), now)
        client.persist("meter")
        client.persist("open")
        state = to_limit_state(reply)
        assert (state.rejected_by, state.num_open) == (own.rejected_by, own.num_open)
        assert state.wait_s == pytest.approx(own.wait_s, abs=1e-4)
        assert state.used == pytest.approx(own.used, abs=1e-4)
        assert_same_share(state.leased, own.leased)


def assert_same_share(found: LeaseState | None, expected: LeaseState | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.pool, found.num_open) == (expected.pool, expected.num_open)
        assert found.is_contended == expected.is_contended
        assert found.used == pytest.approx(expected.used, abs=1e-4)
        assert [name for name, _ in found.rejections] == [name for name, _ in expected.rejections]
        waits = [wait_s for _, wait_s in expected.rejections]
        assert [wait_s for _, wait_s in found.rejections] == pytest.approx(waits, abs=1e-4)


def test_invalid_record_recovers_within_a_minute(client: redis.Redis) -> None:
    for text, is_rejected in ((b"nan", True), (b"inf", True), (b"-5", False), (b"x", False)):
        client.delete("meter", "open")
        client.hset("meter", mapping={"at": text, "requests_per_min": text})
        full = command({"requests_per_min": 5}, asked=asked("a", 5))
        reply = client.eval(APPLY_LUA, 2, "meter", "open", msgspec.json.encode(full))
        state = to_limit_state(reply)
        assert bool(state.rejected_by) is is_rejected, text
        assert state.wait_s <= 60
    client.delete("meter", "open")


def test_bad_record_does_not_stop_the_tenants_after_it(client: redis.Redis) -> None:
    keys = ("m:1", "o:1", "m:bad", "o:bad", "m:3", "o:3")
    client.delete(*keys)
    client.set("m:bad", "text")
    client.zadd("o:3", {"ended": 9e9})
    first = command({"concurrency": 5}, renewed=("a", "b"))
    last = command({"concurrency": 5}, settled=(Settled("ended", 0),), renewed=("c",))
    encoded = msgspec.json.encode([first, first, last])
    ((index, reason),) = client.eval(APPLY_EACH_LUA, len(keys), *keys, encoded)
    assert (index, reason.startswith(b"WRONGTYPE")) == (1, True)
    assert client.zrange("o:1", 0, -1) == [b"a", b"b"]
    assert client.zrange("o:3", 0, -1) == [b"c"]
    client.delete(*keys)


async def test_concurrent_gateways_admit_exactly_the_limit(redis_server: RedisServer) -> None:
    limits = {"requests_per_min": 40, "output_tokens_per_min": 1_000_000, "concurrency": 25}

    def gateway(number: int) -> list[str]:
        with redis.Redis.from_url(redis_server.url) as own:
            found = []
            for turn in range(20):
                one = command(limits, asked=asked(f"{number}-{turn}", outputs=3))
                reply = own.eval(APPLY_LUA, 2, "m:meter", "m:open", msgspec.json.encode(one))
                found.append(to_limit_state(reply).rejected_by)
            return found

    lists = await asyncio.gather(*(asyncio.to_thread(gateway, number) for number in range(4)))
    outcomes = [each for found in lists for each in found]
    assert outcomes.count("") == 25
    assert outcomes.count("concurrency") == 55
