"""Arrivals on a cluster of real processes whose workers take the step times of a stated device.

Gateway, scheduler, kv_index, nats-server, Redis and workers are processes on this machine; a worker
sleeps for the time of a step. The client reads each token of each stream over HTTP.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import uvloop

from benchmarks.roles.step_costs import word_of
from benchmarks.roles.virtual_fleet import Arrival, FleetOptions, FleetRun, Timeline
from benchmarks.serving.closed_loop import Target
from benchmarks.serving.cluster import SERVICES, hearth
from shared.engine.executors.timing_executor import STATE_BYTES
from shared.messages import Role
from shared.subjects import CredentialRole
from tests.support.cluster.clients import send
from tests.support.cluster.service_processes import MODEL

BLOCK_SIZE = 16
TOKEN_IDS = range(300, 2000)  # the demo model's vocabulary without special tokens
FIRST_S = 1.0  # time before the first arrival


def run_real_fleet(options: FleetOptions, arrivals: Sequence[Arrival]) -> FleetRun:
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(_run(options, arrivals, Path(folder)))


async def _run(options: FleetOptions, arrivals: Sequence[Arrival], folder: Path) -> FleetRun:
    names = [f"worker-{number}" for number in range(len(options.workers))]
    services: dict[str, CredentialRole] = {**SERVICES, **dict.fromkeys(names, "worker")}
    commands = {
        name: _command(options, announced)
        for name, announced in zip(names, options.workers, strict=True)
    }
    async with hearth(services, folder, step_s=0.0, commands=commands) as (target, _):
        return FleetRun(await _send_all(target, arrivals), [])


def _command(options: FleetOptions, announced: tuple[Role, ...]) -> list[str]:
    command = ["-m", "benchmarks.serving.worker", word_of(options.cost), "worker"]
    command += MODEL
    command += ["--max-batch-tokens", str(options.max_batch_tokens)]
    command += ["--max-sequences", str(options.max_sequences), "--block-size", str(BLOCK_SIZE)]
    command += ["--kv-cache-bytes", str(options.num_blocks * BLOCK_SIZE * STATE_BYTES)]
    return command if len(announced) > 1 else [*command, "--announce", announced[0]]


async def _send_all(target: Target, arrivals: Sequence[Arrival]) -> list[Timeline]:
    began_at = time.monotonic() + FIRST_S
    sending = (_send(target, number, each, began_at) for number, each in enumerate(arrivals))
    return await asyncio.gather(*sending)


async def _send(target: Target, number: int, arrival: Arrival, began_at: float) -> Timeline:
    """Sends a request whose prompt shares no prefix with others."""
    body = {
        "model": target.model,
        "prompt": Random(number).choices(TOKEN_IDS, k=arrival.num_input_tokens),
        "max_tokens": arrival.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    await asyncio.sleep(began_at + arrival.at_s - time.monotonic())
    exchange = await send(target.url, target.api_key, "/v1/completions", body)
    timeline = Timeline(arrival, exchange.started, exchange.arrivals)
    timeline.is_finished = exchange.is_successful
    return timeline
