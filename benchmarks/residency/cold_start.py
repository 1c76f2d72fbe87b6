"""First token of a model that is hot, in standby, and cold, on a host with real processes.

Cold: its worker was killed just before the request, so the time contains the host's pause before a
restart; the page cache is warm. transformers loads the same weights and generates one token, in a
process of its own, with and without its imports.

    python -m benchmarks.residency.cold_start [--sizes 125m 0.6b] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop

from benchmarks.checkpoints import LLAMA_125M, write_random_llama, write_tokenizer
from benchmarks.report import Bar, Row, at_most, write_result
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.client.chat_request import gateway_client, stream_chat
from services.local.cluster import LocalCluster
from services.local.model_list import NamedModel
from services.local.plan import UpOptions
from services.local.state import clusters_dir
from shared.background import Background
from shared.clock import MonotonicClock
from shared.lifecycle.host_models import ReceivedModels
from shared.messages import Done, Heartbeat, HostedModel, ParkModel
from shared.subjects import HEARTBEATS, host_models
from shared.transport.bus import NatsBus

SHAPES: dict[str, dict[str, Any]] = {
    "125m": LLAMA_125M,
    "0.6b": LLAMA_125M
    | {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 18,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    },
}
MOST_S = {"125m": (0.3, 4.0), "0.6b": (0.5, 6.0)}  # standby over hot, cold
HOST_ID = "host-1"
QUESTION = [{"role": "user", "content": "What is Hearth?"}]
TRANSFORMERS = """
import sys, time
began = time.perf_counter()
import torch
from transformers import AutoModelForCausalLM
imported = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.generate(torch.arange(8)[None], max_new_tokens=1, do_sample=False)
print(imported - began, time.perf_counter() - imported)
"""


class Site:
    """A running cluster, and how its host sees the model."""

    def __init__(self, cluster: LocalCluster, client: httpx.AsyncClient, bus: NatsBus) -> None:
        self._cluster = cluster
        self._client = client
        self._bus = bus
        self._clock = MonotonicClock()
        self.background = Background()
        self._received = ReceivedModels(bus, self._clock, self.background)
        self.model: HostedModel | None = None

    def observe(self, message: Heartbeat) -> None:
        message = self._received.complete(message)
        for each in message.host.models if message.host is not None else ():
            if each.name == self._cluster.model_name:
                self.model = each

    async def until(self, *states: str) -> HostedModel:
        while self.model is None or self.model.state not in states:
            await self._clock.sleep(0.005)
        return self.model

    async def first_token_s(self) -> float:
        began = self._clock.now()
        reply = await stream_chat(
            self._client,
            self._cluster.model_name,
            QUESTION,
            self._clock,
            lambda _: None,
            max_tokens=1,
        )
        assert reply.ttft_s <= self._clock.now() - began
        return reply.ttft_s

    async def park(self) -> None:
        model = await self.until("hot", "standby")
        command = ParkModel(model=model.name, revision=model.revision)
        await self._bus.request(host_models(HOST_ID), command, Done, timeout_s=30)
        await self.until("standby")
        await self._clock.sleep(1.0)

    async def kill_workers(self) -> None:
        before = (await self.until("standby")).worker_id
        for template in _children(self._cluster.pid_of(HOST_ID)):
            for pid in _children(template):
                os.kill(pid, signal.SIGKILL)
        while self.model is None or self.model.worker_id == before:
            await self._clock.sleep(0.002)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def measure(name: str, model_dir: Path, num_rounds: int) -> list[Row]:
    models = (NamedModel(name, str(model_dir)), NamedModel("hearth-demo", str(DEMO_MODEL_DIR)))
    options = UpOptions(
        model_dir=DEMO_MODEL_DIR, models=models, http_port=0, num_prefill=0, num_decode=0
    )
    times: dict[str, list[float]] = {"hot": [], "standby": [], "cold": []}
    phases: list[Row] = []
    cluster = LocalCluster(options, MonotonicClock(), state_parent=clusters_dir())
    async with cluster, gateway_client(cluster.url, cluster.api_key) as client:
        assert cluster.operator is not None
        url, process_id = cluster.operator
        bus = await NatsBus.connect(url, process_id=process_id)
        site = Site(cluster, client, bus)
        await bus.subscribe(HEARTBEATS, Heartbeat, site.observe)
        await site.until("hot")
        await site.first_token_s()
        for _ in range(num_rounds):
            times["hot"].append(await site.first_token_s())
            await site.park()
            times["standby"].append(await site.first_token_s())
            await site.park()
            await site.kill_workers()
            times["cold"].append(await site.first_token_s())
            found = await site.until("hot")
            phases.append({"start_s": found.start_s, "wake_s": found.wake_s})
        await site.background.stop()
        await bus.close()
    rows: list[Row] = [
        {"model": name, "case": case, "first_token_s": round(statistics.median(found), 3)}
        for case, found in times.items()
    ]
    rows[1]["wake_s"] = round(phases[-1]["wake_s"], 3)
    rows[2]["fork_to_ready_s"] = round(statistics.median(each["start_s"] for each in phases), 3)
    return rows


def transformers_row(name: str, model_dir: Path) -> Row:
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS, str(model_dir)],
        capture_output=True,
        text=True,
        check=True,
    )
    imports_s, rest_s = map(float, done.stdout.split())
    return {
        "model": name,
        "case": "transformers",
        "first_token_s": round(imports_s + rest_s, 3),
        "imports_s": round(imports_s, 3),
    }


def bars_of(name: str, rows: Sequence[Row]) -> list[Bar]:
    found = {row["case"]: row["first_token_s"] for row in rows if row["model"] == name}
    over_hot, cold = MOST_S[name]
    return [
        at_most(f"{name}: standby over hot", found["standby"] - found["hot"], over_hot, "s"),
        at_most(f"{name}: cold, page cache warm", found["cold"], cold, "s"),
    ]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    rows: list[Row] = []
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sizes:
            model_dir = Path(folder, name)
            model_dir.mkdir()
            write_random_llama(model_dir, SHAPES[name], dtype="bfloat16")
            write_tokenizer(model_dir, SHAPES[name]["vocab_size"])
            config = msgspec.json.decode((model_dir / "config.json").read_bytes())
            assert config["num_hidden_layers"] == SHAPES[name]["num_hidden_layers"]
            rows += uvloop.run(measure(name, model_dir, options.rounds))
            rows.append(transformers_row(name, model_dir))
            bars += bars_of(name, rows)
    command = ["-m", "benchmarks.residency.cold_start", *argv]
    is_full = set(options.sizes) == set(SHAPES)
    write_result("cold_start", rows, bars, command, is_full=is_full)


if __name__ == "__main__":
    main(sys.argv[1:])
