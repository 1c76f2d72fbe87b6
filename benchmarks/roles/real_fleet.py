"""Arrivals on a cluster of real processes whose workers take the step times of a stated device.

Gateway, scheduler, kv_index, nats-server, Redis and workers are processes on this machine; a worker
sleeps for the time of a step. The client reads each token of each stream over HTTP.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import httpx
import uvloop

from benchmarks.roles.step_costs import word_of
from benchmarks.roles.virtual_fleet import Arrival, FleetOptions, FleetRun, Timeline
from benchmarks.serving.closed_loop import Target
from benchmarks.serving.hearth import hearth
from services.cli.cluster.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from shared.engine.executors.timing_executor import STATE_BYTES
from shared.messages import Role
from shared.subjects import CredentialRole

BLOCK_SIZE = 16
TOKEN_IDS = range(300, 2000)  # of the demo model's vocabulary, without special tokens
FIRST_S = 1.0  # before the first arrival
SERVICES: dict[str, CredentialRole] = {
    "kv_index": "kv_index",
    "scheduler": "scheduler",
    "gateway": "gateway",
}


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
    command += ["--model-dir", str(DEMO_MODEL_DIR), "--model-name", DEMO_MODEL_NAME]
    command += ["--max-batch-tokens", str(options.max_batch_tokens)]
    command += ["--max-sequences", str(options.max_sequences), "--block-size", str(BLOCK_SIZE)]
    command += ["--kv-cache-bytes", str(options.num_blocks * BLOCK_SIZE * STATE_BYTES)]
    return command if len(announced) > 1 else [*command, "--announce", announced[0]]


async def _send_all(target: Target, arrivals: Sequence[Arrival]) -> list[Timeline]:
    limits, timelines = httpx.Limits(max_connections=None), [Timeline(each) for each in arrivals]
    headers = {"authorization": f"Bearer {target.api_key}"}
    async with (
        httpx.AsyncClient(
            base_url=target.url, headers=headers, limits=limits, timeout=120, trust_env=False
        ) as client,
        asyncio.TaskGroup() as tasks,
    ):
        began_at = asyncio.get_running_loop().time() + FIRST_S
        for number, timeline in enumerate(timelines):
            tasks.create_task(_send(client, target, number, timeline, began_at))
    return timelines


async def _send(
    client: httpx.AsyncClient, target: Target, number: int, timeline: Timeline, began_at: float
) -> None:
    """Its prompt is like no other's."""
    loop, arrival = asyncio.get_running_loop(), timeline.arrival
    tokens = Random(number).choices(TOKEN_IDS, k=arrival.num_input_tokens)
    body = {
        "model": target.model,
        "prompt": tokens,
        "max_tokens": arrival.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    await asyncio.sleep(began_at + arrival.at_s - loop.time())
    timeline.sent_at = loop.time()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith('data: {"error"'):
                return
            if line == "data: [DONE]":
                timeline.is_finished = True
            elif line.startswith("data: "):
                timeline.token_times.append(loop.time())
