"""A whole cluster on this machine over HTTP: the time until it is ready, TTFT, ITL and tokens/s.

nats-server, Redis, gateway, scheduler, KV index, and one worker for both roles, or a prefill and a
decode worker that share the GPU. The model has Llama-3.1-8B's shape, dummy weights and the demo
model's tokenizer: each token that is sampled must be one of its 2,048, as a client counts text.
services/client/load_test.py describes the figures. Dry, the same runs on the CPU with small shapes.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gpu_kit.models.worker_starts import start_rows
from benchmarks.gpu_kit.part_process import ROOT
from benchmarks.gpu_kit.session import Row, Session, Unavailable
from services.client.load_test import LoadTestOptions, measure
from services.local.cluster import LocalCluster
from services.local.gpus import count_by_driver
from services.local.plan import UpOptions
from shared.background import start_awaited
from shared.clock import MonotonicClock

TOKENIZER = ROOT / "shared" / "demo_model"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
ROLES = {  # processes by role
    "both": {"num_prefill": 0, "num_decode": 0, "num_both": 1},
    "apart": {"num_prefill": 1, "num_decode": 1, "num_both": 0},
}
SHARED_KV_BYTES = 12 << 30  # of each of two workers on one GPU: 98,304 tokens
DRY_KV_BYTES = 16 << 20
LOADS, DRY_LOADS = (1, 16, 64), (1, 3)  # concurrent requests
# More input than a decode worker computes by itself.
LOAD = LoadTestOptions(num_input_tokens=1024, num_output_tokens=64, duration_s=6.0)
DRY_LOAD = LoadTestOptions(num_input_tokens=64, num_output_tokens=4, num_requests=3)
STOP_S, KILL_S = 6.0, 4.0  # time for the cluster to stop; after which it is killed
LEAST_S = 5.0  # a load with less time is left out
LOG_BYTES = 6000  # shown of each process's log


def run(session: Session, roles: str) -> None:
    with model_folder(session) as model:
        if session.mode == "compile":
            compile_worker(session, model)
            return
        if not session.is_dry and count_by_driver() == 0:
            raise Unavailable("the driver has no CUDA device")
        uvloop.run(serve(session, roles, model))


@contextmanager
def model_folder(session: Session) -> Iterator[Path]:
    """A checkpoint without weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dummy"
        folder.mkdir()
        for each in COPIED:
            shutil.copy(TOKENIZER / each, folder / each)
        (folder / "config.json").write_text(json.dumps(model_config(session)))
        yield folder


def model_config(session: Session) -> dict[str, Any]:
    own = json.loads((TOKENIZER / "config.json").read_text())
    return session.shapes.config | {key: own[key] for key in ("vocab_size", "eos_token_id")}


def compile_worker(session: Session, model: Path) -> None:
    """Compiles what a worker does at its start, in either mode."""
    from benchmarks.gpu_kit.model_steps.loading import load

    for mode in ("fast", "exact"):
        executor, _ = load(session, model, mode)
        asyncio.run(executor.close())


def up_options(session: Session, roles: str, model: Path) -> UpOptions:
    kv_cache_bytes = SHARED_KV_BYTES if roles == "apart" else None
    return UpOptions(
        model_dir=model,
        http_port=0,
        device="cpu" if session.is_dry else "cuda:0",
        num_gpus=0 if session.is_dry else 1,
        load_format="dummy",
        kv_cache_bytes=DRY_KV_BYTES if session.is_dry else kv_cache_bytes,
        **ROLES[roles],
    )


async def serve(session: Session, roles: str, model: Path) -> None:
    async with running(session, roles, model) as cluster:
        for concurrency in DRY_LOADS if session.is_dry else LOADS:
            case = f"{roles}, {concurrency} at a time"
            if session.left_s - STOP_S < LEAST_S:
                session.add(case=case, left_out="no time left")
                continue
            try:
                async with asyncio.timeout(left_s(session)):
                    (row,) = await measure(*cluster, load_of(session, concurrency))
            except TimeoutError:
                session.add(case=case, left_out="it takes more time than was left")
                continue
            session.add(figures(session, row), case=case)
            if row["num_errors"]:
                session.failures.append(case)


def load_of(session: Session, concurrency: int) -> LoadTestOptions:
    import msgspec

    load = DRY_LOAD if session.is_dry else LOAD
    return msgspec.structs.replace(load, concurrency=(concurrency,))


def figures(session: Session, row: Row) -> Row:
    """Returns the columns of a load. A dry run has no times."""
    if session.is_dry:
        return {name: row[name] for name in ("num_requests", "num_errors", "output_tokens")}
    return {name: value for name, value in row.items() if name != "load"}


def left_s(session: Session) -> float | None:
    """Returns the seconds until the cluster must stop; None without a limit."""
    return None if math.isinf(session.left_s) else session.left_s - STOP_S


@asynccontextmanager
async def running(session: Session, roles: str, model: Path) -> AsyncIterator[tuple[str, str]]:
    """Starts a cluster and yields its URL and key. Prints the end of each process's log."""
    ready: dict[str, float] = {}
    began = time.perf_counter()

    def report(process_id: str, event: str, details: str) -> None:
        if event == "ready":
            ready[f"{process_id}_s"] = round(time.perf_counter() - began, 2)

    with tempfile.TemporaryDirectory() as folder:
        options = up_options(session, roles, model)
        cluster = LocalCluster(options, MonotonicClock(), state_parent=Path(folder), report=report)
        starting = start_awaited(cluster.start())
        try:
            await asyncio.wait({starting}, timeout=left_s(session))
            if not starting.done():
                raise TimeoutError("the cluster is not ready in time")
            await starting
            seconds = round(time.perf_counter() - began, 2)
            times = {} if session.is_dry else {"seconds": seconds, **ready}
            session.add(times, case=f"{roles}, start", kv_cache_bytes=options.kv_cache_bytes)
            add_stages(session, cluster.state_dir / "logs")
            yield cluster.url, cluster.api_key
        finally:
            print_logs(Path(folder))
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if not starting.cancelled() and starting.exception() is None:
                asyncio.get_running_loop().call_later(KILL_S, cluster.kill)
                await cluster.stop()


def add_stages(session: Session, logs: Path) -> None:
    """Adds rows of each worker's start. A dry run's have the names of the stages alone."""
    for row in start_rows(logs):
        case = f"start of {row.pop('of')}"
        session.add({"stages": sorted(row)} if session.is_dry else row, case=case)


def print_logs(folder: Path) -> None:
    for path in sorted(folder.glob("*/logs/*.log")):
        print(f"== {path.name}\n{path.read_text(errors='replace')[-LOG_BYTES:]}", flush=True)
