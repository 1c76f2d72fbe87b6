"""Fleets whose workers differ in the size of their KV cache, or in their block size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.scheduler.worker_table import WorkerTable
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.timing_executor import FIRST_TOKEN_ID
from tests.simulation.plan import Fault, Plan
from tests.simulation.scenarios import fleets
from tests.simulation.scenarios.fleets import patient_request
from tests.simulation.simulation import run_plan

SMALL, LARGE = 8, 256  # blocks of 16: 128 and 4,096 tokens
FLEET = replace(fleets.FLEET, num_blocks=SMALL, pool_sizes={"decode-0": SMALL, "decode-1": LARGE})


def plan_with(
    *faults: Fault,
    num_requests: int = 12,
    max_tokens: int = 200,
    num_prompt_tokens: int = 40,
    num_choices: int = 1,
    is_same_prompt: bool = False,
    every_s: float = 0.05,
    **fleet: Any,
) -> Plan:
    first_token_ids = [FIRST_TOKEN_ID + (0 if is_same_prompt else n) for n in range(num_requests)]
    requests = tuple(
        patient_request(
            n,
            range(first, first + num_prompt_tokens),
            at_s=every_s * n,
            max_tokens=max_tokens,
            num_choices=num_choices,
            tenant_id="tenant-a",
        )
        for n, first in enumerate(first_token_ids)
    )
    return Plan(seed=1, fleet=replace(FLEET, **fleet), requests=requests, faults=faults)


def ignore_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a scheduler that asks for room for the prompt alone."""
    has_any = WorkerTable.has_any

    def ignoring(self: WorkerTable, *args: Any, num_context_tokens: int, **options: Any) -> bool:
        return has_any(self, *args, **options)

    put = WorkerTable.put
    unlimited = 2**31 - 1
    monkeypatch.setattr(
        WorkerTable,
        "put",
        lambda self, worker: put(
            self, replace(worker, max_context_tokens=unlimited, num_total_blocks=unlimited)
        ),
    )
    monkeypatch.setattr(WorkerTable, "has_any", ignoring)


@pytest.mark.each_value
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize(("is_same_prompt", "every_s"), [(False, 0.05), (True, 2.0)])
def test_no_answer_is_cut_by_a_small_worker(
    num_choices: int, is_same_prompt: bool, every_s: float
) -> None:
    """An idle worker that has computed a prompt is preferred for it, if its pool holds the answer,
    too.
    """
    for sizes in ((SMALL, LARGE), (LARGE, SMALL)):
        plan = plan_with(
            num_choices=num_choices,
            is_same_prompt=is_same_prompt,
            every_s=every_s,
            pool_sizes=dict(zip(("decode-0", "decode-1"), sizes, strict=True)),
        )
        outcome = run_plan(plan)
        assert outcome.wrongs == []
        assert outcome.endings == {"finished": 12}


def test_requests_that_fit_use_all_workers() -> None:
    """A prompt of 40 and 80 tokens fit the small worker, which survives the large one."""
    loss = Fault(at_s=0.0, kind="kill", target="decode-1", comes_back=False)
    outcome = run_plan(plan_with(loss, max_tokens=80))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 12}


def test_gateway_refuses_what_no_worker_holds() -> None:
    outcome = run_plan(plan_with(pool_sizes={"decode-0": SMALL, "decode-1": SMALL}))
    assert outcome.wrongs == []
    assert outcome.endings == {"refused: context_length_exceeded": 12}
    assert outcome.virtual_s < 10


def test_scheduler_refuses_at_once_after_the_large_worker_left() -> None:
    """The gateway still shows its context, for a while; later requests are not queued."""
    loss = Fault(at_s=0.0, kind="drain", target="decode-1", comes_back=False)
    plan = plan_with(loss)
    late = tuple(replace(each, at_s=each.at_s + 3.0) for each in plan.requests)
    outcome = run_plan(replace(plan, requests=late))
    assert outcome.wrongs == []
    assert outcome.endings == {"no_capacity": 12}
    assert outcome.virtual_s < 10


def test_answers_wait_for_the_large_worker_to_return() -> None:
    loss = Fault(at_s=1.5, kind="kill", target="decode-1", duration_s=3.0)
    outcome = run_plan(plan_with(loss))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 12}


def test_worker_hands_back_what_exceeds_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placed on the small worker by a scheduler that does not know better."""
    ignore_contexts(monkeypatch)
    outcome = run_plan(plan_with())
    assert outcome.endings == {"finished": 12}
    moves = [each for each in outcome.wrongs if each.endswith("submitted again for no reason")]
    assert moves and moves == outcome.wrongs


def test_oracle_finds_answers_that_the_pool_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the end of a worker's pool ends the request like its own end."""
    ignore_contexts(monkeypatch)
    apply = Engine.apply

    def cutting(self: Engine, *args: Any) -> list[StepProgress]:
        return [
            msgspec.structs.replace(each, finish_reason="length", error=None)
            if each.error is not None
            else each
            for each in apply(self, *args)
        ]

    monkeypatch.setattr(Engine, "apply", cutting)
    outcome = run_plan(plan_with())
    assert any("cut after 89 of 200 tokens" in each for each in outcome.wrongs)


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_workers_of_another_block_size_get_no_request(num_prefill: int) -> None:
    """The gateway prepares requests for the block size of most workers."""
    ids = ("decode-0", "decode-1", "decode-2", "prefill-0")
    sizes = dict(zip(ids, (32, 16, 16, 32), strict=True))
    plan = plan_with(
        num_decode=3,
        num_prefill=num_prefill,
        pool_sizes=dict.fromkeys(ids, LARGE),
        block_sizes=sizes,
    )
    outcome = run_plan(plan)
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 12}


def test_other_block_size_takes_over_after_a_loss() -> None:
    """The one worker left has another block size; new requests are prepared for it."""
    loss = Fault(at_s=0.0, kind="kill", target="decode-0", comes_back=False)
    plan = plan_with(
        loss,
        pool_sizes=dict.fromkeys(("decode-0", "decode-1"), LARGE),
        block_sizes={"decode-0": 16, "decode-1": 32},
    )
    late = tuple(replace(each, at_s=each.at_s + 3.0) for each in plan.requests)
    outcome = run_plan(replace(plan, requests=late))
    assert outcome.wrongs == []
    assert outcome.endings == {"finished": 12}
