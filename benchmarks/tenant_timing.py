"""Can a tenant infer from its own TTFT which prompts of another tenant are cached?

A full cluster over HTTP, two API keys. In each round the victim sends new prompts of every length,
so that their KV is cached. Then the attacker sends each of them, and as many new prompts of that
length, all lengths and classes in one random order, one request at a time on one connection, and
measures the time to the first text. Every prompt is sent once: a second time it would be in the
attacker's own cache. Prompts are text of rare words, like a secret, so anything that the gateway
might cache for them is measured as well.

The victim itself sends, in the same order, prompts that it had sent before (separate ones, so that
the attacker's are not affected) and new ones: the control, which shows that a hit would have been
detected. AUC: of the classes by TTFT, with DeLong's 95 % interval (benchmarks/auc.py).

    python -m benchmarks.tenant_timing                       2,000 probes per class and length,
                                                             some 20 minutes on 2 quiet cores
    python -m benchmarks.tenant_timing --probes 40 --control-probes 20
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import string
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import uvloop
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.auc import Auc, auc
from benchmarks.report import Bar, Row, at_least, at_most, write_result
from services.cli.cluster.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from services.client.http_client import ConnectionPool, Sample, http_request
from services.local.cluster import LocalCluster
from services.local.plan import UpOptions
from services.local.state import clusters_dir, running_cluster
from shared.clock import MonotonicClock
from shared.errors import HearthError
from shared.tenancy.tenant_admin import new_api_key, save_api_key

PATH = "/v1/completions"
LENGTHS = (64, 128, 256, 512, 1024, 2048)
CONTROL_FROM = 512
NUM_PROBES = 2000  # of a class and length
MAX_ADVANTAGE = 0.05
MIN_CONTROL_AUC = 0.95
KV_CACHE_BYTES = 1 << 30  # both tenants' prompts of a round, with room to spare
WORD_LETTERS = 6
EVENTS_S = 0.3  # time until the index has the victim's cached blocks
NUM_WARM_UPS = 30


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt to time. If `is_cached`, the victim has sent it before."""

    is_control: bool
    num_tokens: int
    is_cached: bool
    prompt: str


@dataclass(slots=True)
class Seen:
    """TTFTs of one tenant and length in seconds, and the cached tokens."""

    cached_s: list[float] = field(default_factory=list)
    new_s: list[float] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)  # of the cached prompts


class Writer:
    """Creates new texts of a given number of tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))

    def prompt(self, num_tokens: int) -> str:
        words = ""
        while len(encoding := self._tokenizer.encode(words)) < num_tokens:
            missing = max(1, (num_tokens - len(encoding)) // WORD_LETTERS)
            words = " ".join(filter(None, [words, *(self._word() for _ in range(missing))]))
        return words[: encoding.offsets[num_tokens - 1][1]]

    def _word(self) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=WORD_LETTERS))


class Asker:
    """One tenant on one connection."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._api_key = api_key
        self._connections = ConnectionPool(url)

    async def ask(self, prompt: str) -> Sample:
        """Raises HearthError if the request fails."""
        body = {
            "model": DEMO_MODEL_NAME,
            "prompt": prompt,
            "max_tokens": 2,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sample = await self._connections.request(http_request(self._url, self._api_key, PATH, body))
        if sample.error and not sample.error.startswith("no text"):
            raise HearthError(sample.error)
        return sample

    def close(self) -> None:
        self._connections.close()


class Audit:
    def __init__(self, url: str, victim_key: str, attacker_key: str, seed: int) -> None:
        self.seen: dict[tuple[bool, int], Seen] = defaultdict(Seen)
        self.num_without_text = 0
        self._random = random.Random(seed)
        self._writer = Writer(seed)
        self._victim = Asker(url, victim_key)
        self._attacker = Asker(url, attacker_key)
        self._feeders = [Asker(url, victim_key) for _ in range(4)]

    async def warm_up(self) -> None:
        for number in range(NUM_WARM_UPS):
            for asker in (self._victim, self._attacker):
                await asker.ask(self._writer.prompt(LENGTHS[number % len(LENGTHS)]))

    async def round(self, num_probes: dict[tuple[bool, int], int]) -> None:
        """Runs one round with `num_probes` of each class: by asker and length."""
        probes = list(self._draw(num_probes))
        await self._feed([each.prompt for each in probes if each.is_cached])
        await asyncio.sleep(EVENTS_S)
        self._random.shuffle(probes)
        for probe in probes:
            self._record(probe, await self._asker_of(probe).ask(probe.prompt))

    def _asker_of(self, probe: Probe) -> Asker:
        return self._victim if probe.is_control else self._attacker

    def _draw(self, num_probes: dict[tuple[bool, int], int]) -> Iterator[Probe]:
        for (is_control, num_tokens), count in num_probes.items():
            for is_cached, _ in itertools.product((True, False), range(count)):
                prompt = self._writer.prompt(num_tokens)
                yield Probe(is_control, num_tokens, is_cached, prompt)

    async def _feed(self, prompts: list[str]) -> None:
        waiting = iter(prompts)

        async def serve(asker: Asker) -> None:
            for prompt in waiting:
                await asker.ask(prompt)

        await asyncio.gather(*(serve(asker) for asker in self._feeders))

    def _record(self, probe: Probe, sample: Sample) -> None:
        if sample.error:
            self.num_without_text += 1
            return
        seen = self.seen[probe.is_control, probe.num_tokens]
        (seen.cached_s if probe.is_cached else seen.new_s).append(sample.ttft_s)
        if probe.is_cached:
            seen.num_cached_tokens.append(sample.num_cached_tokens)

    def close(self) -> None:
        for each in (self._victim, self._attacker, *self._feeders):
            each.close()


def plan_rounds(
    num_probes: int, num_control_probes: int, num_rounds: int
) -> Iterator[dict[tuple[bool, int], int]]:
    """Spreads the probes evenly, so that drift of the machine affects all classes alike."""
    for index in range(num_rounds):
        share: dict[tuple[bool, int], int] = {}
        for is_control, total in ((False, num_probes), (True, num_control_probes)):
            count = total * (index + 1) // num_rounds - total * index // num_rounds
            for num_tokens in LENGTHS:
                if count and (num_tokens >= CONTROL_FROM or not is_control):
                    share[is_control, num_tokens] = count
        yield share


async def run(arguments: argparse.Namespace) -> Audit:
    attacker_key = new_api_key()
    os.environ.setdefault("HEARTH_KV_CACHE_BYTES", str(KV_CACHE_BYTES))
    options = UpOptions(
        model_dir=DEMO_MODEL_DIR,
        model_name=DEMO_MODEL_NAME,
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        num_both=arguments.both,
        http_port=0,
        tenant_id="victim",
    )
    console = Console(stderr=True)
    async with LocalCluster(options, MonotonicClock(), state_parent=clusters_dir()) as cluster:
        _, state = running_cluster(clusters_dir())
        await save_api_key(state.redis_url, attacker_key, "attacker")
        audit = Audit(cluster.url, cluster.api_key, attacker_key, arguments.seed)
        try:
            await audit.warm_up()
            began = time.perf_counter()
            num_rounds = -(-arguments.probes // arguments.probes_per_round)
            plan = plan_rounds(arguments.probes, arguments.control_probes, num_rounds)
            for number, share in enumerate(plan, 1):
                await audit.round(share)
                took_s = time.perf_counter() - began
                console.print(f"round {number} of {num_rounds}, {took_s:.0f} s", highlight=False)
        finally:
            audit.close()
    return audit


def row_of(is_control: bool, num_tokens: int, seen: Seen, told: Auc) -> Row:
    return {
        "asker": "victim (control)" if is_control else "attacker",
        "tokens": num_tokens,
        "probes_cached": len(seen.cached_s),
        "probes_new": len(seen.new_s),
        "ttft_cached_p50_ms": statistics.median(seen.cached_s) * 1e3,
        "ttft_new_p50_ms": statistics.median(seen.new_s) * 1e3,
        "cached_tokens_min": min(seen.num_cached_tokens),
        "cached_tokens_max": max(seen.num_cached_tokens),
        "auc": round(told.value, 4),
        "auc_low": round(told.low, 4),
        "auc_high": round(told.high, 4),
    }


def results_of(audit: Audit) -> tuple[list[Row], list[Bar]]:
    rows: list[Row] = []
    bars: list[Bar] = []
    for (is_control, num_tokens), seen in sorted(audit.seen.items()):
        told = auc(seen.cached_s, seen.new_s)
        rows.append(row_of(is_control, num_tokens, seen, told))
        if is_control:
            name = f"control AUC at {num_tokens} tokens"
            bars.append(at_least(name, told.value, MIN_CONTROL_AUC, "AUC"))
        else:
            name = f"upper 95 % bound of |AUC - 0.5| at {num_tokens} tokens"
            bars.append(at_most(name, told.largest_advantage, MAX_ADVANTAGE, "AUC"))
            fewest = min(len(seen.cached_s), len(seen.new_s))
            bars.append(at_least(f"probes at {num_tokens} tokens", fewest, NUM_PROBES, "a class"))
    most = max(row["cached_tokens_max"] for row in rows if row["asker"] == "attacker")
    bars.append(at_most("tokens that the attacker had from a cache", most, 0, "tokens"))
    return rows, bars


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tenant_timing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--probes", type=int, default=NUM_PROBES, help="the attacker's probes per class and length")
    add("--control-probes", type=int, default=300, help="the victim's probes, likewise")
    add("--probes-per-round", type=int, default=10)
    add("--prefill", type=int, default=1)
    add("--decode", type=int, default=1)
    add("--both", type=int, default=0)
    add("--seed", type=int, default=0)
    add("--name", default="tenant_timing", help="results/NAME.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    try:
        audit = uvloop.run(run(arguments))
    except HearthError as error:
        print(f"tenant_timing: {error.message}", file=sys.stderr)
        return 2
    rows, bars = results_of(audit)
    write_result(arguments.name, rows, bars, ["-m", "benchmarks.tenant_timing", *argv])
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
