"""The cost of a tenant's limits per request: round trip to Redis, CPU of the gateway and of Redis.

Run: python -m benchmarks.tenant_limits [--requests 20000] [--tenants 100]

Each request is admitted and settled, by the gateway's own code, against a redis-server started for
this run; `at once` is the number of requests that wait for Redis concurrently. CPU is per request
and by process, from getrusage. `no limits` is the path of a tenant without limits, `no redis` that
of a gateway without Redis. There is no bar: the share of a request's total cost is what matters.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import redis
import uvloop

from benchmarks.report import Row, write_result
from services.client.load_test import percentile
from services.gateway.tenancy.limits import Limits
from services.gateway.tenancy.request_cost import RequestCost
from shared.clock import MonotonicClock
from shared.store import RedisStore
from shared.tenancy.tenant import TenantRecord
from tests.support.servers import RedisServer, free_port

AMPLE = 10**12
DEMAND = RequestCost(500, 200)


def records(num_tenants: int, *, is_limited: bool) -> list[TenantRecord]:
    limit = AMPLE if is_limited else None
    return [
        TenantRecord(
            tenant_id=f"tenant-{number}",
            requests_per_min=limit,
            input_tokens_per_min=limit,
            output_tokens_per_min=limit,
            concurrency=limit,
        )
        for number in range(num_tenants)
    ]


async def measure(url: str, tenants: list[TenantRecord], num_requests: int, at_once: int) -> Row:
    clock = MonotonicClock()
    store = RedisStore(url, clock, timeout_s=2.0)
    limits, waits_s, num_in_redis = Limits(store, clock), [], 0
    limits.start()
    numbers = iter(range(num_requests))

    async def ask() -> None:
        nonlocal num_in_redis
        for number in numbers:
            began = time.perf_counter()
            grant = await limits.admit(tenants[number % len(tenants)], f"r{number}", DEMAND)
            waits_s.append(time.perf_counter() - began)
            num_in_redis += grant.is_charged
            limits.settle(grant, 100)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    await limits.stop()
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    await store.close()
    return {
        "by Redis": num_in_redis / num_requests,  # the others by the gateway's own count
        "requests/s": num_requests / took_s,
        "wait p50 us": percentile(waits_s, 50) * 1e6,
        "wait p99 us": percentile(waits_s, 99) * 1e6,
        "gateway CPU us": cpu_s / num_requests * 1e6,
    }


def redis_cpu_s(url: str) -> float:
    with redis.Redis.from_url(url) as client:
        info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--tenants", type=int, default=100)
    given = parser.parse_args(argv)
    server, rows = RedisServer(), []
    limited = records(given.tenants, is_limited=True)
    free = records(given.tenants, is_limited=False)
    away = f"redis://127.0.0.1:{free_port()}"
    try:
        for name, url, tenants, at_once in (
            ("limits", server.url, limited, 1),
            ("limits", server.url, limited, 16),
            ("limits", server.url, limited, 64),
            ("no redis", away, limited, 16),
            ("no limits", server.url, free, 16),
        ):
            before = redis_cpu_s(server.url)
            row = uvloop.run(measure(url, tenants, given.requests, at_once))
            row["redis CPU us"] = (redis_cpu_s(server.url) - before) / given.requests * 1e6
            rows.append({"case": name, "at once": at_once, **row})
    finally:
        server.stop()
    write_result("tenant_limits", rows, [], ["-m", "benchmarks.tenant_limits", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
