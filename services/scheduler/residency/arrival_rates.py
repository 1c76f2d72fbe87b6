"""Measures how often each model is used: arrivals per second, decayed over WINDOW_S."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

from services.scheduler.residency.view import ModelId

WINDOW_S = 120.0
MAX_MODELS = 4096  # more models: the one that was unused for longest is forgotten


@dataclass(slots=True)
class _Arrivals:
    count: float = 0.0  # decayed
    last_at: float = -inf


class ArrivalRates:
    def __init__(self) -> None:
        self._arrivals: dict[ModelId, _Arrivals] = {}

    def record(self, model: ModelId, now: float) -> None:
        arrivals = self._arrivals.pop(model, None) or _Arrivals()
        self._arrivals[model] = arrivals  # moves it to the end: the least recent model comes first
        arrivals.count = 1.0 + arrivals.count * exp((arrivals.last_at - now) / WINDOW_S)
        arrivals.last_at = now
        if len(self._arrivals) > MAX_MODELS:
            del self._arrivals[next(iter(self._arrivals))]

    def models(self) -> list[ModelId]:
        return list(self._arrivals)

    def rate(self, model: ModelId, now: float) -> float:
        arrivals = self._arrivals.get(model)
        if arrivals is None:
            return 0.0
        return arrivals.count * exp((arrivals.last_at - now) / WINDOW_S) / WINDOW_S

    def last_used_at(self, model: ModelId) -> float:
        arrivals = self._arrivals.get(model)
        return -inf if arrivals is None else arrivals.last_at
