"""Load test over HTTP: what a client measures of a whole cluster.

Closed loop at several concurrencies (each user asks again as soon as it is answered), or open loop
with Poisson arrivals. TTFT is from sending the request to the first text, ITL is the list of gaps
between events with text, TPOT the seconds a token after the first. Goodput counts requests per
second whose TTFT is within its limit and whose mean ITL is within its own.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import msgspec

from services.client.chat_request import first_model, gateway_client
from services.client.http_client import Connection, ConnectionPool, Sample, http_request
from shared.background import start_awaited
from shared.errors import ConfigError, HearthError
from shared.tls import pinned_context

PATH = "/v1/chat/completions"
MAX_CONCURRENCY = 100_000
WARM_UP_S = 0.5  # the first steps of a process are slow
_TEXT = (
    "amber anchor april basket beacon bridge cabin candle canyon cedar cherry circle cloud copper "
    "cotton desert dragon eagle ember engine falcon feather forest garden glacier granite harbor "
    "hazel helmet island ivory jacket jungle kettle ladder lantern lemon magnet maple marble "
    "meadow mirror needle nickel ocean olive orchid paper pepper pillow planet prairie rabbit "
    "ribbon river saddle salmon shadow silver spider summer temple thunder timber tunnel velvet "
    "violet walnut window winter yellow zephyr "
)
WORDS = tuple(_TEXT.split())

Row = dict[str, Any]
# The load's label, and what has just been answered; none when the load begins.
Report = Callable[[str, Sample | None], None]


class LoadTestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Each concurrency is one load; `rate` (requests/s) replaces them with one open-loop load."""

    concurrency: tuple[int, ...] = (1, 16, 64)
    rate: float | None = None
    num_requests: int | None = None  # number for each load; None: as many as `duration_s` takes
    duration_s: float = 10.0
    num_input_tokens: int = 100
    num_output_tokens: int = 64
    temperature: float = 0.0
    ttft_limit_s: float = 0.5
    itl_limit_s: float = 0.05
    seed: int = 0

    def check(self) -> None:
        """Checks all options. Raises a ConfigError that names every problem."""
        positive = {
            "--concurrency": min(self.concurrency, default=0),
            "--rate": 1.0 if self.rate is None else self.rate,
            "--requests": 1 if self.num_requests is None else self.num_requests,
            "--duration-s": self.duration_s,
            "--input-tokens": self.num_input_tokens,
            "--output-tokens": self.num_output_tokens,
        }
        problems = [
            f"{name} {value:g} is not positive"
            for name, value in positive.items()
            if not 0 < value < inf
        ]
        if (most := max(self.concurrency, default=0)) > MAX_CONCURRENCY:
            problems.append(f"--concurrency {most:g} is more than {MAX_CONCURRENCY:,}")
        if problems:
            raise ConfigError("; ".join(problems))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a load test, and their target."""

    url: str
    api_key: str
    model: str
    num_output_tokens: int
    ignore_eos: bool
    temperature: float
    trust: ssl.SSLContext | None = None  # of an HTTPS gateway; None: the system's authorities

    def message(self, prompt: str, num_output_tokens: int | None = None) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": (
                self.num_output_tokens if num_output_tokens is None else num_output_tokens
            ),
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return http_request(self.url, self.api_key, PATH, body)


class Quota:
    """Limits how many requests are sent, by number or by time."""

    def __init__(self, num_requests: int | None, duration_s: float) -> None:
        self._num_left = num_requests
        self._deadline = time.perf_counter() + duration_s

    def take(self) -> bool:
        if self._num_left is None:
            return time.perf_counter() < self._deadline
        self._num_left -= 1
        return self._num_left >= 0


async def measure(
    url: str,
    api_key: str,
    options: LoadTestOptions,
    report: Report = lambda label, sample: None,
    *,
    questions: Sequence[str] | None = None,
    certificate: str = "",
) -> list[Row]:
    """Returns one row per load. `questions` are generated until the model stops by itself.
    `certificate`: as of `gateway_client`.

    Raises HearthError if the gateway cannot be reached or completes no request.
    """
    options.check()
    randomness = random.Random(options.seed)
    url = url.rstrip("/").removesuffix("/v1")
    async with gateway_client(url, api_key, certificate) as client:
        model = (await first_model(client)).id
    load = Load(
        url=url,
        api_key=api_key,
        model=model,
        num_output_tokens=options.num_output_tokens,
        ignore_eos=questions is None,
        temperature=options.temperature,
        trust=pinned_context(certificate) if certificate else None,
    )
    if questions is None:
        num_words = await words_for(load, options.num_input_tokens)
        prompts = random_prompts(randomness, num_words)
    else:
        prompts = chosen_prompts(randomness, questions)
    await closed_loop(load, prompts, 2, Quota(None, WARM_UP_S), lambda sample: None)
    if options.rate is not None:
        label = f"poisson {options.rate:g}/s"
        report(label, None)
        samples = await open_loop(load, prompts, options, randomness, lambda s: report(label, s))
        return [row_of(label, samples, options)]
    return [
        await _closed_row(load, prompts, concurrency, options, report)
        for concurrency in options.concurrency
    ]


async def _closed_row(
    load: Load, prompts: Iterator[str], concurrency: int, options: LoadTestOptions, report: Report
) -> Row:
    label = f"closed {concurrency}"
    report(label, None)
    quota = Quota(options.num_requests, options.duration_s)
    samples = await closed_loop(load, prompts, concurrency, quota, lambda s: report(label, s))
    return row_of(label, samples, options)


def chosen_prompts(randomness: random.Random, questions: Sequence[str]) -> Iterator[str]:
    while True:
        yield randomness.choice(questions)


def random_prompts(randomness: random.Random, num_words: int) -> Iterator[str]:
    """Yields words in random order, so that two prompts share almost no prefix."""
    while True:
        yield " ".join(randomness.choices(WORDS, k=num_words))


async def words_for(load: Load, num_input_tokens: int) -> int:
    """Returns the number of words for prompts of `num_input_tokens`, chat template included."""
    connection = await Connection.open(load.url, load.trust)
    randomness, counts = random.Random(0), {}
    for num_words in (4, 16):
        prompt = next(random_prompts(randomness, num_words))
        sample = await connection.request(load.message(prompt, 1))
        if sample.error:
            raise HearthError(sample.error)
        counts[num_words] = sample.num_prompt_tokens
    connection.close()
    tokens_per_word = (counts[16] - counts[4]) / 12
    num_words = round((num_input_tokens - counts[4]) / tokens_per_word + 4)
    if num_words < 1:
        raise ConfigError(f"--input-tokens {num_input_tokens} is less than the template alone")
    return num_words


async def closed_loop(
    load: Load,
    prompts: Iterator[str],
    concurrency: int,
    quota: Quota,
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    """Runs users, each of whom sends the next request as soon as the last response has ended."""
    connections = [await Connection.open(load.url, load.trust) for _ in range(concurrency)]

    async def user(connection: Connection) -> list[Sample]:
        samples = []
        while quota.take():
            samples.append(await connection.request(load.message(next(prompts))))
            on_sample(samples[-1])
            if samples[-1].error:
                connection = await Connection.open(load.url, load.trust)
        connection.close()
        return samples

    groups = await asyncio.gather(*(user(connection) for connection in connections))
    return [sample for group in groups for sample in group]


async def open_loop(
    load: Load,
    prompts: Iterator[str],
    options: LoadTestOptions,
    randomness: random.Random,
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    """Sends requests as a Poisson process, independent of earlier responses."""
    assert options.rate is not None
    connections = ConnectionPool(load.url, load.trust)
    tasks: list[asyncio.Task[Sample]] = []
    quota = Quota(options.num_requests, options.duration_s)
    next_arrival = time.perf_counter()

    async def one(message: bytes) -> Sample:
        sample = await connections.request(message)
        on_sample(sample)
        return sample

    while quota.take():
        tasks.append(start_awaited(one(load.message(next(prompts)))))
        next_arrival += randomness.expovariate(options.rate)
        await asyncio.sleep(max(0.0, next_arrival - time.perf_counter()))
    samples = await asyncio.gather(*tasks)
    connections.close()
    return list(samples)


def percentiles(values: Sequence[float], name: str) -> dict[str, float]:
    """Returns p50, p90 and p99 in milliseconds."""
    found = {p: percentile(values, p) for p in (50, 90, 99)}
    return {f"{name}_p{p}_ms": round(value * 1e3, 3) for p, value in found.items()}


def percentile(values: Sequence[float], p: int) -> float:
    """Returns the percentile `p`, 1 to 99, interpolated between the two nearest values."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[p - 1]


def row_of(label: str, samples: Sequence[Sample], options: LoadTestOptions) -> Row:
    """Returns the row of a load. Raises HearthError if no request completed."""
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
        if sample.ttft_s <= options.ttft_limit_s
        and (not sample.itl_s or statistics.fmean(sample.itl_s) <= options.itl_limit_s)
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
