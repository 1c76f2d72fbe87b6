"""Two ranks on two hosts with a slow link: what the planner chooses, and what BF16 exchange saves.

Each rank is a process with one thread and half of a model of 8 layers, hidden 2048, with random
weights. They exchange over Gloo, whose connection passes a relay with the rate and the latency of
the link. The limit is the link: bytes over its rate, and a latency for each exchange. Without a
slow link a pipeline of two stages with one step in flight would lose to two ranks a layer.

    python -m benchmarks.parallel.slow_links [--rounds 8] [--turns 2]

Cases run by turns. A step ends when its tokens are at the first rank's host, as with a leader.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import Bar, Row, at_least, at_most, write_result
from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.models.checkpoint_config import read_config
from shared.engine.parallel.lanes import NUM_LANES
from shared.engine.parallel.links import Host, HostLink, Link, LinkTable
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.rank_mesh import RankMesh
from shared.engine.parallel.transport.collectives import GlooTransport, open_store, serve_store
from shared.engine.planning.model_shape import model_shape
from shared.engine.planning.parallel_plan import (
    ParallelPlan,
    all_plans,
    choose_plan,
    plan_of,
)
from shared.engine.planning.step_bytes import SUMS_PER_LAYER
from shared.numerics import Activations, exchange_of
from shared.telemetry.log import configure_logging
from tests.support.relay import SlowRelay

GBIT_PER_S = 125e6
KEY = "ranks"  # key of the rendezvous
RANK = "--rank"  # in a rank's process, which reads its options from standard input
BLOCK_SIZE, NUM_BLOCKS = 16, 64
WAIT_S = 120.0  # a first run compiles
ADDRESSES = ("127.0.0.1", "127.0.0.2")  # addresses of the hosts
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Case:
    name: str
    latency_s: float
    query_lens: tuple[int, ...]
    activations: Activations = "plain"
    shape: tuple[int, int] | None = None  # None means the planner's choice
    has_gemm: bool = True  # False: the sums of its layers alone, without waits for products

    @property
    def link(self) -> Link:
        return Link(self.latency_s, GBIT_PER_S)


DECODE, PREFILL = (1,) * 8, (512,)
CASES = (
    Case("decode of 8, chosen", 0.01, DECODE),
    Case("decode of 8, shared layers", 0.01, DECODE, shape=(2, 1)),
    Case("prefill of 512, plain", 0.0002, PREFILL, shape=(2, 1)),
    Case("prefill of 512, BF16 exchange", 0.0002, PREFILL, "bf16-exchange", (2, 1)),
    Case("its sums, plain", 0.0002, PREFILL, "plain", (2, 1), has_gemm=False),
    Case("its sums, BF16 exchange", 0.0002, PREFILL, "bf16-exchange", (2, 1), has_gemm=False),
)


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────


class RelayedStore(dist.Store):
    """Publishes the relay's port in place of this rank's own, which the relay looks up."""

    def __init__(self, store: dist.Store, relay_port: int) -> None:
        super().__init__()
        self._store = store
        self._port = relay_port.to_bytes(2, "big")

    def set(self, key: str, value: bytes) -> None:
        place = value.find(b"\x02\x00", 16)
        own = value[place + 2 : place + 4]  # the port of a sockaddr_in: family, port, address
        self._store.set(f"port of {key[-1]}", own)
        self._store.set(key, value[: place + 2] + self._port + value[place + 4 :])

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


class TimedTransport(GlooTransport):
    """A transport that adds up the `seconds` of its exchanges, including waits for the other
    rank.
    """

    seconds = 0.0

    def all_gather(self, x: Tensor) -> list[Tensor]:
        began_at = time.perf_counter()
        found = super().all_gather(x)
        self.seconds += time.perf_counter() - began_at
        return found

    def swap(self, x: Tensor, rank: int, out: Tensor) -> None:
        began_at = time.perf_counter()
        super().swap(x, rank, out)
        self.seconds += time.perf_counter() - began_at


class SumsAlone:
    """The exchanges of a step's layers alone, with partial sums that are ready."""

    def __init__(self, mesh: RankMesh, num_tokens: int) -> None:
        self._mesh = mesh
        num_lanes = NUM_LANES // mesh.shape.tp
        self._lanes = torch.randn(num_lanes, num_tokens, CONFIG["hidden_size"])
        self._num_sums = SUMS_PER_LAYER * CONFIG["num_hidden_layers"]

    def run(self, _step: Any) -> None:
        for _ in range(self._num_sums):
            self._mesh.add(self._lanes, torch.bfloat16)


def run_rank(options: dict[str, Any]) -> None:
    """Rank 0 says when steps begin and end, and their times."""
    rank, shape = options["rank"], MeshShape(*options["shape"])
    configure_logging(f"rank-{rank}")  # stdout has the messages to the benchmark alone
    torch.set_num_threads(1)
    store = RelayedStore(
        open_store("127.0.0.1", options["store"], KEY, WAIT_S), options["relays"][rank]
    )
    transport = TimedTransport(store, shape, rank, ADDRESSES[rank], WAIT_S)
    mesh = RankMesh(transport, exchange_of(options["activations"]))
    setup = RankSetup(
        model_dir=options["folder"],
        options=LoadOptions(
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            activations=options["activations"],
            load_format="dummy",
        ),
        max_blocks=NUM_BLOCKS,
        num_threads=1,
        kv=(),
        masks=-1,
    )
    executor: Any = SumsAlone(mesh, sum(options["query_lens"]))
    if options["has_products"]:
        executor = load_rank(setup, mesh).computer
    step = idle_step(BLOCK_SIZE, options["query_lens"])
    executor.run(step)
    meet(transport, rank)
    if rank == 0:
        print("begin", flush=True)
        input()
    steps = [timed_step(executor, step, transport, shape, rank) for _ in range(options["rounds"])]
    meet(transport, rank)
    if rank == 0:
        print(json.dumps(steps), flush=True)
        input()


def timed_step(
    executor: Any, step: Any, transport: TimedTransport, shape: MeshShape, rank: int
) -> tuple[float, float]:
    """Returns the seconds of a step, until its tokens are at the leader's host, and
    of its exchanges.
    """
    transport.seconds, began_at = 0.0, time.perf_counter()
    executor.run(step)
    if shape.answering_rank != 0:
        tokens = torch.zeros(len(step.query_lens), dtype=torch.int32)
        if rank == 0:
            transport.recv(tokens, shape.answering_rank)
        elif rank == shape.answering_rank:
            transport.send(tokens, 0)
    return time.perf_counter() - began_at, transport.seconds


def meet(transport: GlooTransport, rank: int) -> None:
    token = torch.zeros(1)
    transport.swap(token, 1 - rank, token.clone())


# ── the benchmark ────────────────────────────────────────────────────────────────────────────────


def plans_of(case: Case, folder: str) -> list[ParallelPlan]:
    hosts = Host("a", 1), Host("b", 1)
    table = LinkTable(hosts, (HostLink(("a", "b"), case.link),))
    model = model_shape(
        read_config(Path(folder)),
        item_bytes=2,
        num_tokens=sum(case.query_lens),
        exchange=exchange_of(case.activations),
        rank_bytes_per_s=table.rank_bytes_per_s,
        num_sampled=len(case.query_lens),
    )
    return all_plans(table, model)


@contextmanager
def ranks(options: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Yields rank 0."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.parallel.slow_links", RANK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in ADDRESSES
    ]
    try:
        for rank, each in enumerate(started):
            say(each.stdin, json.dumps({**options, "rank": rank}))
        yield started[0]
    finally:
        for each in started:
            each.kill()
            each.wait()


def say(pipe: IO[str] | None, line: str) -> None:
    assert pipe is not None
    pipe.write(f"{line}\n")
    pipe.flush()


def measured(case: Case, shape: MeshShape, folder: str, rounds: int) -> tuple[list[Any], float]:
    """Returns the seconds of steps and of their exchanges, and bytes of a step."""
    store, port = serve_store("127.0.0.1")

    def target(rank: int) -> tuple[str, int]:
        return ADDRESSES[rank], int.from_bytes(store.get(f"{KEY}/port of {rank}"), "big")

    relays = [
        SlowRelay(
            partial(target, rank),
            host=address,
            bytes_per_s=case.link.bytes_per_s,
            latency_s=case.latency_s,
        )
        for rank, address in enumerate(ADDRESSES)
    ]
    options = {
        "shape": [shape.tp, shape.pp],
        "store": port,
        "relays": [each.port for each in relays],
        "folder": folder,
        "activations": case.activations,
        "query_lens": case.query_lens,
        "has_products": case.has_gemm,
        "rounds": rounds,
    }
    with ranks(options) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "begin\n"
        before = sum(each.num_bytes for each in relays)
        say(first.stdin, "go")
        times = json.loads(first.stdout.readline())
        num_bytes = sum(each.num_bytes for each in relays) - before
    for each in relays:
        each.close()
    return times, num_bytes / rounds


def plan_for(case: Case, folder: str) -> ParallelPlan:
    plans = plans_of(case, folder)
    return choose_plan(plans) if case.shape is None else plan_of(plans, *case.shape)


def row_of(case: Case, plan: ParallelPlan, turns: list[tuple[list[Any], float]]) -> Row:
    times = [each for steps, _ in turns for each in steps]
    num_bytes = statistics.mean(each for _, each in turns)
    step_s = statistics.median(each for each, _ in times)
    return {
        "case": case.name,
        "latency_ms": case.latency_s * 1e3,
        "tp": plan.tp,
        "pp": plan.pp,
        "tokens_per_s": round(sum(case.query_lens) / step_s, 1),
        "step_ms": round(step_s * 1e3, 2),
        "exchange_ms": None
        if plan.tp == 1
        else round(statistics.median(each for _, each in times) * 1e3, 2),
        "planned_exchange_ms": round(plan.exchange_s * 1e3, 2),
        "bytes_per_step": round(num_bytes),
        "planned_bytes": round(plan.num_bytes) if case.has_gemm else None,
    }


def bars_of(rows: list[Row]) -> list[Bar]:
    chosen, shared, *_, plain, bf16 = rows
    speedup = chosen["tokens_per_s"] / shared["tokens_per_s"]
    errors = [
        abs(each["bytes_per_step"] / each["planned_bytes"] - 1)
        for each in rows
        if each["planned_bytes"] is not None
    ]
    saved = bf16["exchange_ms"] / plain["exchange_ms"]
    return [
        at_least("tokens/s of the chosen plan over shared layers, 10 ms", speedup, 2.0, "x"),
        at_most("exchange time of sums, BF16 exchange over plain, 0.2 ms", saved, 0.75, "x"),
        at_most("largest error of planned bytes", max(errors) * 100, 2.0, "%"),
    ]


def main() -> None:
    if sys.argv[1:] == [RANK]:
        run_rank(json.loads(input()))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    turns: dict[Case, list[tuple[list[Any], float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        plans = {case: plan_for(case, folder) for case in CASES}
        for case in CASES * arguments.turns:
            shape = MeshShape(plans[case].tp, plans[case].pp)
            turns[case].append(measured(case, shape, folder, arguments.rounds))
    rows = [row_of(case, plans[case], turns[case]) for case in CASES]
    argv = ["-m", "benchmarks.parallel.slow_links", *sys.argv[1:]]
    write_result("slow_links", rows, bars_of(rows), argv)


if __name__ == "__main__":
    main()
