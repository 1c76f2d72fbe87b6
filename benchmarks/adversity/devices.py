"""S1: a device that fails every step. S2: a request that breaks every step with it.
U1: long answers on a fleet of which one worker's KV cache is smaller than an answer.

S1 sends the requests of one tenant. Where a worker serves several, steps that fail are counted
against the device only if they are of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.adversity.cluster import FaultyCluster, cluster
from benchmarks.adversity.load import completion, is_full, print_failures, send_every
from benchmarks.adversity.worker import StepFaults
from benchmarks.report import Bar, at_least, at_most
from benchmarks.serving.cluster import Process
from services.worker.worker import DEVICE_LOST_STATUS
from shared.engine.executors.timing_executor import STATE_BYTES
from tests.support.cluster.clients import Exchange

NUM_REQUESTS, EVERY_S = 60, 0.05
FAILS_AFTER_S = 1.0
MAX_FAILED_STEPS = 3
NUM_ROWS, POISON = 32, 666
STEP_S = 0.02
NUM_LONG, LONG_TOKENS = 12, 200
KV_TOKENS = {"decode-1": 128, "decode-2": 4096}


async def measure(rows: Sequence[str]) -> list[Bar]:
    bars = await _uneven_caches() if "U1" in rows else []
    if set(rows) == {"U1"}:
        return bars
    async with cluster({"decode-1": "decode", "decode-2": "decode", "decode-3": "decode"}) as fleet:
        gateway = fleet.start_services()
        if "S2" in rows:
            bars += await _poison(fleet, gateway)
        if "S1" in rows:
            bars += await _failing_device(fleet, gateway)
    return sorted(bars, key=lambda bar: bar.name)


async def _uneven_caches() -> list[Bar]:
    async with cluster(dict.fromkeys(KV_TOKENS, "decode")) as fleet:
        gateway = fleet.start_services()
        workers = [
            fleet.start_worker("decode", name, options={"kv-cache-bytes": STATE_BYTES * num_tokens})
            for name, num_tokens in KV_TOKENS.items()
        ]
        await fleet.ready(gateway, *workers)
        bodies = [
            completion(n, num_prompt_tokens=40, max_tokens=LONG_TOKENS) for n in range(NUM_LONG)
        ]
        exchanges = await send_every(EVERY_S, gateway.url, fleet.api_key, bodies)
    print_failures("U1", exchanges)
    num_full = sum(map(is_full, exchanges))
    return [at_least("U1 answers with 200 tokens, of 12", num_full, NUM_LONG, "requests")]


async def _failing_device(fleet: FaultyCluster, gateway: Process) -> list[Bar]:
    healthy = fleet.start_worker("decode", "decode-2", step_s=STEP_S)
    sick = fleet.start_worker(
        "decode", "decode-3", step_s=STEP_S, faults=StepFaults(after_s=FAILS_AFTER_S)
    )
    await fleet.ready(gateway, healthy, sick)
    bodies = [completion(n, num_prompt_tokens=24, max_tokens=40) for n in range(NUM_REQUESTS)]
    exchanges = await send_every(EVERY_S, gateway.url, fleet.api_key, bodies)
    print_failures("S1", exchanges)
    status = await sick.ended()
    num_failed = len(sick.events("step_failed"))
    num_left = int(status == DEVICE_LOST_STATUS and num_failed > 0)
    return [
        at_least("S1 answered, of 60", sum(map(is_full, exchanges)), NUM_REQUESTS, "requests"),
        at_least("S1 failing worker left the fleet", num_left, 1, "workers"),
        at_most("S1 failed steps before that", num_failed, MAX_FAILED_STEPS, "steps"),
    ]


async def _poison(fleet: FaultyCluster, gateway: Process) -> list[Bar]:
    """One worker, so that all requests share its steps."""
    worker = fleet.start_worker(
        "decode", "decode-1", step_s=STEP_S, faults=StepFaults(poison_seed=POISON)
    )
    await fleet.ready(gateway, worker)
    good = [completion(n, num_prompt_tokens=24, max_tokens=60) for n in range(NUM_ROWS - 1)]
    poison = completion(NUM_ROWS, num_prompt_tokens=24, max_tokens=60, seed=POISON)
    expected = await send_every(0.0, gateway.url, fleet.api_key, good)
    *others, poisoned = await send_every(0.0, gateway.url, fleet.api_key, [*good, poison])
    print_failures("S2", others)
    failed = worker.events("step_failed")
    num_rows = max((each["num_sequences"] for each in failed), default=0)
    worker_left = int(not worker.is_running or bool(worker.events("device_lost")))
    worker.popen.terminate()
    await worker.ended()
    return [
        at_least("S2 rows of the step that raised", num_rows, NUM_ROWS, "rows"),
        at_least(
            "S2 answers equal to a run without it, of 31",
            num_equal(expected, others),
            NUM_ROWS - 1,
            "requests",
        ),
        at_least("S2 poisonous request answered by an error", int(_is_error(poisoned)), 1, ""),
        at_most("S2 workers lost", worker_left, 0, "workers"),
    ]


def num_equal(expected: Sequence[Exchange], others: Sequence[Exchange]) -> int:
    """Returns the number of full responses with the same text, finish and tokens."""
    pairs = zip(expected, others, strict=True)
    return sum(
        is_full(a) and is_full(b) and (a.output, a.usage) == (b.output, b.usage) for a, b in pairs
    )


def _is_error(exchange: Exchange) -> bool:
    return any(b"request_breaks_workers" in each for each in exchange.errors)
