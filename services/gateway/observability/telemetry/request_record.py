"""The gateway's own measurements of one response, on its clock. No I/O."""

from __future__ import annotations

from services.gateway.observability.telemetry.trace_context import TraceContext
from shared.errors import HearthError
from shared.telemetry.timeline import PhaseName

MIN_STALL_S = 0.001  # a system call takes less


class RequestRecord:
    """The measurements of a response, from the arrival of its request to its last byte."""

    def __init__(
        self,
        request_id: str,
        arrived_at: float,
        *,
        dialect: str = "",
        trace: TraceContext | None = None,
    ) -> None:
        """`trace` has the gateway's span, or the caller's if this gateway does not trace."""
        self.request_id = request_id
        self.arrived_at = arrived_at
        self.dialect = dialect
        self.trace = trace
        self.attributes: dict[str, str | int | float | bool] = {}  # the span's
        self.is_streamed: bool | None = None  # None if rejected before this was known
        self.tenant_id = ""
        self.is_exported = True  # False: its spans may not be where the collector is
        self.response_id = ""  # empty: it ends with the request's
        self.status = 200  # the HTTP status of the error that rejected the request
        self.outcome = "none"  # the code of that error
        self.phase: PhaseName = "validate"  # the current phase
        self.phase_began_at = arrived_at
        self.spent_s: dict[PhaseName, float] = {}  # earlier phases, in order
        self.stalled_at = 0.0
        self.stall_s = 0.0
        self.ended_at: float | None = None  # when all outputs have ended

    def begin(self, phase: PhaseName, now: float) -> None:
        """Ends the current phase and begins another. A response's prompts are prepared one after
        the other: their times are added, since each of a thousand prompts has a timeline with these
        phases.
        """
        spent_s = now - self.phase_began_at
        self.spent_s[self.phase] = self.spent_s.get(self.phase, 0.0) + spent_s
        self.phase, self.phase_began_at = phase, now

    def reject(self, error: HearthError) -> None:
        """Records the error's status and code. A reference to the error would retain its traceback,
        and so the request's body and this record.
        """
        self.status, self.outcome = error.http_status, error.code

    def record_send(self, began_at: float, now: float) -> None:
        """Adds the time that the client made the gateway wait, if it is MIN_STALL_S or longer."""
        if now - began_at >= MIN_STALL_S:
            if not self.stall_s:
                self.stalled_at = began_at
            self.stall_s += now - began_at
