"""What requests with images cost the other streams of a gateway: the lateness of its event loop.

    python -m benchmarks.serving.gateway_images [--requests 60]

A chat with one JPEG of 1 MP (1152 x 864, some 0.5 MB in base64) is prepared again and again, as a
gateway does it after the body has arrived: the body goes to a preparation process, which decodes,
resizes and tokenizes; 13 tiles of 512 come back, 10 MB, and the blocks of the prompt are hashed. A
timer of the same loop stands for the tokens of another stream. Bars: it is at most 10 ms late, p99,
on a machine that does nothing else; and the loop itself is never busy for as long. Last comes the
largest picture that a gateway takes by default, with transparency: the process that reads pictures
has at most 200 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop
from PIL import Image

from benchmarks.report import Row, at_most, write_result
from services.gateway.body_budget import BodyBudget
from services.gateway.dialects.openai.dialect import CHAT
from services.gateway.models.model_check import checked_files
from services.gateway.models.preparation_pools import PREPARATION_PROCESS
from services.gateway.models.served_text import ServedModel, TextLoader, process_setup
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.request.prepared_bodies import with_prompts
from services.gateway.request.preparer import Preparer
from services.gateway.request.request_builder import RequestBuilder
from services.gateway.structured.grammars.checks import GrammarChecks
from services.gateway.structured.tools.families import PLAIN
from services.gateway.text.model_files import ModelFiles
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.randomness import SystemRandomness
from shared.tenancy.tenant import TenantRecord
from tests.support.records import model_card
from tests.support.services.vision_dir import write_vision_dir

PAYLOAD_BYTES = 8 << 20
TICK_S = 0.002
TENANT = TenantRecord(tenant_id="t")
LATE_BAR_MS = 10.0
PEAK_BAR_MIB = 200
LARGE_SIDE = 7000  # pixels
MODULE = "benchmarks.serving.gateway_images"


def jpeg(width: int = 1152, height: int = 864) -> bytes:
    """Returns a picture of some detail."""
    rng = np.random.default_rng(1)
    small = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    noise = rng.integers(-12, 13, (height, width, 3))
    buffer = BytesIO()
    pixels = np.clip(np.asarray(image).astype(int) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def large_png() -> bytes:
    """Returns a picture of 49 MP in RGBA."""
    small = np.random.default_rng(1).integers(
        0, 256, (LARGE_SIDE // 20, LARGE_SIDE // 20, 4), np.uint8
    )
    image = Image.fromarray(small).resize((LARGE_SIDE, LARGE_SIDE), Image.Resampling.NEAREST)
    buffer = BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def body_of(image: bytes, kind: str) -> bytes:
    url = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()


class Ticks(NamedTuple):
    """Of each time until the event, in seconds: `late`: how late a timer of TICK_S was; `busy`: the
    CPU time that the loop used meanwhile, which other processes do not lengthen.
    """

    late: list[float]
    busy: list[float]


async def tick(until: asyncio.Event) -> Ticks:
    ticks = Ticks([], [])
    while not until.is_set():
        began, used = time.perf_counter(), time.thread_time()
        await asyncio.sleep(TICK_S)
        ticks.late.append(time.perf_counter() - began - TICK_S)
        ticks.busy.append(time.thread_time() - used)
    return ticks


def quantile_ms(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(int(len(seconds) * share), len(seconds) - 1)] * 1e3


async def measure(model_dir: Path, num_requests: int) -> list[Row]:
    files = ModelFiles(model_dir)
    model = checked_files(files, PLAIN)
    setup = process_setup(model, "template", key="1")
    pool = PreparationPool(setup, module=PREPARATION_PROCESS)
    checks = GrammarChecks(pool)
    text = TextLoader(pool, checks, tool_format="template").text(model, setup)
    served = ServedModel(model_card(vocab_size=10_000, max_context_tokens=8192), text)
    clock, randomness = MonotonicClock(), SystemRandomness()
    config = GatewayConfig(nats_url="nats://n", process_id="g", redis_url="redis://r")
    preparer = Preparer.of(
        config,
        pool,
        lambda: 0,
        clock,
        randomness,
        max_payload_bytes=lambda: PAYLOAD_BYTES,
        budget=BodyBudget(),
    )
    builder = RequestBuilder(config, randomness)
    small, large = body_of(jpeg(), "jpeg"), body_of(large_png(), "png")

    async def request(data: bytes) -> float:
        began = time.perf_counter()
        prepared = await preparer.prepare_body(TENANT, served, CHAT.name, data, named="m")
        body = CHAT.fields.decode(prepared.body)
        (generation,) = with_prompts(CHAT.generations(body, "m"), prepared.prompts)
        builder.build(
            generation, served, tenant=TENANT, request_id="r", max_payload_bytes=PAYLOAD_BYTES
        )
        return time.perf_counter() - began

    async def beside(case: str, data: bytes, count: int) -> Row:
        until = asyncio.Event()
        ticking = asyncio.create_task(tick(until))
        took = [await request(data) for _ in range(count)]
        if not count:
            await asyncio.sleep(2.0)
        until.set()
        ticks = await ticking
        return {
            "case": case,
            "body KB": len(data) / 1e3,
            "request ms, median": statistics.median(took) * 1e3 if took else 0.0,
            "late ms, p50": quantile_ms(ticks.late, 0.5),
            "late ms, p99": quantile_ms(ticks.late, 0.99),
            "busy ms, p99": quantile_ms(ticks.busy, 0.99),
            "busy ms, most": quantile_ms(ticks.busy, 1.0),
            "process MiB, peak so far": max(map(peak_mib, pool.process_ids)),
        }

    await request(small)
    rows = [
        await beside("alone", small, 0),
        await beside(f"{num_requests} requests with an image of 1 MP", small, num_requests),
        await beside("one with 49 MP in RGBA", large, 1),
    ]
    await pool.close()
    await text.renderer.close()
    return rows


def peak_mib(pid: int) -> float:
    """Returns the most memory that the process has had at once."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("VmHWM"))
    return int(found.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"tile": 512, "patch": 16, "scale": 4, "longest_edge": 2048}
        model_dir = write_vision_dir(Path(folder) / "m", context=8192, **sizes)
        rows = uvloop.run(measure(model_dir, given.requests))
    bars = [
        at_most("p99 lateness beside images", float(rows[1]["late ms, p99"]), LATE_BAR_MS, "ms"),
        at_most("CPU of the loop at once", float(rows[1]["busy ms, most"]), LATE_BAR_MS, "ms"),
        at_most("process", float(rows[2]["process MiB, peak so far"]), PEAK_BAR_MIB, "MiB"),
    ]
    write_result("gateway_images", rows, bars, ["-m", MODULE, *sys.argv[1:]])


if __name__ == "__main__":
    main()
