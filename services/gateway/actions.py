"""What the recovery core wants done; `service.py` does it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Message, ResendTokens, SubmitRequest


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
