"""The small fleet of the scenarios, and requests that any of its workers can answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID, StepCost
from shared.messages import SamplingParams
from tests.simulation.plan import PATIENT_S, POISON, Fault, FleetPlan, Plan, RequestPlan

FLEET = FleetPlan(
    num_gateways=1,
    num_schedulers=1,
    num_indices=1,
    num_prefill=0,
    num_decode=2,
    num_both=0,
    num_blocks=64,
    max_batch_tokens=128,
    max_sequences=32,
    cost=StepCost(base_s=0.005, per_token_s=20e-6),
    copy_s=0.0,
    max_queued_requests=100,
)


def patient_request(
    number: int,
    prompt: Sequence[int],
    *,
    at_s: float,
    max_tokens: int = 12,
    num_choices: int = 1,
    tenant_id: str | None = None,
) -> RequestPlan:
    """`tenant_id`: by default two tenants take turns."""
    return RequestPlan(
        request_id=f"r{number}",
        at_s=at_s,
        tenant_id=tenant_id or f"tenant-{'ab'[number % 2]}",
        prompt=tuple(prompt),
        num_choices=num_choices,
        sampling=SamplingParams(seed=number, max_tokens=max_tokens),
        deadline_s=PATIENT_S,
        pooling=None,
        stop_modulus=0,
        leaves_after_s=None,
    )


def plan_with(
    *faults: Fault, num_requests: int = 60, poisoned: tuple[int, ...] = (), **fleet: int
) -> Plan:
    """Requests in a steady stream; those of the numbers `poisoned` break steps."""
    requests = tuple(
        patient_request(
            n,
            (POISON if n in poisoned else FIRST_TOKEN_ID, 100 + n, 200 + n),
            at_s=0.05 * n,
            num_choices=1 + n % 2,
        )
        for n in range(num_requests)
    )
    return Plan(seed=1, fleet=replace(FLEET, **fleet), requests=requests, faults=faults)
