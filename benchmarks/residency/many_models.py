"""Eight models, memory for two hot ones, real processes: both residency policies on one trace.

Each policy gets a new cluster, `hearth up --model m0=DIR --model m1=DIR …`, and the same requests:
the trace of `python -m benchmarks.residency`, sent when they are due. A wake is counted when a
worker reports that it is ready after it was in standby, or has started. `--budget` is the host's:
such that the caches of two models fit beside the processes of all eight. A host may also end a
process in standby, whose memory is worth several caches: `most_hot` says how many were hot at once.

    python -m benchmarks.checkpoints DIR
    python -m benchmarks.residency.many_models --model DIR --budget cpu=3.28GiB
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.report import Bar, Row, at_least, at_most, write_result
from benchmarks.residency.trace import Trace, steady
from services.client.http_client import ConnectionPool, Sample
from services.client.load_test import Load, percentiles, random_prompts, words_for
from services.local.state import LocalClusterState
from shared.errors import ConfigError, HearthError
from shared.messages import Heartbeat, ProcessState
from shared.subjects import HEARTBEATS
from shared.transport.bus import NatsBus
from tests.support.services.running import up

START_S = 900.0  # weights are converted and kernels compiled at the first start
POLICIES = ("lru", "demand")
MAX_TTFT_S = 4.0


class Residents:
    """The number of wakes, and of models hot at once, as seen in the workers' heartbeats."""

    def __init__(self) -> None:
        self.num_wakes = self.most_hot = 0
        self._states: dict[str, ProcessState] = {}

    def observe(self, beat: Heartbeat) -> None:
        if beat.model is None:
            return
        before = self._states.get(beat.process_id)
        self._states[beat.process_id] = beat.state
        if beat.state == "ready" and before in (None, "starting", "standby"):
            self.num_wakes += 1
        num_hot = sum(state == "ready" for state in self._states.values())
        self.most_hot = max(self.most_hot, num_hot)


async def run_policy(given: argparse.Namespace, policy: str, trace: Trace) -> Row:
    residents = Residents()
    with _cluster(given, policy) as state:
        url = state.nats_url_of("observer")
        if url is None:
            raise ConfigError("the cluster has no observer")
        bus = await NatsBus.connect(url, process_id="observer-1")
        await bus.subscribe(HEARTBEATS, Heartbeat, residents.observe)
        try:
            await asyncio.sleep(1.0)  # models that are hot before the load count as no wakes
            residents.num_wakes = 0
            samples = await _send(state, trace, given.seed)
        finally:
            await bus.close()
    return row_of(policy, samples, residents)


def row_of(policy: str, samples: Sequence[Sample], residents: Residents) -> Row:
    good = [each for each in samples if not each.error]
    if not good:
        raise HearthError(f"no request was answered: {samples[0].error}")
    errors = sorted({each.error for each in samples if each.error})
    return {
        "policy": policy,
        "requests": len(samples),
        "lost": len(samples) - len(good),
        "wakes": residents.num_wakes,
        "most_hot": residents.most_hot,
        **percentiles([each.ttft_s for each in good], "ttft"),
        **percentiles([gap for each in good for gap in each.itl_s] or [0.0], "itl"),
        **({"errors": errors[:3]} if errors else {}),
    }


async def _send(state: LocalClusterState, trace: Trace, seed: int) -> list[Sample]:
    """Sends each request when it is due, whatever is unanswered."""
    loads = [
        Load(
            url=state.url,
            api_key=state.api_key,
            model=f"m{model}",
            num_output_tokens=int(trace.num_output_tokens[0]),
            ignore_eos=True,
            temperature=0.0,
        )
        for model in range(trace.num_models)
    ]
    num_words = await words_for(loads[0], int(trace.num_prompt_tokens[0]))
    prompts = random_prompts(random.Random(seed), num_words)
    connections = ConnectionPool(state.url)
    began, tasks = time.perf_counter(), list[asyncio.Task[Sample]]()
    for at_s, model, _, _ in trace:
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(connections.request(loads[model].message(next(prompts)))))
    samples = await asyncio.gather(*tasks)
    connections.close()
    return list(samples)


@contextmanager
def _cluster(given: argparse.Namespace, policy: str) -> Iterator[LocalClusterState]:
    """Runs `hearth up` with a state directory of its own."""
    models = [part for index in range(8) for part in ("--model", f"m{index}={given.model}")]
    environ = {
        "HEARTH_RESIDENCY": policy,
        "HEARTH_WAKE_TTFT_S": str(given.wake_ttft_s),
        "HEARTH_BUDGET": given.budget,
    }
    with (
        tempfile.TemporaryDirectory(prefix="hearth-many-") as home,
        up(Path(home), *models, timeout_s=START_S, **environ) as state,
    ):
        yield state


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    lru, demand = rows
    return [
        at_most("requests lost", demand["lost"], 0, "requests"),
        at_most("p99 TTFT", demand["ttft_p99_ms"] / 1e3, MAX_TTFT_S, "s"),
        at_most("wakes over lru's", demand["wakes"] / max(1, lru["wakes"]), 0.5, "x"),
        at_least("wakes of lru", lru["wakes"], 1, "wakes"),
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.residency.many_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=lambda text: Path(text).resolve(), required=True, help="the checkpoint")
    add("--budget", required=True, help="of the host: DEVICE=SIZE")
    add("--duration-s", type=float, default=600.0)
    add("--rate", type=float, default=10.0, help="requests per second, Poisson")
    add("--wake-ttft-s", type=float, default=3.4, help="the scheduler's option")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


async def run(given: argparse.Namespace) -> list[Row]:
    trace = steady(
        num_models=8,
        rate_per_s=given.rate,
        duration_s=given.duration_s,
        num_prompt_tokens=64,
        num_output_tokens=16,
        seed=given.seed,
    )
    return [await run_policy(given, policy, trace) for policy in POLICIES]


def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    try:
        rows = uvloop.run(run(given))
    except HearthError as error:
        print(f"many_models: {error.message}", file=sys.stderr)
        return 2
    bars = bars_of(rows)
    write_result("many_models", rows, bars, ["-m", "benchmarks.residency.many_models", *argv])
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
