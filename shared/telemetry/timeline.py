"""The timeline of one request: what each process did for it, and for how long. No I/O.

A gateway builds the `Timeline` of each of its requests from its own clock and from the durations
that workers and schedulers report, keeps the last ones, and answers `hearth trace` and
`GET /v1/requests/{id}/timeline` with it. It holds no text of a prompt or of an output.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PhaseName = Literal[
    "validate",  # gateway: authentication, limits, body
    "render",
    "tokenize",
    "submit",  # gateway: from the tokens to the scheduler's reply
    "queue",  # scheduler
    "placement",  # scheduler: from its decision to decode's reply
    "reserve",  # decode: from the command to blocks and, if remote, an accepted prefill
    "prefill_wait",  # prefill: from the command to its first step
    "prefill",  # prefill, or decode if it computes the prompt
    "kv_push",  # prefill to decode; `num_bytes`
    "first_token",  # decode: from complete KV to the first token, and its way to the gateway
    "decode",  # begins with the first token and lasts to the end
    "recovery",  # gateway: from the loss of a process to the resubmission
    "client_stall",  # the client did not read its response
]


class Phase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A phase of a request. Phases of one try do not overlap."""

    name: PhaseName
    """What was done."""
    process_id: str
    """The process that did it."""
    start_s: float
    """Seconds since the request arrived at the gateway."""
    duration_s: float
    """How long it took, in seconds."""
    num_bytes: int = 0
    """Bytes of KV that were pushed."""
    num_tokens: int = 0
    """Tokens that were computed or pushed."""
    num_steps: int = 0
    """Steps of the engine."""
    port: str = ""
    """The way of the KV, such as `memfd (same host)`."""
    num_copies: int = 0
    """Copies of each byte of the KV."""
    predicted_s: float = 0.0
    """Of this many bytes, before the first was sent."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """The continuation of a request after tries that did not finish it."""

    from_workers: tuple[str, ...]
    """The workers of the tries since its last token."""
    cause: str
    """Why it left the first of them."""
    worker: str
    """The worker that continued it."""
    pause_s: float
    """Seconds from its last token, or from the submission, to the first token of `worker`."""


class Try(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One placement of a request."""

    number: int
    """Counts the tries from 1."""
    placement_id: str = ""
    """Hexadecimal; empty: never placed."""
    scheduler_id: str = ""
    """The scheduler that placed it."""
    worker_id: str = ""
    """The decode worker; empty: never placed."""
    prefill_worker_id: str = ""
    """Empty: the decode worker computed the prompt."""
    outcome: str
    """A finish reason, an error code, or the reason for the next try."""
    move: Move | None = None  # None: it continued nothing, or gave no token
    """How it continued what an earlier try had not finished."""
    phases: tuple[Phase, ...] = ()
    """What was done in this try."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The phases of a request; those until the first token add up to `ttft_s`."""

    request_id: str
    tenant_id: str
    gateway_id: str
    """The gateway that owned the request."""
    model: str
    """The name of the model."""
    dialect: str = ""
    """The API through which it came."""
    status: int = 200
    """The HTTP status of its response."""
    outcome: str
    """A finish reason or an error code."""
    started_at: float
    """Seconds since 1970, by the clock of the gateway."""
    duration_s: float
    """Seconds from its arrival to its end."""
    ttft_s: float | None = None
    """Seconds until the first token, as clients measure them; missing: no token came."""
    num_prompt_tokens: int = 0
    """Tokens of the prompt."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that a cache held."""
    num_output_tokens: int = 0
    """Tokens of the output."""
    num_reasoning_tokens: int = 0
    """A part of the output tokens."""
    num_late_masks: int = 0
    """Steps that it sat out, as the mask of its grammar came late."""
    gateway_phases: tuple[Phase, ...] = ()
    """Phases before the first try and beside all of them."""
    tries: tuple[Try, ...] = ()
    """One for each placement: a second one after the loss of a worker."""

    @property
    def num_resubmissions(self) -> int:
        return max(0, len(self.tries) - 1)
