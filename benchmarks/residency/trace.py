"""Requests for several models over time. Model 0 is the most popular one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival."""

    duration_s: float
    num_models: int
    at_s: NDArray[np.float64]
    model: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.at_s)

    def __iter__(self) -> Iterator[tuple[float, int, int, int]]:
        columns = self.at_s, self.model, self.num_prompt_tokens, self.num_output_tokens
        return zip(*(each.tolist() for each in columns), strict=True)


def zipf_shares(num_models: int, s: float = 1.0) -> NDArray[np.float64]:
    weights = 1.0 / np.arange(1, num_models + 1) ** s
    return np.asarray(weights / weights.sum())


def steady(
    *,
    num_models: int,
    rate_per_s: float,
    duration_s: float,
    num_prompt_tokens: int,
    num_output_tokens: int,
    s: float = 1.0,
    seed: int = 0,
) -> Trace:
    """Returns Poisson arrivals; each request draws its model by Zipf's law. Lengths are
    constant.
    """
    random = np.random.default_rng(seed)
    num = random.poisson(rate_per_s * duration_s)
    at_s = np.sort(random.uniform(0.0, duration_s, num))
    model = random.choice(num_models, size=num, p=zipf_shares(num_models, s))
    prompt, output = np.full(num, num_prompt_tokens), np.full(num, num_output_tokens)
    return Trace(duration_s, num_models, at_s, model, prompt, output)


def bursty_day(
    *,
    num_models: int,
    rate_per_s: float,
    mean_prompt_tokens: int,
    mean_output_tokens: int,
    s: float = 1.0,
    duration_s: float = DAY_S,
    burst_s: float = 300.0,
    share_of_bursts: float = 0.2,
    seed: int = 0,
) -> Trace:
    """Returns a day in which each model is used in bursts of Poisson arrivals.

    Bursts last `burst_s` on average and cover `share_of_bursts` of the time (both exponential);
    between them a model gets no requests. The mean rates follow Zipf's law; each model has its own
    busy hours (rate · (1 + 0.8 sin), with a random phase). Lengths are geometric.
    """
    random = np.random.default_rng(seed)
    times = [
        _burst_arrivals(random, share * rate_per_s, duration_s, burst_s, share_of_bursts)
        for share in zipf_shares(num_models, s)
    ]
    at_s = np.concatenate(times)
    model = np.repeat(np.arange(num_models), [len(each) for each in times])
    order = np.argsort(at_s, kind="stable")
    prompt = random.geometric(1 / mean_prompt_tokens, len(at_s))
    output = 1 + random.geometric(1 / mean_output_tokens, len(at_s))
    return Trace(duration_s, num_models, at_s[order], model[order], prompt, output)


def _burst_arrivals(
    random: np.random.Generator, rate: float, duration_s: float, burst_s: float, share: float
) -> NDArray[np.float64]:
    pause_s = burst_s * (1 / share - 1)
    phase, found = random.uniform(0, 2 * np.pi), list[NDArray[np.float64]]()
    now = -random.exponential(pause_s)
    while now < duration_s:
        now += random.exponential(pause_s)
        length_s = random.exponential(burst_s)
        factor = 1 + 0.8 * np.sin(2 * np.pi * now / DAY_S + phase)
        num = random.poisson(rate / share * factor * length_s)
        found.append(np.sort(random.uniform(now, now + length_s, num)))
        now += length_s
    at_s = np.concatenate(found)
    return at_s[(at_s >= 0) & (at_s < duration_s)]
