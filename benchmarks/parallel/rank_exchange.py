"""Time in which ranks of one host exchange what a decode step needs.

Each rank is a process with one thread. A model of 80 layers sums 160 times a token: 30 µs each are
4.8 ms. Rows: all-gathers and sums over shared memory and Gloo, and a step's record over the ring to
a rank and back. The limit is a copy of the same bytes by one thread; four ranks on two processors
cannot all run at once, and lose.

    python -m benchmarks.parallel.rank_exchange [--rounds 1000]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable

import msgspec
import torch

from benchmarks.report import Row, at_most, write_result
from services.client.load_test import percentile
from shared.engine.parallel.lanes import NUM_LANES
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.records import Record
from shared.engine.parallel.processes.ring import RingReader, RingWriter, create_ring
from shared.engine.parallel.rank_mesh import RankMesh, Transport
from shared.engine.parallel.transport.collectives import DistributedTransport
from shared.engine.parallel.transport.mesh_memory import create_mesh_memory
from shared.engine.parallel.transport.shared_memory_mesh import SharedMemoryTransport

LIMIT_S = 30.0
TARGET_US = 30.0
KIB = 1024
CASES = [
    *(("shared_memory", 2, size) for size in (8 * KIB, 64 * KIB, 1024 * KIB)),
    ("shared_memory", 4, 8 * KIB),
    ("gloo", 2, 8 * KIB),
]

Times = dict[str, list[float]]  # name of an exchange -> seconds of each round


def forked(num_ranks: int, work: Callable[[int], Times | None]) -> Times:
    """Runs `work` in a process for each rank, and returns the result of rank 0."""
    read_fd, write_fd = os.pipe()
    pids = []
    for rank in range(num_ranks):
        if (pid := os.fork()) == 0:
            torch.set_num_threads(1)
            found = work(rank)
            if rank == 0:
                with os.fdopen(write_fd, "wb") as pipe:
                    pipe.write(msgspec.msgpack.encode(found))
            os._exit(0)
        pids.append(pid)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        data = pipe.read()
    for pid in pids:
        os.waitpid(pid, 0)
    return msgspec.msgpack.decode(data, type=Times)


def timed(rounds: int, call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(rounds + rounds // 10):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[rounds // 10 :]


def exchange(transport: str, tp: int, num_bytes: int, rounds: int) -> Times:
    shape = MeshShape(tp)
    fd = create_mesh_memory(shape)
    with tempfile.TemporaryDirectory() as folder:

        def connect(rank: int) -> Transport:
            if transport == "shared_memory":
                return SharedMemoryTransport(fd, shape, rank, LIMIT_S)
            address = f"file://{folder}/ranks"
            return DistributedTransport(address, shape, rank, limit_s=LIMIT_S)

        def work(rank: int) -> Times:
            link = connect(rank)
            mesh = RankMesh(link)
            row = torch.ones(1, num_bytes // 4)
            lanes = torch.ones(NUM_LANES // tp, 1, num_bytes // 4)
            return {
                "all-gather": timed(rounds, lambda: link.all_gather(row)),
                "add": timed(rounds, lambda: mesh.add(lanes, torch.bfloat16)),
            }

        found = forked(tp, work)
    os.close(fd)
    return found


def ring_round_trips(num_bytes: int, rounds: int) -> Times:
    steps, answers = create_ring(1), create_ring(1)
    num_records = rounds + rounds // 10

    def work(rank: int) -> Times | None:
        if rank == 1:
            reader, writer = RingReader(steps, 0), RingWriter(answers, LIMIT_S)
            for _ in range(num_records):
                writer.write(reader.read(LIMIT_S) or Record(0, b""))
            return None
        writer, reader = RingWriter(steps, LIMIT_S), RingReader(answers, 0)
        data, numbers = bytes(num_bytes), iter(range(num_records))

        def round_trip() -> None:
            writer.write(Record(next(numbers), data))
            reader.read(LIMIT_S)

        return {"round trip": timed(rounds, round_trip)}

    return forked(2, work)


def copies(num_bytes: int, rounds: int) -> Times:
    source, target = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    addresses = target.data_ptr(), source.data_ptr()
    return {"copy": timed(rounds, lambda: ctypes.memmove(*addresses, num_bytes))}


def rows_of(transport: str, num_ranks: int, num_bytes: int, times: Times) -> list[Row]:
    rows = []
    for what, seconds in times.items():
        names = {"transport": transport, "what": what, "ranks": num_ranks, "kib": num_bytes / KIB}
        percentiles = {f"p{p}_us": round(percentile(seconds, p) * 1e6, 1) for p in (50, 90, 99)}
        rows.append(names | percentiles)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    rows = [
        row
        for transport, tp, num_bytes in CASES
        for row in rows_of(transport, tp, num_bytes, exchange(transport, tp, num_bytes, rounds))
    ]
    rows += rows_of("ring", 1, KIB, ring_round_trips(KIB, rounds))
    for num_bytes in (8 * KIB, 64 * KIB, 1024 * KIB):
        rows += rows_of("memcpy", 1, num_bytes, copies(num_bytes, rounds))
    bars = [
        at_most("p50 of an all-gather of 8 KiB by 2 ranks", rows[0]["p50_us"], TARGET_US, "µs"),
    ]
    write_result("rank_exchange", rows, bars, ["-m", "benchmarks.parallel.rank_exchange"])


if __name__ == "__main__":
    main()
