"""Free streams beside constraints that are made to hurt.

The free streams run alone, then beside clients that send the whole corpus of hostile constraints,
one request after another. Each hostile request must be answered soon, as the corpus says, and no
process may end. `sat out`: tokens of constrained streams that waited for a later step, of all that
were generated meanwhile; free streams have no mask to wait for.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable
from dataclasses import dataclass, field

from benchmarks.report import Bar, Row, at_most
from benchmarks.structured.cluster import Answer, Result, Served, gaps_s, served
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.client.load_test import percentile
from tests.support.cluster.clients import Exchange
from tests.support.corpora.hostile_grammars import Hostile, hostile_grammars

NUM_FREE, NUM_FREE_TOKENS = 16, 128
NUM_ALONE_S = 15.0
NUM_CLIENTS = 2  # clients that send hostile requests
MAX_TOKENS = 32  # most tokens of an answer to one
MAX_ANSWER_S, MAX_GAP_S = 1.5, 0.25


@dataclass
class Load:
    """A load of free streams, which runs until `ends` is set."""

    target: Served
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    exchanges: list[Exchange] = field(default_factory=list)

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(NUM_FREE)))

    async def _client(self) -> None:
        body = self.target.chat(max_tokens=NUM_FREE_TOKENS, ignore_eos=True)
        while not self.ends.is_set():
            self.exchanges.append(await self.target.stream(body))


async def measure() -> tuple[list[Row], list[Bar]]:
    cases = hostile_grammars()
    async with served(DEMO_MODEL_DIR) as target:
        await _warm_up(target)
        alone, _ = await _beside(target, asyncio.sleep(NUM_ALONE_S))
        pids = _pids(target)
        before = await target.worker_loads()
        beside, answers = await _beside(target, _attack(target, cases))
        after = await target.worker_loads()
        num_died = sum(pid != pids[name] for name, pid in _pids(target).items())
    assert answers is not None
    num_late = sum(
        after[name].num_late_masks - each.num_late_masks for name, each in before.items()
    )
    wrong = [(case, answer) for case, answer in answers if not _is_expected(case, answer)]
    for case, answer in wrong:
        print(f"{case.name}: {answer.status} {answer.text[:200]}", flush=True)
    slowest = sorted(answers, key=lambda each: -each[1].seconds)[:8]
    rows: list[Row] = [
        {"case": "free, alone", **_row(alone)},
        {"case": "free, beside hostile requests", **_row(beside)},
        *({"case": c.name, "status": a.status, "answered s": a.seconds} for c, a in slowest),
        {"case": "constrained tokens that sat out", "count": num_late},
    ]
    p99 = [percentile(gaps_s(each), 99) for each in (alone, beside)]
    late = sum(a.seconds > MAX_ANSWER_S for _, a in answers)
    return rows, [
        at_most("hostile requests answered after 1.5 s", late, 0, "requests"),
        at_most("slowest answer", slowest[0][1].seconds, MAX_ANSWER_S, "s"),
        at_most("answered otherwise than expected", len(wrong), 0, "requests"),
        at_most("processes that ended", num_died, 0, "processes"),
        at_most("free streams' p99 ITL, beside to alone", p99[1] / p99[0], 1.5, "x"),
        at_most("longest gap of a free stream", max(gaps_s(beside)), MAX_GAP_S, "s"),
    ]


async def _warm_up(target: Served) -> None:
    """The first requests of each kind in each of the gateway's processes are slow."""
    large = b'"guided_json":{"description":"' + b"a" * (1 << 20) + b'"}'
    body = target.chat(max_tokens=16)
    await asyncio.gather(*(target.send(large, body) for _ in range(4)))
    constrained = [target.chat(guided_regex=f"[a-z]{{{n}}}", max_tokens=16) for n in range(2, 8)]
    await asyncio.gather(*map(target.ask, constrained))
    await _beside(target, asyncio.sleep(3.0))


async def _beside(target: Served, other: Awaitable[Result]) -> tuple[list[Exchange], Result]:
    """Returns the free streams that ran while `other` did, and its result."""
    load = Load(target)
    running = asyncio.create_task(load.run())
    result = await other
    load.ends.set()
    await running
    return load.exchanges, result


async def _attack(target: Served, cases: list[Hostile]) -> list[tuple[Hostile, Answer]]:
    body = target.chat(max_tokens=MAX_TOKENS)
    left, answers = list(reversed(cases)), list[tuple[Hostile, Answer]]()

    async def client() -> None:
        while left:
            case = left.pop()
            answers.append((case, await target.send(case.members, body)))

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return answers


def _is_expected(case: Hostile, answer: Answer) -> bool:
    """Whether the answer is expected. A client with many expensive requests may also
    be told to wait.
    """
    return answer.status in ((400, 413, 429) if case.is_refused else (200, 400, 413, 429))


def _pids(target: Served) -> dict[str, int]:
    return {name: target.cluster.pid_of(name) for name in target.cluster.process_ids}


def _row(exchanges: list[Exchange]) -> Row:
    gaps = gaps_s(exchanges)
    return {
        "streams": len(exchanges),
        "ITL p50 ms": statistics.median(gaps) * 1e3,
        "ITL p99 ms": percentile(gaps, 99) * 1e3,
        "longest gap ms": max(gaps) * 1e3,
    }
