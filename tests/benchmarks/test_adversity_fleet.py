"""The counts of `benchmarks/adversity/` for failing devices, replaced processes and distance."""

from __future__ import annotations

import importlib

import msgspec
import numpy as np
import pytest

from benchmarks.adversity.__main__ import MODULES
from benchmarks.adversity.devices import num_equal
from benchmarks.adversity.distance import MAX_ROUND_TRIPS, NUM_REQUESTS, bars_of
from benchmarks.adversity.load import completion, is_full, num_moves
from benchmarks.adversity.worker import POISON_OUTPUT_POSITION, StepFaults
from benchmarks.report import Bar
from benchmarks.serving.cluster import events_of
from shared.engine.step import SamplingInputs, StepInputs, sampling_rows
from tests.support.cluster.clients import Exchange

MAX_TOKENS = 12


def exchange(
    text: str = "a", *, num_tokens: int = MAX_TOKENS, took_s: float = 0.1, **info: object
) -> Exchange:
    """A response that ended well."""
    usage = {"prompt_tokens": 4, "completion_tokens": num_tokens}
    last = {"choices": [{"index": 0, "text": text}], "usage": usage, "hearth": info}
    return Exchange(
        completion(1, num_prompt_tokens=4, max_tokens=MAX_TOKENS),
        "gateway",
        ended=took_s,
        status=200,
        events=[b"data: " + msgspec.json.encode(last)],
        is_done=True,
    )


def rejected() -> Exchange:
    return Exchange({}, "gateway", status=503, events=[b'{"error": {"code": "no_capacity"}}'])


def inputs(seeds: list[int], output_positions: list[int]) -> StepInputs:
    """A step with one row for each seed."""
    zeros = np.zeros(len(seeds), dtype=np.int64)
    sampling = SamplingInputs(
        logits_indices=zeros,
        rows=sampling_rows(len(seeds), seed=seeds, output_position=output_positions),
    )
    return StepInputs(zeros, zeros, zeros, zeros, zeros, zeros.reshape(-1, 1), sampling)


def test_log_entries_are_found_by_name_among_other_lines() -> None:
    log = 'Traceback\n{"event": "ready"}\n{"event": "step_failed", "n": 3}\n{"event": "step_fai'
    assert events_of(log, "step_failed") == [{"event": "step_failed", "n": 3}]


def test_full_answer_has_all_tokens_that_were_asked_for() -> None:
    assert is_full(exchange())
    assert not is_full(exchange(num_tokens=MAX_TOKENS - 1))
    assert not is_full(rejected())
    assert num_moves(exchange(num_resubmissions=2)) == 2
    assert num_moves(rejected()) == 0


def test_answers_are_equal_if_both_are_full_and_have_one_text() -> None:
    expected = [exchange("a"), exchange("b"), exchange("c"), rejected()]
    others = [exchange("a"), exchange("x"), exchange("c", num_tokens=1), rejected()]
    assert num_equal(expected, others) == 1


def test_device_fails_every_step_from_a_moment_on() -> None:
    faults = StepFaults(after_s=1.0)
    faults.check(inputs([1], [0]), since_first_s=0.9)
    with pytest.raises(RuntimeError, match="every step"):
        faults.check(inputs([1], [0]), since_first_s=1.0)


@pytest.mark.parametrize(
    ("seed", "position", "is_broken"),
    [(9, POISON_OUTPUT_POSITION, True), (9, POISON_OUTPUT_POSITION - 1, False), (8, 50, False)],
)
def test_poisonous_row_breaks_its_steps_once_it_shares_them(
    seed: int, position: int, is_broken: bool
) -> None:
    faults, step = StepFaults(poison_seed=9), inputs([1, seed], [50, position])
    StepFaults().check(step, since_first_s=100.0)
    if is_broken:
        with pytest.raises(RuntimeError, match="row"):
            faults.check(step, since_first_s=0.0)
    else:
        faults.check(step, since_first_s=0.0)


def bar_of(bars: list[Bar], name: str) -> Bar:
    (found,) = (each for each in bars if each.name == name)
    return found


@pytest.mark.parametrize(("far_s", "holds"), [(0.1 + 8 * 0.3, True), (0.1 + 8 * 0.3 + 0.01, False)])
def test_median_at_a_distance_is_bounded_by_round_trips(far_s: float, holds: bool) -> None:
    assert MAX_ROUND_TRIPS == 8
    here, far = [exchange()] * NUM_REQUESTS, [exchange(took_s=far_s)] * NUM_REQUESTS
    bars = bars_of("mixed", {0: here, 300: far})
    assert bar_of(bars, "D1 mixed, RTT 300 ms: p50").holds is holds


def test_every_request_counts_at_a_distance(capsys: pytest.CaptureFixture[str]) -> None:
    pushed = exchange(decode_worker="decode-there", num_pushed_tokens=35)
    given = [pushed] * (NUM_REQUESTS - 1) + [rejected()]
    bars = bars_of("apart", {0: [pushed] * NUM_REQUESTS, 120: given})
    answered = bar_of(bars, "D1 apart, RTT 120 ms: answered, of 20")
    assert (answered.value, answered.holds) == (NUM_REQUESTS - 1, False)
    assert bar_of(bars, "D1 apart, RTT 120 ms: KV pushed there").value == NUM_REQUESTS - 1
    assert "no_capacity" in capsys.readouterr().out


@pytest.mark.parametrize("module", MODULES)
def test_each_module_measures_its_rows(module: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.adversity.{module}").measure)
