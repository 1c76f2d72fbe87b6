"""KV push over TCP of stated bandwidths, as it is and with compression left to the link.

Run: python -m benchmarks.kv_compression [--repetitions 5] [--seconds 1.0]

Each bandwidth has two connections to one receiving process, of which one may compress; they take
turns. Linux paces what a socket sends (SO_MAX_PACING_RATE), beneath all that is measured; `mbps`
are MB/s, of payload but for the bandwidth. The payload is BF16 of a normal distribution, in which
exponents have the 2.5 to 2.6 bits that KV of trained models has. On two cores that also fill and
copy the frames, compression loses on a fast link: there the gate has to leave it off.

The codec alone, beside that: GB/s of payload on one thread, and bits a word. `--kv FILE` takes a
payload of one's own, the bytes of real KV as they travel.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from benchmarks.kv_transfer import (
    MIB,
    PLACEMENT,
    Bytes,
    Swallow,
    fill_from,
    frame_header,
    process,
)
from benchmarks.report import Bar, Row, at_least, write_result
from shared.engine.kv_codec import HighBytesCodec
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY
from shared.kv_wire.push_link import StagedLink
from shared.kv_wire.receiver import KvServer
from shared.messages import DataPlaneAddress

BANDWIDTHS = (12.5e6, 125e6, 312.5e6, 1.25e9, None)  # bytes a second; None: as fast as it goes
PAYLOAD_BYTES = 64 * MIB
NUM_WARM_UP_FRAMES = 24  # enough for the gate to have decided
MIN_FRAMES = 8
UNPACED_FRAMES = 256
SO_MAX_PACING_RATE = 47  # linux/asm-generic/socket.h


def receive_frames(pipe: Connection) -> None:
    async def serve() -> None:
        server = await KvServer.start(instance_id=b"receiver--------", codec=HighBytesCodec())
        server.expect(PLACEMENT, Swallow())
        pipe.send_bytes(msgspec.msgpack.encode(server.address))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv_bytes)
        await server.close()

    uvloop.run(serve())


def normal_kv() -> Bytes:
    values = np.random.default_rng(1).standard_normal(PAYLOAD_BYTES // 2, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def pace(link: StagedLink, bandwidth: float | None) -> None:
    if bandwidth is None:
        return
    transport = link.stream._transport
    assert transport is not None
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(bandwidth))


async def push(link: StagedLink, source: Bytes, num_frames: int) -> float:
    """Seconds for so many frames, FRAMES_UNDER_WAY at a time."""
    numbers = iter(range(num_frames))

    async def worker() -> None:
        for number in numbers:
            start = number * FRAME_BYTES % (source.size - FRAME_BYTES + 1)
            await link.send(frame_header(FRAME_BYTES), fill_from(source[start:][:FRAME_BYTES]))

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(FRAMES_UNDER_WAY)))
    return time.perf_counter() - start


async def measure_link(
    target: DataPlaneAddress,
    bandwidth: float | None,
    source: Bytes,
    repetitions: int,
    seconds: float,
) -> Row:
    num_frames = UNPACED_FRAMES
    if bandwidth is not None:
        num_frames = min(num_frames, max(MIN_FRAMES, int(bandwidth * seconds / FRAME_BYTES)))
    dialers = {"plain": Dialer(5.0), "auto": Dialer(5.0, codec=HighBytesCodec())}
    rates: dict[str, list[float]] = {name: [] for name in dialers}
    links = {}
    for name, dialer in dialers.items():
        links[name] = await dialer.link(target)
        pace(links[name], bandwidth)
        await push(links[name], source, NUM_WARM_UP_FRAMES)
    num_before = dialers["auto"].compressed.num_frames
    for _ in range(repetitions):
        for name, link in links.items():
            rates[name].append(num_frames * FRAME_BYTES / await push(link, source, num_frames))
    share = (dialers["auto"].compressed.num_frames - num_before) / (repetitions * num_frames)
    for dialer in dialers.values():
        await dialer.close()
    plain, auto = (statistics.median(rates[name]) for name in ("plain", "auto"))
    return {
        "bandwidth_mbps": None if bandwidth is None else bandwidth / 1e6,
        "plain_mbps": round(plain / 1e6, 1),
        "auto_mbps": round(auto / 1e6, 1),
        "speedup": round(auto / plain, 3),
        "compressed_share": round(share, 3),
    }


def measure_codec(source: Bytes) -> Row:
    """CPU seconds of the best of several passes; frames walk through the payload."""
    codec, best = HighBytesCodec(), {"encode": np.inf, "decode": np.inf}
    coded, plain = bytearray(FRAME_BYTES), bytearray(FRAME_BYTES)
    num_bytes: list[int] = []
    for start in range(0, source.size - FRAME_BYTES + 1, FRAME_BYTES):
        frame = source[start : start + FRAME_BYTES]
        begun = time.thread_time()
        num_coded = codec.encode(frame.data, memoryview(coded))
        best["encode"] = min(best["encode"], time.thread_time() - begun)
        num_bytes.append(num_coded or FRAME_BYTES)
        if not num_coded:
            continue
        begun = time.thread_time()
        if not codec.decode(memoryview(coded)[:num_coded], memoryview(plain)):
            raise AssertionError("a frame cannot be decoded")
        best["decode"] = min(best["decode"], time.thread_time() - begun)
        if plain != frame.tobytes():
            raise AssertionError("a frame came back changed")
    return {
        "codec": codec.name,
        "bits_a_word": round(16 * statistics.mean(num_bytes) / FRAME_BYTES, 2),
        "encode_gbps": round(FRAME_BYTES / best["encode"] / 1e9, 2),
        "decode_gbps": round(FRAME_BYTES / best["decode"] / 1e9, 2),
    }


def bars_of(rows: list[Row]) -> list[Bar]:
    bars = []
    for row in rows:
        if row["bandwidth_mbps"] == 125:
            bars.append(at_least("compressed / plain at 1 Gbit/s", row["speedup"], 1.25, "x"))
        if row["bandwidth_mbps"] is None:
            bars.append(at_least("auto / plain on loopback", row["speedup"], 0.95, "x"))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, about")
    parser.add_argument("--kv", type=Path, help="a file of KV bytes, at least one frame of them")
    options = parser.parse_args()
    source = normal_kv() if options.kv is None else np.fromfile(options.kv, np.uint8)
    if source.size < FRAME_BYTES:
        sys.exit(f"{options.kv}: {source.size} bytes are less than a frame of {FRAME_BYTES}")
    with (
        process(receive_frames) as pipe,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        address = msgspec.msgpack.decode(pipe.recv_bytes(), type=DataPlaneAddress)
        target = msgspec.structs.replace(address, unix_path="")
        rows = [
            runner.run(
                measure_link(target, bandwidth, source, options.repetitions, options.seconds)
            )
            for bandwidth in BANDWIDTHS
        ]
    command = ["-m", "benchmarks.kv_compression"]
    command += ["--repetitions", str(options.repetitions), "--seconds", str(options.seconds)]
    command += [] if options.kv is None else ["--kv", str(options.kv)]
    write_result("kv_compression", [*rows, measure_codec(source)], bars_of(rows), command)


if __name__ == "__main__":
    main()
