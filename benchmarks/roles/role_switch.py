"""A worker leaves the role in which it streams, and serves in the other one.

    python -m benchmarks.roles.role_switch

Real processes with the demo model: gateway, scheduler, kv_index, nats-server, redis and two workers
with both handlers, of which one announces decode and one prefill. 32 streams run on the first one
when both swap their roles by `hearth role`'s message. A request is sent at once: its KV is computed
by the worker that prefills only since then (the scheduler lets decode compute at most 4 tokens),
and its tokens are sampled by the worker that decodes only since then. Before, the same prompts run
undisturbed; afterwards each text must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop

from benchmarks.report import at_most, write_result
from benchmarks.serving.closed_loop import Target, body_of
from benchmarks.serving.hearth import CLIENT, OPERATOR_NAME, hearth
from services.cli.cluster.role_change import change_roles
from services.cli.cluster.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import ChangeRoles, Heartbeat, WorkerLoad
from shared.subjects import HEARTBEATS, CredentialRole
from shared.transport.bus import NatsBus

SERVICES: dict[str, CredentialRole] = {
    "kv_index": "kv_index",
    "scheduler": "scheduler",
    "gateway": "gateway",
    "worker-1": "worker",
    "worker-2": "worker",
}
NUM_BEFORE = 8  # tokens of each stream when the roles change
MODEL = ["--model-dir", str(DEMO_MODEL_DIR), "--model-name", DEMO_MODEL_NAME]
COMMANDS = {
    "worker-1": ["-m", "services", "worker", *MODEL, "--device", "cpu", "--announce", "decode"],
    "worker-2": ["-m", "services", "worker", *MODEL, "--device", "cpu", "--announce", "prefill"],
    "scheduler": ["-m", "services", "scheduler", "--max-local-prefill-tokens", "4"],
}


@dataclass
class Stream:
    texts: list[str] = field(default_factory=list)
    usage: dict[str, object] = field(default_factory=dict)
    first_at: float = 0.0
    finish_reason: str | None = None
    error: str = ""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        self.usage = event.get("usage") or self.usage  # type: ignore[assignment]
        for choice in event.get("choices", []):  # type: ignore[attr-defined]
            text = choice["delta"].get("content")
            if text:
                self.first_at = self.first_at or time.perf_counter()
                self.texts.append(text)
                if len(self.texts) >= NUM_BEFORE:
                    self.has_begun.set()
            self.finish_reason = choice["finish_reason"] or self.finish_reason


async def run_stream(client: httpx.AsyncClient, target: Target, body: dict, stream: Stream) -> None:
    headers = {"authorization": f"Bearer {target.api_key}"}
    try:
        async with client.stream("POST", target.path, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    stream.take(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        stream.error = repr(error)


def bodies(target: Target, num_streams: int, num_tokens: int) -> list[dict]:
    topics = ("the KV cache", "prefill", "decode", "a scheduler", "tenants", "a gateway", "NATS")
    return [
        {
            **body_of(target.model, f"Number {n}: what is {topics[n % len(topics)]}?", num_tokens),
            "stream_options": {"include_usage": True},
        }
        for n in range(num_streams)
    ]


async def run_all(client: httpx.AsyncClient, target: Target, options: argparse.Namespace) -> list:
    """The streams, each with its task."""
    started = []
    for body in bodies(target, options.streams, options.tokens):
        stream = Stream()
        started.append((stream, asyncio.create_task(run_stream(client, target, body, stream))))
    return started


async def switch(operator: NatsBus) -> float:
    """Returns the time at which the first command was sent."""
    began = time.perf_counter()
    await asyncio.gather(
        change_roles(operator, "worker-2", ChangeRoles(roles=("decode",))),
        change_roles(operator, "worker-1", ChangeRoles(roles=("prefill",))),
    )
    return began


async def measure(target: Target, options: argparse.Namespace) -> dict[str, object]:
    url = target.nats_url.replace(CLIENT, OPERATOR_NAME)
    operator = await NatsBus.connect(url, process_id=OPERATOR_NAME)
    loads: dict[str, WorkerLoad] = {}

    def on_heartbeat(beat: Heartbeat) -> None:
        if beat.load is not None:
            loads[beat.process_id] = beat.load

    await operator.subscribe(HEARTBEATS, Heartbeat, on_heartbeat)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=target.url, limits=limits, timeout=120, trust_env=False
    ) as client:
        undisturbed = await run_all(client, target, options)
        await asyncio.gather(*(task for _, task in undisturbed))
        streams = await run_all(client, target, options)
        await asyncio.gather(*(stream.has_begun.wait() for stream, _ in streams))
        num_before = [len(stream.texts) for stream, _ in streams]
        began = await switch(operator)
        changed_at = time.perf_counter()
        num_open = sum(not task.done() for _, task in streams)
        first = Stream()
        body = bodies(target, 1, 8)[0] | {
            "messages": [{"role": "user", "content": "Which worker reads this new question first?"}]
        }
        await run_stream(client, target, body, first)
        await asyncio.gather(*(task for _, task in streams))
        await asyncio.sleep(2 * HEARTBEAT_INTERVAL_S)
    await operator.close()
    pairs = [(a, b) for (a, _), (b, _) in zip(undisturbed, streams, strict=True)]
    return {
        "streams": options.streams,
        "tokens": options.tokens,
        "open_at_switch": num_open,
        "tokens_before_switch_max": max(num_before),
        "dropped": sum(bool(b.error) or b.finish_reason != "length" for _, b in pairs),
        "altered": sum("".join(a.texts) != "".join(b.texts) for a, b in pairs),
        "other_token_counts": sum(_num_tokens(a) != _num_tokens(b) for a, b in pairs),
        "failed_undisturbed": sum(a.finish_reason != "length" for a, _ in pairs),
        "tokens_pushed_by_the_new_prefill_worker": loads["worker-1"].num_pushed_tokens,
        "tokens_sampled_by_the_new_decode_worker": loads["worker-2"].num_generated_tokens,
        "commands_ms": round(1e3 * (changed_at - began), 1),
        "first_token_in_new_roles_s": round(first.first_at - began, 4),
        "first_request_error": first.error,
    }


def _num_tokens(stream: Stream) -> object:
    return stream.usage.get("completion_tokens")


async def run(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        cluster = hearth(SERVICES, Path(folder), step_s=0.0, commands=COMMANDS)
        async with cluster as (target, _):
            return await measure(target, options)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")
    parser.add_argument("--name", default="role_switch", help="results/NAME.json")
    options = parser.parse_args(argv)
    row = uvloop.run(run(options))
    is_new = row["tokens_pushed_by_the_new_prefill_worker"] > 0
    is_new = is_new and row["tokens_sampled_by_the_new_decode_worker"] > 0
    if row["open_at_switch"] != options.streams or row["failed_undisturbed"] or not is_new:
        print(f"not a measurement: {row}", file=sys.stderr)
        return 1
    num_altered = row["altered"] + row["other_token_counts"]
    first_s = row["first_token_in_new_roles_s"] if not row["first_request_error"] else 1e9
    bars = [
        at_most("streams dropped by a change of roles", row["dropped"], 0, "streams"),
        at_most("streams with other tokens", num_altered, 0, "streams"),
        at_most("command to the first token in the new roles", first_s, 1.0, "s"),
    ]
    write_result(options.name, [row], bars, ["-m", "benchmarks.roles.role_switch", *argv])
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
