"""KV push between two processes of one machine, in GB/s: shared memory, and TCP plain or sealed.

Run: python -m benchmarks.kv_transfer [--repetitions 9] [--mib 512] [--under-way 2]
With NIXL: the same with the wheel's folder on PYTHONPATH; saved as kv_transfer_nixl.json.

Per frame the sender fills a slot and computes its checksum, the receiver copies it out and computes
that of the copy (TCP: of the received bytes), passes it to a sink that does nothing, and
acknowledges. `tcp_mac` and `tcp_aead` seal each frame instead: a tag of 16 bytes, without and with
encryption; `aead` is the encryption alone, of frames in memory. A sealed push is expected to take
the time of both. With the wheel (`pip install '.[nixl]'`) there are `nixl_tcp` and `nixl_shm`: the
receiver reads the sender's slots with NIXL, over TCP alone, or through shared memory. A few frames
are in flight. Compared in the same run, alternating: numpy's copy of
as many bytes, and a plain TCP socket over loopback between two processes, blocking `sendall` and
`recv_into`, no checksum.

KV comes from a cache much larger than the CPU's, so every sender cycles through a 256 MiB pool, and
so does the copy it is compared with (`memcpy`: source and destination cycle, cold). `memcpy_warm`
copies between the same two buffers repeatedly; up to the size of the caches it measures those. A
push is two copies and two checksums on two cores: it is slower than one copy, most of all a small
warm one.

Figures and bars are medians, of a sealed push that of the ratios of each repetition; the best
repetition is also reported, because a shared machine disturbs two processes that share a cache far
more than one that copies.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.report import Bar, Row, at_least, write_result
from shared.kv_wire.dialer import SECURITIES, Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY, Fill, FrameHeader, PushLink
from shared.kv_wire.ports.nixl_agent import Agent, NixlAgent
from shared.kv_wire.ports.nixl_port import NixlPort
from shared.kv_wire.sealing.cipher_choice import preferred_ciphers
from shared.kv_wire.sealing.ciphers import ciphers_of_sender
from shared.kv_wire.sealing.link_keys import LinkKeys
from shared.messages import DataPlaneAddress, LinkKey
from shared.randomness import SystemRandomness
from tests.support.records import frame_header

KIB, MIB = 1 << 10, 1 << 20
TRANSFER_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB)
POOL_BYTES = 256 * MIB
PLACEMENT = b"benchmark-------"
BARS = {"memfd": ("memcpy", 0.6), "tcp": ("raw_tcp", 0.7)}
SEALED_BAR = 0.85  # share of 1 / (1 / tcp + 1 / aead)
NIXL_WAYS = {"nixl_tcp": "tcp", "nixl_shm": "tcp,posix,sysv,cma,self"}
BAR_BYTES = (4 * MIB, 64 * MIB)

Bytes = npt.NDArray[np.uint8]
Key = LinkKey | None
Measure = Callable[[int, int], float]  # (transfer bytes, number of transfers) -> seconds


# ── the other process ────────────────────────────────────────────────────────────────────────────


class Swallow:
    async def frame(self, header: FrameHeader, payload: memoryview) -> None:
        pass

    def corrupt(self, header: FrameHeader) -> None:
        raise AssertionError("a frame was corrupted")

    def outside(self) -> None:
        raise AssertionError("the push has no bounds")

    def link_lost(self) -> None:
        pass


def agents_over(transports: str) -> Callable[[], Agent]:
    """UCX reads its variables anew for each agent."""

    def make() -> Agent:
        os.environ["UCX_TLS"] = transports
        return NixlAgent(f"benchmark-{os.urandom(8).hex()}")

    return make


def nixl_ways() -> dict[str, str]:
    """Returns UCX's transports by the name of the way; empty without the wheel."""
    return NIXL_WAYS if find_spec("nixl") else {}


def receive_frames(pipe: Connection) -> None:
    async def serve() -> None:
        servers = []
        for name, transports in nixl_ways().items():
            port = await NixlPort.start(agents_over(transports))
            server = await KvServer.start(instance_id=name.encode(), nixl=port)
            server.expect(PLACEMENT, Swallow())
            pipe.send_bytes(msgspec.msgpack.encode(server.address))
            servers.append(server)
        for security in SECURITIES:
            link_keys = None if security == "none" else LinkKeys(security, SystemRandomness())
            server = await KvServer.start(instance_id=security.encode(), link_keys=link_keys)
            server.expect(PLACEMENT, Swallow())
            link_key = None if link_keys is None else link_keys.key_for("sender")
            pipe.send_bytes(msgspec.msgpack.encode((server.address, link_key)))
            servers.append(server)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv_bytes)
        for server in servers:
            await server.close()

    uvloop.run(serve())


def receive_raw(pipe: Connection) -> None:
    """Receives transfers as announced on the pipe; answers each batch with one byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send_bytes(str(listener.getsockname()[1]).encode())
        connection, _ = listener.accept()
    buffer = memoryview(bytearray(FRAME_BYTES))
    with connection:
        while (order := pipe.recv_bytes()) != b"end":
            num_left = int(order)
            while num_left > 0:
                num_left -= connection.recv_into(buffer[: min(num_left, len(buffer))])
            connection.sendall(b"!")


@contextmanager
def process(target: Callable[[Connection], None]) -> Iterator[Connection]:
    """A new interpreter that exits when the block ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs,), daemon=True)
    child.start()
    try:
        yield ours
        ours.send_bytes(b"end")
        child.join(10)
    finally:
        if child.is_alive():
            child.kill()


# ── this process ─────────────────────────────────────────────────────────────────────────────────


class Pool:
    """Source (or destination) bytes, in consecutive slices that wrap around the pool."""

    def __init__(self) -> None:
        self._bytes = np.random.default_rng(1).integers(0, 256, POOL_BYTES, dtype=np.uint8)
        self._start = 0

    def take(self, num_bytes: int) -> Bytes:
        if self._start + num_bytes > POOL_BYTES:
            self._start = 0
        piece = self._bytes[self._start : self._start + num_bytes]
        self._start += num_bytes
        return piece


def copy_walking(source: Pool, destination: Pool) -> Measure:
    def measure(num_bytes: int, num_transfers: int) -> float:
        start = time.perf_counter()
        for _ in range(num_transfers):
            np.copyto(destination.take(num_bytes), source.take(num_bytes))
        return time.perf_counter() - start

    return measure


def copy_warm(num_bytes: int, num_transfers: int) -> float:
    source, destination = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    start = time.perf_counter()
    for _ in range(num_transfers):
        np.copyto(destination, source)
    return time.perf_counter() - start


def seal_frames(pool: Pool) -> Measure:
    link_key = LinkKeys("aead", SystemRandomness()).key_for("nobody")
    sealing = ciphers_of_sender(link_key, preferred_ciphers()[0], b"", b"").sealing

    def measure(num_bytes: int, num_transfers: int) -> float:
        start = time.perf_counter()
        for _ in range(num_transfers):
            for frame_bytes in frames_of(num_bytes):
                sealing.seal_payload(0, memoryview(pool.take(frame_bytes)))
        return time.perf_counter() - start

    return measure


def send_raw(pipe: Connection, connection: socket.socket, pool: Pool) -> Measure:
    def measure(num_bytes: int, num_transfers: int) -> float:
        start = time.perf_counter()
        pipe.send_bytes(str(num_bytes * num_transfers).encode())
        for _ in range(num_transfers):
            for frame_bytes in frames_of(num_bytes):
                connection.sendall(pool.take(frame_bytes).data)
        connection.recv(1)
        return time.perf_counter() - start

    return measure


def push_frames(
    run: Callable[..., float], link: PushLink, pool: Pool, num_under_way: int
) -> Measure:
    async def push(num_bytes: int, num_transfers: int) -> float:
        frames = iter([size for _ in range(num_transfers) for size in frames_of(num_bytes)])

        async def worker() -> None:
            for size in frames:
                header = frame_header(size, placement_id=PLACEMENT)
                await link.send(header, fill_from(pool.take(size)))

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(num_under_way)))
        return time.perf_counter() - start

    return lambda num_bytes, num_transfers: run(push(num_bytes, num_transfers))


def fill_from(source: Bytes) -> Fill:
    async def fill(view: memoryview) -> None:
        np.copyto(np.frombuffer(view, dtype=np.uint8), source)

    return fill


def frames_of(num_bytes: int) -> list[int]:
    return [min(FRAME_BYTES, num_bytes - start) for start in range(0, num_bytes, FRAME_BYTES)]


@contextmanager
def push_ways(num_under_way: int, source: Pool, destination: Pool) -> Iterator[dict[str, Measure]]:
    """Pushes to another process, over shared memory and over TCP with each security, and the
    encryption alone. Needs a thread without a running event loop.
    """
    with (
        process(receive_frames) as frames_pipe,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as executor,
    ):
        nixl_links: dict[str, PushLink] = {}
        nixl_targets = {
            name: msgspec.msgpack.decode(frames_pipe.recv_bytes(), type=DataPlaneAddress)
            for name in nixl_ways()
        }
        targets = [
            msgspec.msgpack.decode(frames_pipe.recv_bytes(), type=tuple[DataPlaneAddress, Key])
            for _ in SECURITIES
        ]
        nixl: dict[str, Dialer] = {}
        for name, address in nixl_targets.items():
            port = executor.run(NixlPort.start(agents_over(NIXL_WAYS[name])))
            nixl[name] = Dialer(connect_timeout_s=10.0, nixl=port)
            apart = msgspec.structs.replace(address, unix_path="")
            nixl_links[name] = executor.run(nixl[name].link(apart))
            assert nixl_links[name].plan.port == "nixl", nixl_links[name].plan
        memfd, tcp = Dialer(), Dialer()
        links = {"memfd": executor.run(memfd.link(targets[0][0])), **nixl_links}
        for security, (address, link_key) in zip(SECURITIES, targets, strict=True):
            apart = msgspec.structs.replace(address, unix_path="")
            name = "tcp" if security == "none" else f"tcp_{security}"
            links[name] = executor.run(tcp.link(apart, link_key))
        yield {
            **{
                name: push_frames(executor.run, link, source, num_under_way)
                for name, link in links.items()
            },
            "aead": seal_frames(destination),
        }
        for dialer in nixl.values():
            executor.run(dialer.close())
        executor.run(memfd.close())
        executor.run(tcp.close())


def measure_all(ways: dict[str, Measure], repetitions: int, total_bytes: int) -> list[Row]:
    """Measures all methods. The methods take turns, so that other load on the machine
    affects all of them.
    """
    rows: list[Row] = []
    for num_bytes in TRANSFER_BYTES:
        num_transfers = max(4, total_bytes // num_bytes // (4 if num_bytes < MIB else 1))
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repetitions + 1):  # the first touches the memory and is dropped
            for name, measure in ways.items():
                rates[name].append(num_bytes * num_transfers / measure(num_bytes, num_transfers))
        row: Row = {"transfer_kib": num_bytes // KIB}
        row["load"] = round(os.getloadavg()[0], 1)
        row["sealed_ratio"] = round(sealed_ratio(rates), 3)
        for name, found in rates.items():
            row[f"{name}_gbps"] = round(statistics.median(found[1:]) / 1e9, 3)
            row[f"{name}_best_gbps"] = round(max(found[1:]) / 1e9, 3)
        rows.append(row)
    return rows


def sealed_ratio(rates: dict[str, list[float]]) -> float:
    """Returns the median, over repetitions, of a sealed push's rate over that of a plain push and
    then the encryption alone: other load on the machine affects the three of one repetition alike.
    """
    found = zip(rates["tcp"][1:], rates["aead"][1:], rates["tcp_aead"][1:], strict=True)
    return statistics.median(sealed * (1 / plain + 1 / aead) for plain, aead, sealed in found)


def bars_of(rows: list[Row]) -> list[Bar]:
    bars = []
    for row in rows:
        num_kib = row["transfer_kib"]
        if num_kib * KIB not in BAR_BYTES:
            continue
        for way, (baseline, bar) in BARS.items():
            share = row[f"{way}_gbps"] / row[f"{baseline}_gbps"]
            bars.append(at_least(f"{way} / {baseline}, {num_kib // KIB} MiB", share, bar, "x"))
        name = f"tcp_aead / (tcp then aead), {num_kib // KIB} MiB"
        bars.append(at_least(name, row["sealed_ratio"], SEALED_BAR, "x"))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--mib", type=int, default=512, help="bytes per measurement")
    parser.add_argument(
        "--under-way", type=int, default=FRAMES_UNDER_WAY, help="frames sent at a time"
    )
    options = parser.parse_args()
    source, destination = Pool(), Pool()
    with (
        push_ways(options.under_way, source, destination) as pushes,
        process(receive_raw) as raw_pipe,
        socket.create_connection(("127.0.0.1", int(raw_pipe.recv_bytes()))) as raw,
    ):
        ways: dict[str, Measure] = {
            **pushes,
            "memcpy": copy_walking(source, destination),
            "memcpy_warm": copy_warm,
            "raw_tcp": send_raw(raw_pipe, raw, source),
        }
        rows = measure_all(ways, options.repetitions, options.mib * MIB)
    command = ["-m", "benchmarks.kv_transfer"]
    command += ["--repetitions", str(options.repetitions), "--mib", str(options.mib)]
    command += ["--under-way", str(options.under_way)]
    # the other result has no agents of NIXL beside it
    name = "kv_transfer_nixl" if nixl_ways() else "kv_transfer"
    write_result(name, rows, bars_of(rows), command)


if __name__ == "__main__":
    main()
