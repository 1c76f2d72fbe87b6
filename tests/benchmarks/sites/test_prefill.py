"""The published case: its workload, and which prompts are computed at the other site."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sites.prefill import BASELINE, LINKED, case_row, prompts


def test_workload_is_that_of_the_paper() -> None:
    lengths = np.array([each.input_length for each in prompts(1.0, 20_000)])
    assert lengths.mean() == pytest.approx(27_000, rel=0.03)
    assert (lengths > 19_400).mean() == pytest.approx(0.496, abs=0.02)


def test_long_prompts_are_computed_far_away_and_short_ones_here() -> None:
    linked, baseline = case_row(LINKED, 2.0, 100), case_row(BASELINE, 2.0, 100)
    assert 0.2 < linked["prefilled_far"] < 0.8
    mean_tokens = np.mean([each.input_length for each in prompts(2.0, 100)])
    assert linked["mean_tokens_far"] > 1.05 * mean_tokens
    assert 0 < linked["link_Gbit_per_s"] < 100
    assert baseline["prefilled_far"] == 0
    assert linked["ttft_mean_s"] < baseline["ttft_mean_s"]
