"""The cost of the control plane: a full cluster whose workers' steps take no time.

    python -m benchmarks.control_plane                           both shapes, 16, 64, 256 clients
    python -m benchmarks.control_plane --peer VENV [--aiperf VENV]    also Dynamo, alternating
    python -m benchmarks.control_plane --shape split --concurrency 64 --duration-s 5
    python -m benchmarks.control_plane --shape split --hold      for other clients: prints the URL

Real processes: gateway, its chat template, scheduler, kv_index, nats-server, redis, workers. Every
prompt is different, rendered and tokenized; each token is a step of the engine and an event of the
response, which the client counts. Client and servers share the machine's cores, as for the peer.

The bars compare with the peer of the same run, under the clients that its published figures used:
AIPerf if `--aiperf` names a virtual environment with it, and a client that parses every event.
Without a peer they compare with those figures, under the same client only.

    split   500 tokens in, 32 out; separate prefill and decode. As steps take no time,
            placement lets decode compute nearly every prompt: hardly any KV is pushed
    one     100 tokens in, 64 out; one worker with both roles

CPU is a process's user and system time as counted by the kernel, in milliseconds per request: this
equals the number of cores it uses at 1,000 requests a second. It is steadier than requests per
second, which mean nothing on a busy machine. The client is measured with and without TCP_QUICKACK:
a server that leaves small segments to Nagle's algorithm waits for acknowledgements. AIPerf's own
processes are not counted.

AIPerf 0.13 polls without a pause while all its requests are in flight: one process that is always
runnable competes with the others. Its measurements on shared cores depend on how the kernel
schedules them, and vary by a tenth from run to run; `--rounds` reports the median of several.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks.report import Bar, Row, at_least, at_most, write_result
from benchmarks.serving.aiperf import aiperf
from benchmarks.serving.closed_loop import ClientKind, Tally, Target, load, num_events_of
from benchmarks.serving.cluster import ONE_WORKER, SPLIT, Processes, hearth
from benchmarks.serving.dynamo import dynamo
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.client.load_test import percentile


@dataclass(frozen=True)
class Shape:
    num_input_tokens: int
    num_output_tokens: int


SHAPES = {"split": Shape(500, 32), "one": Shape(100, 64)}
SERVICES = {"split": SPLIT, "one": ONE_WORKER}
MANNERS = {
    "quickack": ClientKind(has_quickack=True),
    "plain": ClientKind(),
    "parsing": ClientKind(has_quickack=True, parses=True),
}
# (shape, clients): requests/s of Dynamo 1.6.1 on 2 cores, under which client; bar
REFERENCES = {
    ("split", 16): (231, "aiperf", 1.2),
    ("split", 64): (387, "aiperf", 1.2),
    ("one", 64): (593, "parsing", 1.0),
}
AIPERF_REQUESTS = 1200, 24  # a base number, plus this many per client
NUM_TEMPLATE_TOKENS = 24  # tokens of the chat template and the number
WARM_UP_S = 1.0


def prompts(num_tokens: int, seed: int) -> Iterator[str]:
    """Words of one token each, after a number: no two prompts share a block."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    texts = (tokenizer.decode([each]) for each in range(tokenizer.get_vocab_size()))
    words = [text for text in texts if text.startswith(" ") and text.strip().isalpha()]
    body = "".join(random.Random(seed).choices(words, k=num_tokens - NUM_TEMPLATE_TOKENS))
    return (f"{seed:03}.{number:06}{body}" for number in itertools.count())


def cpu_s(processes: Processes) -> dict[str, float]:
    """Returns the user and system time of each process, and of this process as the client."""
    everyone = {**processes, "client": psutil.Process()}
    times = {name: process.cpu_times() for name, process in everyone.items()}
    return {name: each.user + each.system for name, each in times.items()}


@dataclass(frozen=True)
class Measurement:
    target: Target
    processes: Processes
    shape: Shape
    seconds: float
    seed: int

    async def under(self, client: str, concurrency: int, aiperf_venv: Path) -> Row:
        if client == "aiperf":
            return await self.row_of_aiperf(aiperf_venv, concurrency)
        return await self.row(concurrency, MANNERS[client])

    async def row(self, concurrency: int, kind: ClientKind) -> Row:
        source = prompts(self.shape.num_input_tokens, self.seed)
        num_output_tokens = self.shape.num_output_tokens
        num_events = await num_events_of(self.target, next(source), num_output_tokens)

        async def run(seconds: float) -> Tally:
            return await load(
                self.target,
                source,
                concurrency=concurrency,
                duration_s=seconds,
                num_output_tokens=num_output_tokens,
                num_events=num_events,
                kind=kind,
            )

        await run(WARM_UP_S)
        before, started = cpu_s(self.processes), time.perf_counter()
        tally = await run(self.seconds)
        elapsed_s, after = time.perf_counter() - started, cpu_s(self.processes)
        spent = {name: after[name] - before[name] for name in after}
        return _row(tally, elapsed_s, num_output_tokens, spent)

    async def row_of_aiperf(self, venv: Path, concurrency: int) -> Row:
        least, each = AIPERF_REQUESTS
        before = cpu_s(self.processes)
        profile = await aiperf(
            venv,
            self.target,
            concurrency=concurrency,
            num_requests=least + each * concurrency,
            num_input_tokens=self.shape.num_input_tokens,
            num_output_tokens=self.shape.num_output_tokens,
        )
        after, num = cpu_s(self.processes), profile.request_count.avg
        spent = {name: after[name] - before[name] for name in self.processes}
        per_s, ttft_ms = profile.request_throughput.avg, profile.time_to_first_token
        return {
            "requests_per_s": round(per_s, 1),
            "tokens_per_s": round(per_s * profile.output_sequence_length.avg),
            "ttft_p50_ms": round(ttft_ms.p50, 2),
            "ttft_p99_ms": round(ttft_ms.p99, 2),
            "num_requests": round(num),
            "num_errors": round(profile.error_request_count.avg),
            "servers_cpu_ms": round(1e3 * sum(spent.values()) / num, 3),
            **{f"{name}_cpu_ms": round(1e3 * each / num, 3) for name, each in spent.items()},
        }


def _row(tally: Tally, elapsed_s: float, num_output_tokens: int, spent: dict[str, float]) -> Row:
    num = tally.num_requests
    for fault in tally.faults[:3]:
        print(fault, file=sys.stderr)
    of_servers = sum(spent.values()) - spent["client"]
    return {
        "requests_per_s": round(num / elapsed_s, 1),
        "tokens_per_s": round(num * num_output_tokens / elapsed_s),
        "ttft_p50_ms": round(1e3 * statistics.median(tally.ttft_s), 2),
        "ttft_p99_ms": round(1e3 * percentile(tally.ttft_s, 99), 2),
        "num_requests": num,
        "num_errors": len(tally.faults),
        "servers_cpu_ms": round(1e3 * of_servers / num, 3),
        **{f"{name}_cpu_ms": round(1e3 * each / num, 3) for name, each in spent.items()},
    }


Servers = dict[str, tuple[Target, Processes]]


@asynccontextmanager
async def started(shape: str, options: argparse.Namespace) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = hearth(SERVICES[shape], folder, step_s=options.step_s)
        servers = {"hearth": await stack.enter_async_context(ours)}
        if options.peer is not None:
            theirs = dynamo(options.peer, folder, is_split=shape == "split")
            servers["dynamo"] = await stack.enter_async_context(theirs)
        yield servers


async def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    seeds = itertools.count(options.seed)
    for shape in options.shape:
        async with started(shape, options) as servers:
            for concurrency, client in itertools.product(
                options.concurrency, clients_of(shape, options)
            ):
                taken: dict[str, list[Row]] = {server: [] for server in servers}
                for server in by_turns(servers, options.rounds):
                    target, processes = servers[server]
                    measurement = Measurement(
                        target, processes, SHAPES[shape], options.duration_s, next(seeds)
                    )
                    row = {"server": server, "shape": shape, "concurrency": concurrency}
                    row |= {"client": client}
                    row |= await measurement.under(client, concurrency, options.aiperf)
                    print(msgspec.json.encode(row).decode(), file=sys.stderr)
                    taken[server].append(row)
                rows += [middle(each) for each in taken.values()]
    return rows


def by_turns(servers: Iterable[str], num_rounds: int) -> Iterator[str]:
    """Yields the servers of each round; what is measured first finds the machine rested."""
    order = list(servers)
    for _ in range(num_rounds):
        yield from order
        order = order[::-1]


def middle(rows: Sequence[Row]) -> Row:
    """Returns the row with the median throughput, and the sum of all errors."""
    by_speed = sorted(rows, key=lambda row: row["requests_per_s"])
    num_errors = sum(row["num_errors"] for row in rows)
    return {**by_speed[(len(rows) - 1) // 2], "num_errors": num_errors}


def clients_of(shape: str, options: argparse.Namespace) -> list[str]:
    has_aiperf = options.aiperf is not None and shape == "split"
    return [*options.client, *(["aiperf"] if has_aiperf else [])]


async def hold(options: argparse.Namespace) -> None:
    """Prints the URLs for external clients, and afterwards the CPU time used."""
    for shape in options.shape:
        async with started(shape, options) as servers:
            before = {name: cpu_s(processes) for name, (_, processes) in servers.items()}
            for name, (target, _) in servers.items():
                print(f"{shape} {name}: {target.url} {target.model} {target.api_key}", flush=True)
            await asyncio.to_thread(input, "Enter ends it.\n")
            for name, (_, processes) in servers.items():
                after = cpu_s(processes)
                spent = {each: round(after[each] - before[name][each], 2) for each in after}
                print(f"{shape} {name}, seconds of CPU: {spent}")


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """Compares with the peer of the same run, or else with its published figures."""
    bars = [at_most("answers with another number of events", _num_errors(rows), 0, "answers")]
    for (shape, concurrency), (reference, client, bar) in REFERENCES.items():
        ours = _best(rows, "hearth", shape, concurrency, client)
        theirs = _best(rows, "dynamo", shape, concurrency, client)
        if ours is None and _best(rows, "dynamo", shape, concurrency) is not None:
            client = "any client"
            ours = _best(rows, "hearth", shape, concurrency)
            theirs = _best(rows, "dynamo", shape, concurrency)
        against = f"{reference:g} of a run before" if theirs is None else f"{theirs:g} beside it"
        if ours is not None:
            name = f"{shape}, {concurrency} clients, {client}: requests/s over Dynamo's {against}"
            bars.append(at_least(name, ours / (theirs or reference), bar, "x"))
    return bars


def _num_errors(rows: Sequence[Row]) -> int:
    """Returns those of the peer, too: a ratio to a server that fails says nothing."""
    return sum(row["num_errors"] for row in rows)


def _best(
    rows: Sequence[Row], server: str, shape: str, concurrency: int, client: str | None = None
) -> float | None:
    """Returns the best of all clients, unless one is named: each server gets its most
    favourable one.
    """
    wanted = (server, shape, concurrency)
    found = [row for row in rows if (row["server"], row["shape"], row["concurrency"]) == wanted]
    named = [row for row in found if client in (None, row["client"])]
    return max((row["requests_per_s"] for row in named), default=None)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    add("--concurrency", type=int, nargs="+", default=[16, 64, 256])
    add("--client", choices=list(MANNERS), nargs="+", default=list(MANNERS))
    add("--duration-s", type=float, default=10.0, help="duration of each row")
    add("--rounds", type=int, default=1, help="rounds of each row; the median is reported")
    add("--step-s", type=float, default=0.0, help="duration of an engine step")
    add("--peer", type=Path, help="virtual environment with Dynamo, measured alternately")
    add("--aiperf", type=Path, help="virtual environment with AIPerf, for `split`")
    add("--hold", action="store_true", help="only start the servers, for external clients")
    add("--seed", type=int, default=1)
    add("--name", default="control_plane", help="results/NAME.json")
    options = parser.parse_args(argv)
    if options.hold:
        uvloop.run(hold(options))
        return 0
    rows = uvloop.run(run(options))
    command = ["-m", "benchmarks.control_plane", *argv]
    is_full = options.name != parser.get_default("name") or all(
        set(getattr(options, each)) >= set(parser.get_default(each))
        for each in ("shape", "concurrency", "client")
    )
    write_result(options.name, rows, bars_of(rows), command, is_full=is_full)
    return 1 if _num_errors(rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
