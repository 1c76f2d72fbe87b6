"""When a request for a model of hosts may fail. All hosts come back within seconds, so a patient
request is served, however often they are lost; so is one of UNDISTURBED_S without faults. A request
may fail with

    client_gone          if its client left
    deadline_exceeded    at its deadline, if it is an impatient one
    overloaded           if it is impatient, and the reported wait is longer than its deadline
    no_capacity          if its model was not in the registry while it waited; or before the end of
                         an impatient one's deadline, if the time that the answer names is later
"""

from __future__ import annotations

from shared.errors import DeadlineExceeded, NoCapacity, Overloaded
from tests.simulation.checks.excuses import LATE_S, Trouble
from tests.simulation.plan import PATIENT_S, UNDISTURBED_S, Plan
from tests.simulation.world.client import Client

BACK_S = 4.0  # until the hosts list a model again that has come back


def unexplained_hosted(client: Client, plan: Plan, troubles: list[Trouble]) -> str | None:
    """What is wrong about this request's failure; None if it did not fail, or had to."""
    error = client.rejection if client.end is None else client.end.error
    if error is None:
        return None
    if client.opened_at is None:
        return f"refused without a reason: {error}"
    if error.code == "client_gone":
        return None if client.left else "its client had not left"
    was_removed = _was_removed(client, troubles)
    if isinstance(error, NoCapacity) and was_removed:
        return None
    is_undisturbed = not plan.faults and client.plan.deadline_s >= UNDISTURBED_S
    if client.plan.deadline_s >= PATIENT_S or is_undisturbed:
        return f"a host could have served it: {error}"
    deadline_at = client.opened_at + client.plan.deadline_s
    if isinstance(error, DeadlineExceeded):
        is_due = -1e-6 <= client.ended_at - deadline_at <= LATE_S
        return None if is_due else f"failed {client.ended_at - deadline_at:.2f} s after its end"
    if isinstance(error, NoCapacity):
        ready_at = client.ended_at + (error.retry_after_s or 0.0)
        is_late = ready_at > deadline_at - LATE_S
        return None if is_late else f"waking ends in time: {error}"
    if isinstance(error, Overloaded) and "the wait is about" in error.message:
        return None
    return f"nothing explains {error.code}: {error}"


def _was_removed(client: Client, troubles: list[Trouble]) -> bool:
    return any(
        each.fault.kind == "model_removed"
        and each.fault.target == client.plan.model
        and each.began <= client.ended_at
        and client.sent_at <= each.ended + BACK_S
        for each in troubles
    )
