"""The actions that `Streams` requests and `StreamDriver` performs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from shared.errors import NoCapacity
from shared.messages import (
    AbortReason,
    AbortRequest,
    AckFinished,
    CancelQueued,
    Message,
    Request,
    ResendTokens,
    SubmitRequest,
)
from shared.numerics import Numerics
from shared.subjects import SUBMIT, cancel, control, submit_to


@dataclass(frozen=True, slots=True)
class Publish:
    """A message that is sent once; the protocol recovers if it is lost."""

    subject: str
    message: Message


@dataclass(frozen=True, slots=True)
class Submit:
    """A submission; its outcome is passed to `on_queued` or `on_rejected`."""

    message: SubmitRequest


@dataclass(frozen=True, slots=True)
class Resend:
    """A resend request; its outcome is passed to `on_resent` or `on_resend_failed`."""

    worker_id: str
    message: ResendTokens


ResubmissionCause = Literal[
    "worker_lost",
    "worker_failed",
    "step_failed",  # a step with this request alone
    "context_full",  # the worker's KV cache is smaller than the request
    "worker_excluded",  # a late placement on a worker that this request excludes
    "placement_unknown",  # the worker no longer has the placement
    "placement_retired",  # aborted here before its scheduler named it
    "needs_dropped",  # the scheduler's release has no `needs`
    "resends_failed",
    "scheduler_lost",
    "scheduler_silent",
    "bus_reconnected",
    "regions_changed",  # those of its tenant
    "no_room",  # it waited for blocks at its worker, and another has taken it
]


@dataclass(frozen=True, slots=True)
class ReportResubmission:
    """A report of a resubmission to the log and the metrics. `worker_id` is the last worker, or
    None.
    """

    request_id: str
    cause: ResubmissionCause
    worker_id: str | None


@dataclass(frozen=True, slots=True)
class ReportBrokenSteps:
    """A report to the log that steps with this request alone failed on several workers."""

    request_id: str
    tenant_id: str


@dataclass(frozen=True, slots=True)
class ReportNumericsChange:
    """A report to the log and the metrics that an output continues with other numerics: a run
    without failures might have sampled other tokens.
    """

    request_id: str
    worker_id: str | None
    before: Numerics
    after: Numerics


@dataclass(frozen=True, slots=True)
class ReportUnlikePrefill:
    """A report to the log and the metrics that decode computes the prompt, since the KV of live
    prefill workers has other numerics or another format.
    """

    request_id: str
    worker_id: str


Report = ReportResubmission | ReportBrokenSteps | ReportNumericsChange | ReportUnlikePrefill
Action = Publish | Submit | Resend | Report


def is_bound(request: Request) -> bool:
    """Whether only some schedulers of the queue group may have the request, by their regions. Each
    region class has a queue group of its own.
    """
    return bool(request.allowed_regions) and not request.region_class


def submit_subject(message: SubmitRequest, scheduler_ids: Sequence[str]) -> str:
    """Returns the subject of the queue group for the first attempt. Later attempts, and all of a
    bound request, address the live schedulers `scheduler_ids` in turn, so that a retry avoids a
    scheduler that hangs. Raises NoCapacity for a bound request without one.
    """
    if is_bound(message.request) and not scheduler_ids:
        raise NoCapacity("no scheduler is in the regions of this tenant", retry_after_s=1.0)
    if not is_bound(message.request) and (message.attempt == 1 or not scheduler_ids):
        return SUBMIT
    turn = crc32(message.request.request_id.encode()) + message.attempt
    return submit_to(scheduler_ids[turn % len(scheduler_ids)])


class Actions:
    """The queue of due actions, in order. Acknowledgements of finished placements are batched by
    worker and come first; they may be late, since a worker resends a Finish only after 2 s.
    """

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._due: list[Action] = []
        self._acknowledged: dict[str, list[bytes]] = {}  # placement ids by worker

    def take(self, *, with_acknowledgements: bool = True) -> list[Action]:
        due = self._take_acknowledgements() if with_acknowledgements else []
        due += self._due
        self._due.clear()
        return due

    def _take_acknowledgements(self) -> list[Action]:
        acknowledged, self._acknowledged = self._acknowledged, {}
        return [
            Publish(control("decode", worker_id), AckFinished(placement_ids=tuple(placement_ids)))
            for worker_id, placement_ids in acknowledged.items()
        ]

    def submit(self, message: SubmitRequest) -> None:
        self._due.append(Submit(message))

    def report(self, report: Report) -> None:
        self._due.append(report)

    def resend(self, worker_id: str, message: ResendTokens) -> None:
        self._due.append(Resend(worker_id, message))

    def abort(
        self,
        worker_id: str,
        placement_id: bytes,
        reason: AbortReason,
        choice_index: int | None = None,
    ) -> None:
        message = AbortRequest(placement_id=placement_id, reason=reason, choice_index=choice_index)
        self._due.append(Publish(control("decode", worker_id), message))

    def acknowledge(self, worker_id: str, placement_id: bytes) -> None:
        self._acknowledged.setdefault(worker_id, []).append(placement_id)

    def cancel(self, scheduler_id: str, request_id: str, attempt: int | None) -> None:
        message = CancelQueued(request_id=request_id, gateway_id=self._gateway_id, attempt=attempt)
        self._due.append(Publish(cancel(scheduler_id), message))
