"""Load on the HTTP door: what a client sees of a whole cluster.

Closed loop at several concurrencies (each user asks again as soon as it is answered), or open loop
with Poisson arrivals (`--rate`). TTFT is from sending the request to the first text, ITL is the
list of gaps between events with text, TPOT the seconds a token after the first. Goodput counts
requests per second whose TTFT is at most --ttft-s and whose mean ITL is at most --itl-s.

    python -m benchmarks.serve                                a cluster of its own, 100 in / 64 out
    python -m benchmarks.serve --url URL --api-key KEY        a running one
    python -m benchmarks.serve --rate 20 --duration-s 30
    python -m benchmarks.serve --corpus                       questions of the demo model's corpus
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.load_client import Connection, Sample, http_request
from benchmarks.report import at_most, write_result
from services.gateway.tenants import store_api_key
from services.local.ask import door, first_model
from services.local.cluster import LocalCluster
from services.local.plan import UpOptions
from services.local.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from services.local.state import clusters_dir
from shared.clock import MonotonicClock
from shared.errors import ConfigError, HearthError

CORPUS = Path(__file__).resolve().parent.parent / "scripts" / "demo_corpus"
PATH = "/v1/chat/completions"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and of whom."""

    url: str
    api_key: str
    model: str
    num_output_tokens: int
    ignore_eos: bool
    temperature: float

    def message(self, prompt: str, num_output_tokens: int | None = None) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_output_tokens or self.num_output_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return http_request(self.url, self.api_key, PATH, body)


def corpus_questions() -> list[str]:
    files = sorted(CORPUS.glob("*.toml"))
    pairs = [pair for file in files for pair in tomllib.loads(file.read_text()).get("pair", ())]
    return [question for pair in pairs for question in pair["questions"]]


def corpus_prompts(randomness: random.Random) -> Iterator[str]:
    questions = corpus_questions()
    while True:
        yield randomness.choice(questions)


def random_prompts(randomness: random.Random, num_words: int) -> Iterator[str]:
    """Words of the corpus in random order: no two prompts share a prefix to speak of."""
    words = sorted({word for question in corpus_questions() for word in question.split()})
    while True:
        yield " ".join(randomness.choices(words, k=num_words))


async def words_for(load: Load, num_input_tokens: int) -> int:
    """The number of words that makes prompts of about this many tokens, template included."""
    connection = await Connection.open(load.url)
    randomness, counts = random.Random(0), {}
    for num_words in (8, 40):
        prompt = next(random_prompts(randomness, num_words))
        sample = await connection.request(load.message(prompt, 1))
        if sample.error:
            raise HearthError(sample.error)
        counts[num_words] = sample.num_prompt_tokens
    connection.close()
    tokens_per_word = (counts[40] - counts[8]) / 32
    num_words = round((num_input_tokens - counts[8]) / tokens_per_word + 8)
    if num_words < 1:
        raise ConfigError(f"--input-tokens {num_input_tokens} is less than the template alone")
    return num_words


async def closed_loop(
    load: Load, prompts: Iterator[str], concurrency: int, duration_s: float
) -> list[Sample]:
    """Every user sends its next request as soon as the last is answered."""
    connections = [await Connection.open(load.url) for _ in range(concurrency)]
    deadline = time.perf_counter() + duration_s

    async def user(connection: Connection) -> list[Sample]:
        samples = []
        while time.perf_counter() < deadline:
            samples.append(await connection.request(load.message(next(prompts))))
            if samples[-1].error:
                connection = await Connection.open(load.url)
        connection.close()
        return samples

    groups = await asyncio.gather(*(user(connection) for connection in connections))
    return [sample for group in groups for sample in group]


async def open_loop(
    load: Load, prompts: Iterator[str], rate: float, duration_s: float, randomness: random.Random
) -> list[Sample]:
    """Requests arrive as a Poisson process, whether or not the earlier ones are answered."""
    idle: list[Connection] = []
    tasks: list[asyncio.Task[Sample]] = []
    next_arrival = started = time.perf_counter()

    async def one(message: bytes) -> Sample:
        open_ones = [connection for connection in idle if connection.is_open]
        idle[:] = open_ones[:-1]
        connection = open_ones[-1] if open_ones else await Connection.open(load.url)
        sample = await connection.request(message)
        if not sample.error:
            idle.append(connection)
        return sample

    while next_arrival - started < duration_s:
        await asyncio.sleep(max(0.0, next_arrival - time.perf_counter()))
        tasks.append(asyncio.create_task(one(load.message(next(prompts)))))
        next_arrival += randomness.expovariate(rate)
    samples = await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return list(samples)


def percentiles(values: Sequence[float], name: str) -> dict[str, float]:
    """Milliseconds at p50, p90 and p99."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else []
    found = {p: (cuts[p - 1] if cuts else sum(values)) for p in (50, 90, 99)}
    return {f"{name}_p{p}_ms": round(value * 1e3, 3) for p, value in found.items()}


def row_of(
    label: str, samples: Sequence[Sample], *, ttft_limit_s: float, itl_limit_s: float
) -> dict[str, Any]:
    """Raises HearthError if nothing was answered."""
    good = [sample for sample in samples if not sample.error]
    if not good:
        raise HearthError(
            f"no request was answered: {samples[0].error if samples else 'none sent'}"
        )
    elapsed_s = max(each.ended for each in samples) - min(each.started for each in samples)
    gaps = [gap for sample in good for gap in sample.itl_s]
    met = [
        sample
        for sample in good
        if sample.ttft_s <= ttft_limit_s
        and (not sample.itl_s or statistics.fmean(sample.itl_s) <= itl_limit_s)
    ]
    num_tokens = sum(sample.num_output_tokens for sample in good)
    return {
        "load": label,
        "num_requests": len(good),
        "num_errors": len(samples) - len(good),
        "prompt_tokens": round(statistics.fmean(each.num_prompt_tokens for each in good), 1),
        "cached_tokens": round(statistics.fmean(each.num_cached_tokens for each in good), 1),
        "output_tokens": round(num_tokens / len(good), 1),
        "requests_per_s": round(len(good) / elapsed_s, 2),
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
        "goodput_per_s": round(len(met) / elapsed_s, 2),
        **percentiles([sample.ttft_s for sample in good], "ttft"),
        **percentiles(gaps or [0.0], "itl"),
        **percentiles([sample.tpot_s for sample in good], "tpot"),
    }


@asynccontextmanager
async def target(arguments: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    """URL and API key of the cluster under test: the given one, or one of its own."""
    if arguments.url is not None:
        yield arguments.url.rstrip("/").removesuffix("/v1"), arguments.api_key or ""
        return
    options = UpOptions(
        model_dir=arguments.model,
        model_name=DEMO_MODEL_NAME if arguments.model == DEMO_MODEL_DIR else "",
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        num_both=arguments.both,
        http_port=0,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    cluster = LocalCluster(
        options, MonotonicClock(), state_parent=clusters_dir(), store_api_key=store_api_key
    )
    async with cluster:
        yield cluster.url, cluster.api_key


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    randomness = random.Random(arguments.seed)
    async with target(arguments) as (url, api_key):
        async with door(url, api_key) as client:
            model = await first_model(client)
        load = Load(
            url=url,
            api_key=api_key,
            model=model,
            num_output_tokens=arguments.output_tokens,
            ignore_eos=not arguments.corpus,
            temperature=arguments.temperature,
        )
        if arguments.corpus:
            prompts = corpus_prompts(randomness)
        else:
            prompts = random_prompts(randomness, await words_for(load, arguments.input_tokens))
        await closed_loop(load, prompts, 2, 0.5)  # the first steps of a process are slow
        limits = {"ttft_limit_s": arguments.ttft_s, "itl_limit_s": arguments.itl_s}
        duration_s = arguments.duration_s
        if arguments.rate is not None:
            samples = await open_loop(load, prompts, arguments.rate, duration_s, randomness)
            return [row_of(f"poisson {arguments.rate:g}/s", samples, **limits)]
        return [
            row_of(
                f"closed {concurrency}",
                await closed_loop(load, prompts, concurrency, duration_s),
                **limits,
            )
            for concurrency in arguments.concurrency
        ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="a running gateway; else a cluster is started for the measurement")
    add("--api-key")
    add("--model", type=Path, default=DEMO_MODEL_DIR, help="checkpoint of the started cluster")
    add("--prefill", type=int, default=1)
    add("--decode", type=int, default=1)
    add("--both", type=int, default=0)
    add("--dtype", default="auto")
    add("--device", default="cpu")
    add("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    add("--rate", type=float, help="requests per second, Poisson, instead of --concurrency")
    add("--duration-s", type=float, default=10.0, help="of each load")
    add("--input-tokens", type=int, default=100)
    add("--output-tokens", type=int, default=64)
    add("--corpus", action="store_true", help="questions of the demo corpus, answers to their end")
    add("--temperature", type=float, default=0.0)
    add("--ttft-s", type=float, default=0.5, help="goodput: longest TTFT")
    add("--itl-s", type=float, default=0.05, help="goodput: longest mean ITL")
    add("--seed", type=int, default=0)
    add("--name", default="serve", help="results/NAME.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    try:
        rows = uvloop.run(measure(arguments))
    except HearthError as error:
        print(f"serve: {error.message}", file=sys.stderr)
        return 2
    num_errors = sum(row["num_errors"] for row in rows)
    bars = [at_most("requests without an answer", num_errors, 0, "requests")]
    write_result(arguments.name, rows, bars, ["-m", "benchmarks.serve", *argv])
    return 0 if num_errors == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
