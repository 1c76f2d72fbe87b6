"""What the gateway itself measures of one response, by its own clock. No I/O."""

from __future__ import annotations

from services.gateway.observability.telemetry.trace_context import TraceContext
from shared.errors import HearthError
from shared.telemetry.timeline import PhaseName

MIN_STALL_S = 0.001  # less is the time of a system call


class RequestRecord:
    """From the arrival of a request to the last byte of its response."""

    def __init__(
        self,
        request_id: str,
        arrived_at: float,
        *,
        dialect: str = "",
        trace: TraceContext | None = None,
    ) -> None:
        """`trace`: of this gateway's span, or of the caller's if this gateway does not trace."""
        self.request_id = request_id
        self.arrived_at = arrived_at
        self.dialect = dialect
        self.trace = trace
        self.attributes: dict[str, str | int | float | bool] = {}  # of its span
        self.is_streamed: bool | None = None  # None: rejected before that was known
        self.tenant_id = ""
        self.status = 200  # of the error that rejected the request
        self.outcome = "none"  # its code
        self.phase: PhaseName = "validate"  # that runs
        self.phase_began_at = arrived_at
        self.spent_s: dict[PhaseName, float] = {}  # of phases before it, in the order of the first
        self.stalled_at = 0.0
        self.stall_s = 0.0
        self.ended_at: float | None = None  # all outputs

    def begin(self, phase: PhaseName, now: float) -> None:
        """The phase before it ends. Prompts of one response are prepared one after the other: their
        times are added, since each of a thousand prompts has a timeline with these phases.
        """
        spent_s = now - self.phase_began_at
        self.spent_s[self.phase] = self.spent_s.get(self.phase, 0.0) + spent_s
        self.phase, self.phase_began_at = phase, now

    def reject(self, error: HearthError) -> None:
        """Keeps no reference: its traceback has the request's body, and this record."""
        self.status, self.outcome = error.http_status, error.code

    def record_send(self, began_at: float, now: float) -> None:
        """Counts only what the client let the gateway wait for."""
        if now - began_at >= MIN_STALL_S:
            if not self.stall_s:
                self.stalled_at = began_at
            self.stall_s += now - began_at
