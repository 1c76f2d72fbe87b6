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
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.report import at_most, write_result
from benchmarks.serving.closed_loop import Target, body_of
from benchmarks.serving.cluster import CLIENT, OPERATOR_NAME, SERVICES, hearth
from services.cli.cluster.role_change import change_roles
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S
from shared.messages import ChangeRoles, Heartbeat, WorkerLoad
from shared.subjects import HEARTBEATS, CredentialRole
from shared.transport.bus import NatsBus
from tests.support.cluster.clients import Exchange, run_exchange
from tests.support.cluster.service_processes import MODEL

WORKERS: dict[str, CredentialRole] = {"worker-1": "worker", "worker-2": "worker"}
NUM_BEFORE = 8  # tokens of each stream when the roles change
POLL_S = 0.01
COMMANDS = {
    "worker-1": ["-m", "services", "worker", *MODEL, "--device", "cpu", "--announce", "decode"],
    "worker-2": ["-m", "services", "worker", *MODEL, "--device", "cpu", "--announce", "prefill"],
    "scheduler": ["-m", "services", "scheduler", "--max-local-prefill-tokens", "4"],
}


def bodies(target: Target, num_streams: int, num_tokens: int) -> list[dict]:
    topics = ("the KV cache", "prefill", "decode", "a scheduler", "tenants", "a gateway", "NATS")
    return [
        {
            **body_of(target.model, f"Number {n}: what is {topics[n % len(topics)]}?", num_tokens),
            "stream_options": {"include_usage": True},
        }
        for n in range(num_streams)
    ]


def send(target: Target, body: dict) -> tuple[Exchange, asyncio.Task]:
    exchange = Exchange(body, target.url)
    run = run_exchange(exchange, target.url, target.api_key, target.path)
    return exchange, asyncio.create_task(run)


def send_all(target: Target, options: argparse.Namespace) -> list[tuple[Exchange, asyncio.Task]]:
    return [send(target, body) for body in bodies(target, options.streams, options.tokens)]


async def switch(operator: NatsBus) -> float:
    """Returns the time at which the first command was sent."""
    began = time.monotonic()
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
    undisturbed = send_all(target, options)
    await asyncio.gather(*(task for _, task in undisturbed))
    streams = send_all(target, options)
    while any(len(each.text_arrivals) < NUM_BEFORE for each, _ in streams):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    num_before = [len(each.text_arrivals) for each, _ in streams]
    began = await switch(operator)
    changed_at = time.monotonic()
    num_open = sum(not task.done() for _, task in streams)
    question = {"role": "user", "content": "Which worker reads this new question first?"}
    first, sending = send(target, bodies(target, 1, 8)[0] | {"messages": [question]})
    await sending
    await asyncio.gather(*(task for _, task in streams))
    await asyncio.sleep(2 * HEARTBEAT_INTERVAL_S)
    await operator.close()
    pairs = [(a, b) for (a, _), (b, _) in zip(undisturbed, streams, strict=True)]
    return {
        "streams": options.streams,
        "tokens": options.tokens,
        "open_at_switch": num_open,
        "tokens_before_switch_max": max(num_before),
        "dropped": sum(not is_full(b) for _, b in pairs),
        "altered": sum(a.output != b.output for a, b in pairs),
        "other_token_counts": sum(a.usage != b.usage for a, b in pairs),
        "failed_undisturbed": sum(not is_full(a) for a, _ in pairs),
        "tokens_pushed_by_the_new_prefill_worker": loads["worker-1"].num_pushed_tokens,
        "tokens_sampled_by_the_new_decode_worker": loads["worker-2"].num_generated_tokens,
        "commands_ms": round(1e3 * (changed_at - began), 1),
        "first_token_in_new_roles_s": round(next(iter(first.text_arrivals), began) - began, 4),
        "first_request_error": "" if is_full(first) else str(first),
    }


def is_full(exchange: Exchange) -> bool:
    return exchange.is_successful and exchange.output[0].finish_reasons == ["length"]


async def run(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        cluster = hearth(SERVICES | WORKERS, Path(folder), step_s=0.0, commands=COMMANDS)
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
