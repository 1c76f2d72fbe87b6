"""What the recovery core wants done; `stream_driver.py` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from shared.messages import (
    AbortReason,
    AbortRequest,
    AckFinished,
    CancelQueued,
    Message,
    ResendTokens,
    SubmitRequest,
)
from shared.subjects import SUBMIT, cancel, control, submit_to


@dataclass(frozen=True, slots=True)
class Publish:
    """Sent once; a lost message is repaired by the protocol."""

    subject: str
    message: Message


@dataclass(frozen=True, slots=True)
class Submit:
    """The outcome comes back through `on_queued` or `on_refused`."""

    message: SubmitRequest


@dataclass(frozen=True, slots=True)
class Resend:
    """The outcome comes back through `on_resent` or `on_resend_failed`."""

    worker_id: str
    message: ResendTokens


Action = Publish | Submit | Resend


def submit_subject(message: SubmitRequest, scheduler_ids: Sequence[str]) -> str:
    """Any scheduler takes a first try, further ones go to the live ones by turns: whom chance
    leads to a scheduler that hangs is not led there twice.
    """
    if message.attempt == 1 or not scheduler_ids:
        return SUBMIT
    turn = crc32(message.request.request_id.encode()) + message.attempt
    return submit_to(scheduler_ids[turn % len(scheduler_ids)])


class Actions:
    """What is to be done, in order, until it is taken. Endings are acknowledged together, before
    all else, and need not be at once: a worker waits for 2 s before it tells one again.
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
