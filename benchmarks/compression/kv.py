"""KV push over TCP at given bandwidths, uncompressed and with compression chosen by the link.

Run: python -m benchmarks.compression.kv [--repetitions 3] [--seconds 2.0]

The KV is the demo model's, in BF16, of this repository's text. Linux paces what a socket sends
(SO_MAX_PACING_RATE), below everything that is measured. Each repetition opens two new connections
to one receiving process, one of which may compress; `auto` has to decide, and its trial counts.
`mbps` are MB/s, of payload except for the bandwidth. Each frame's checksum is of its payload: one
changed bit would be rejected, and end the benchmark.

On two cores, which also fill and copy the frames at both ends, compression is slower on a fast
link: there the gate has to disable it. The codec alone is also measured, in GB/s of payload on one
thread and in bits per word.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from tokenizers import Tokenizer

from benchmarks.kv_transfer import PLACEMENT, Bytes, Swallow, fill_from, process
from benchmarks.report import Bar, Row, at_least, write_result
from shared.engine.kv.kv_codec import Bf16FrameCodec
from shared.engine.step import KvRun
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import FRAME_BYTES, FRAMES_UNDER_WAY
from shared.kv_wire.push_link import StagedLink
from shared.messages import DataPlaneAddress
from tests.support.engine.model_worker import Worker
from tests.support.engine.rig import new_sequence
from tests.support.records import frame_header

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "shared" / "demo_model"
NUM_SEQUENCES, NUM_FRAMES = 2, 12  # each sequence fills the model's context
BANDWIDTHS = (25e6, 125e6, 312.5e6, 625e6, 1.25e9, None)  # bytes/s; None: unlimited
MIN_FRAMES, MAX_FRAMES = 96, 512
SO_MAX_PACING_RATE = 47  # linux/asm-generic/socket.h
BARS = {25: 1.2, 125: 1.2}  # MB/s: minimum speedup; any other link must not be slower
NEVER_SLOWER = 0.95


def receive_frames(pipe: Connection) -> None:
    async def serve() -> None:
        server = await KvServer.start(instance_id=b"receiver--------", codec=Bf16FrameCodec())
        server.expect(PLACEMENT, Swallow())
        pipe.send_bytes(msgspec.msgpack.encode(server.address))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv_bytes)
        await server.close()

    uvloop.run(serve())


async def demo_kv() -> list[Bytes]:
    """Frames as a prefill worker would push them."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    pages = [ROOT / name / "README.md" for name in ("", "services", "kernels", "benchmarks")]
    paths = [*pages, *sorted((ROOT / "shared" / "kv_wire").glob("*.py"))]
    text = "\n".join(path.read_text() for path in paths)
    worker = Worker(DEMO_MODEL, "bfloat16", num_blocks=NUM_SEQUENCES * 512, budget=512)
    per_token = worker.executor.kv_layout.bytes_per_token
    num_tokens = FRAME_BYTES // per_token
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    frames = []
    for _ in range(NUM_SEQUENCES):
        prompt, token_ids = np.split(np.array(token_ids), [NUM_FRAMES * num_tokens])
        sequence = new_sequence(prompt.tolist(), None)
        await worker.run(sequence)
        for index in range(NUM_FRAMES):
            frame = np.empty(num_tokens * per_token, np.uint8)
            run = KvRun(sequence.block_tables[0], index * num_tokens, num_tokens)
            await worker.executor.read_kv(run, frame.data)
            frames.append(frame)
    await worker.executor.close()
    return frames


def pace(link: StagedLink, bandwidth: float | None) -> None:
    if bandwidth is None:
        return
    transport = link.stream._transport
    assert transport is not None
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(bandwidth))


async def push(link: StagedLink, kv: list[Bytes], num_frames: int) -> float:
    """Returns the seconds for `num_frames` frames, FRAMES_UNDER_WAY at a time."""
    frames = iter([kv[number % len(kv)] for number in range(num_frames)])

    async def worker() -> None:
        for frame in frames:
            await link.send(frame_header(frame.size, placement_id=PLACEMENT), fill_from(frame))

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(FRAMES_UNDER_WAY)))
    return time.perf_counter() - start


async def measure_link(
    target: DataPlaneAddress,
    bandwidth: float | None,
    kv: list[Bytes],
    repetitions: int,
    seconds: float,
) -> Row:
    num_frames = MAX_FRAMES
    if bandwidth is not None:
        num_frames = min(MAX_FRAMES, max(MIN_FRAMES, int(bandwidth * seconds / kv[0].size)))
    codecs = {"plain": None, "auto": Bf16FrameCodec()}
    rates: dict[str, list[float]] = {name: [] for name in codecs}
    num_compressed = 0
    for _ in range(repetitions):
        for name, codec in codecs.items():
            dialer = Dialer(5.0, codec=codec)
            link = await dialer.link(target)
            pace(link, bandwidth)
            rates[name].append(num_frames * kv[0].size / await push(link, kv, num_frames) / 1e6)
            num_compressed += dialer.compressed.num_frames
            await dialer.close()
    plain, auto = (statistics.median(each) for each in rates.values())
    return {
        "bandwidth_mbps": None if bandwidth is None else bandwidth / 1e6,
        "plain_mbps": round(plain, 1),
        "auto_mbps": round(auto, 1),
        "speedup": round(auto / plain, 3),
        "compressed_share": round(num_compressed / repetitions / num_frames, 3),
    }


def measure_codec(kv: list[Bytes]) -> Row:
    """Returns a row with the CPU seconds of the fastest of several frames."""
    codec, best = Bf16FrameCodec(), {"encode": np.inf, "decode": np.inf}
    coded, plain = bytearray(kv[0].size), bytearray(kv[0].size)
    num_bytes: list[int] = []
    for frame in kv:
        begun = time.thread_time()
        num_coded = codec.encode(frame.data, memoryview(coded))
        best["encode"] = min(best["encode"], time.thread_time() - begun)
        num_bytes.append(num_coded)
        begun = time.thread_time()
        is_whole = codec.decode(memoryview(coded)[:num_coded], memoryview(plain))
        best["decode"] = min(best["decode"], time.thread_time() - begun)
        if not is_whole or plain != frame.tobytes():
            raise AssertionError("a frame changed in the round trip")
    return {
        "codec": codec.name,
        "bits_a_word": round(16 * statistics.mean(num_bytes) / kv[0].size, 2),
        "encode_gbps": round(kv[0].size / best["encode"] / 1e9, 2),
        "decode_gbps": round(kv[0].size / best["decode"] / 1e9, 2),
    }


def bars_of(rows: list[Row]) -> list[Bar]:
    bars = []
    for row in rows:
        mbps = row["bandwidth_mbps"]
        name = "on loopback" if mbps is None else f"at {mbps:g} MB/s"
        bar = BARS.get(mbps, NEVER_SLOWER)
        bars.append(at_least(f"auto / plain {name}", row["speedup"], bar, "x"))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a measurement")
    options = parser.parse_args()
    with (
        process(receive_frames) as pipe,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as executor,
    ):
        address = msgspec.msgpack.decode(pipe.recv_bytes(), type=DataPlaneAddress)
        target = msgspec.structs.replace(address, unix_path="")
        kv = executor.run(demo_kv())
        rows = [
            executor.run(measure_link(target, each, kv, options.repetitions, options.seconds))
            for each in BANDWIDTHS
        ]
    command = ["-m", "benchmarks.compression.kv"]
    command += ["--repetitions", str(options.repetitions), "--seconds", str(options.seconds)]
    write_result("kv_compression", [*rows, measure_codec(kv)], bars_of(rows), command)


if __name__ == "__main__":
    main()
