"""Checks of a cluster: are its servers, gateway and processes there, and does the clock agree?"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import msgspec

from services.cli.doctor.check import Check
from services.cli.doctor.processes import processes_checks, restarts_check
from services.local.credentials import process_id_for
from services.local.processes.supervision_log import recent_restarts
from shared.clock import MonotonicClock
from shared.errors import HearthError
from shared.nats_urls import without_password
from shared.tls import TlsFiles
from shared.transport.bus import NatsBus

TIMEOUT_S = 3.0
MAX_SKEW_S = 2.0  # the gateway's clock is read to one second
NATS_ADVICE = "See nats.log (`hearth logs nats`), the address, the password and the firewall."
REDIS_ADVICE = "See `hearth logs redis`. Known API keys work on; others and limits need Redis."
GATEWAY_ADVICE = "`hearth status` and `hearth logs gateway-1 --level warning` show more."


class Addresses(msgspec.Struct, frozen=True):
    """The URLs of a cluster; empty: none is known. `logs`: the folder of a local one's logs."""

    nats_url: str = ""
    redis_url: str = ""
    gateway_url: str = ""
    logs: Path | None = None


async def check_cluster(addresses: Addresses) -> AsyncIterator[Check]:
    if addresses == Addresses():
        text = "none is running here, and no URL is given"
        yield Check("cluster", "ok", f"{text}: start one with `hearth up`")
    if addresses.nats_url:
        nats = await nats_check(addresses.nats_url)
        yield nats
    if addresses.redis_url:
        yield await redis_check(addresses.redis_url)
    if addresses.gateway_url:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            for each in await gateway_checks(client, addresses.gateway_url):
                yield each
    if addresses.nats_url and nats.level == "ok":
        has_gateway = bool(addresses.gateway_url)
        for each in await processes_checks(
            addresses.nats_url, timeout_s=TIMEOUT_S, has_gateway=has_gateway
        ):
            yield each
    if addresses.logs is not None:
        wall_s = time.time()
        for each in restarts_check(recent_restarts(addresses.logs, wall_s), wall_s):
            yield each


async def nats_check(url: str) -> Check:
    started = time.perf_counter()
    try:
        bus = await NatsBus.connect(
            url,
            process_id=process_id_for("observer", url),
            timeout_s=TIMEOUT_S,
            tls=TlsFiles.of_environ("NATS", os.environ),
        )
    except HearthError as error:
        return Check("NATS", "fail", error.message, NATS_ADVICE)
    milliseconds = 1000 * (time.perf_counter() - started)
    await bus.close()
    return Check("NATS", "ok", f"{without_password(url)}, connected in {milliseconds:.0f} ms")


async def redis_check(url: str) -> Check:
    from shared.store import RedisStore  # 0.1 s, and not without a URL

    tls = TlsFiles.of_environ("REDIS", os.environ)
    store = RedisStore(url, MonotonicClock(), timeout_s=TIMEOUT_S, tls=tls)
    started = time.perf_counter()
    try:
        await store.get("hearth:generation")
    except HearthError as error:
        return Check("Redis", "fail", error.message, REDIS_ADVICE)
    finally:
        await store.close()
    milliseconds = 1000 * (time.perf_counter() - started)
    return Check("Redis", "ok", f"{without_password(url)}, answers in {milliseconds:.0f} ms")


async def gateway_checks(client: httpx.AsyncClient, url: str) -> list[Check]:
    """Returns the gateway's own answer, and by its Date whether the clocks agree."""
    try:
        response = await client.get(f"{url}/ready")
    except httpx.HTTPError as error:
        text = f"{url} does not answer ({type(error).__name__})"
        return [Check("gateway", "fail", text, GATEWAY_ADVICE)]
    now_s = time.time()
    checks = [_gateway_check(url, response)]
    if date := response.headers.get("date"):
        checks.append(skew_check(parsedate_to_datetime(date).timestamp() - now_s))
    return checks


def _gateway_check(url: str, response: httpx.Response) -> Check:
    if response.status_code == 200:
        return Check("gateway", "ok", f"{url} is ready")
    try:
        reason = response.json().get("reason")
    except (ValueError, AttributeError):
        reason = f"status {response.status_code}"
    return Check("gateway", "fail", f"{url} is not ready: {reason}", GATEWAY_ADVICE)


def skew_check(skew_s: float) -> Check:
    if abs(skew_s) <= MAX_SKEW_S:
        return Check("clock", "ok", f"agrees with the gateway's within {MAX_SKEW_S:g} s")
    direction = "behind" if skew_s > 0 else "ahead of"
    text = f"{abs(skew_s):.0f} s {direction} the gateway's"
    advice = "Synchronize clocks (chrony, systemd-timesyncd): certificates and audits need it."
    return Check("clock", "warn", text, advice)
