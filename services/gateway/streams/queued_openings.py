"""The requests of one response: they open in their order, some at once.

A scheduler queues 1,024 requests, and each open one takes a task and messages: a response of 1,000
prompts would leave no room to others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from services.gateway.streams.receiver import Receiver
from shared.messages import Request

MAX_OPEN = 256  # of a response: as many as a worker runs at once


def num_at_once(num_prompts: int, all_prompts: int, num_responses: int) -> int:
    """Of one response, its share by prompts, or by responses if that is more: all responses of a
    tenant have at most twice MAX_OPEN, or one each. `all_prompts`, `num_responses`: of its tenant.
    """
    by_prompts = MAX_OPEN * num_prompts // max(1, all_prompts)
    return max(1, by_prompts, MAX_OPEN // max(1, num_responses))


@dataclass(frozen=True, slots=True)
class Opening:
    """A request to open. `is_queueable`: whether it may wait for a worker."""

    request: Request
    receiver: Receiver
    affinity_key: str = ""
    is_queueable: bool = True

    @property
    def request_id(self) -> str:
        return self.request.request_id


class QueuedOpenings:
    """Requests of one response that are not open yet. Their deadlines count from `now`."""

    def __init__(self, openings: Iterable[Opening], now: float) -> None:
        self._began_at = now
        self._waiting = {each.request_id: each for each in openings}

    def take_next(self, now: float) -> Opening | None:
        for each in self._waiting.values():
            del self._waiting[each.request_id]
            left_s = max(0.0, each.request.deadline_s - (now - self._began_at))
            request = msgspec.structs.replace(each.request, deadline_s=left_s)
            return Opening(request, each.receiver, each.affinity_key, each.is_queueable)
        return None

    def take(self, request_id: str) -> Opening:
        return self._waiting.pop(request_id)

    def take_all(self) -> list[Opening]:
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())
