"""The speedup of a cached prefix, and the memory of a cluster.

One prompt of nearly 8,000 tokens is sent, then others that share its first 95 %: the median of
their TTFTs is compared with that of prompts that share nothing. Memory is the sum of the
proportional set sizes (PSS: a page shared by n processes counts 1/n in each) of the cluster's
processes afterwards, compared with the weights once, the KV pools and 1.2 GB for everything else.

    python -m benchmarks.prefix_and_memory [--model DIR] [--words 3400] [--rounds 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.report import Row, at_most, write_result
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.client.chat_request import ChatReply, first_model, gateway_client, stream_chat
from services.local.cluster import LocalCluster
from services.local.plan import UpOptions
from services.local.state import clusters_dir
from shared.clock import MonotonicClock

WORDS = ("river", "stone", "cloud", "green", "seven", "north", "paper", "light", "house", "bread")
CACHED_SHARE = 0.95
KV_POOL_BYTES = 1 << 30  # the default of a worker
OTHER_BYTES = 1_200_000_000


async def run(model_dir: Path, num_words: int, num_rounds: int) -> list[Row]:
    clock = MonotonicClock()
    cluster = LocalCluster(
        UpOptions(model_dir=model_dir, http_port=0),
        clock,
        state_parent=clusters_dir(),
        report=lambda *_: None,
    )
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    num_shared = int(CACHED_SHARE * num_words)
    cold: list[ChatReply] = []
    warm: list[ChatReply] = []
    async with cluster, gateway_client(cluster.url, cluster.api_key) as client:
        model = (await first_model(client)).id

        async def reply_to(prompt: str) -> ChatReply:
            messages = [{"role": "user", "content": prompt}]
            return await stream_chat(client, model, messages, clock, lambda _: None)

        for _ in range(num_rounds):
            shared = words(num_shared)
            cold.append(await reply_to(f"{shared} {words(num_words - num_shared)}"))
            warm.append(await reply_to(f"{shared} {words(num_words - num_shared)}"))
        pss = {name: pss_bytes(cluster.pid_of(name)) for name in cluster.process_ids}
    rows = [ttft_row("uncached", cold), ttft_row("95 % cached", warm)]
    return [*rows, {"case": "memory", "pss_mb": {k: v // 10**6 for k, v in pss.items()}}]


def ttft_row(name: str, replies: list[ChatReply]) -> Row:
    return {
        "case": name,
        "prompt_tokens": replies[-1].usage["prompt_tokens"],
        "cached_tokens": replies[-1].usage["prompt_tokens_details"]["cached_tokens"],
        "ttft_ms": round(statistics.median(each.ttft_s for each in replies) * 1e3, 1),
    }


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no PSS of process {pid}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    parser.add_argument("--words", type=int, default=3400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    rows = uvloop.run(run(options.model, options.words, options.rounds))
    weights = sum(each.stat().st_size for each in options.model.glob("*.safetensors"))
    total = sum(rows[2]["pss_mb"].values()) * 10**6
    bars = [
        at_most("TTFT cached / uncached", rows[1]["ttft_ms"] / rows[0]["ttft_ms"], 0.2, ""),
        at_most("memory", total, weights + 2 * KV_POOL_BYTES + OTHER_BYTES, "bytes"),
    ]
    write_result("prefix_and_memory", rows, bars, ["-m", "benchmarks.prefix_and_memory", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
