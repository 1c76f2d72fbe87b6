"""Cuts of a pipeline: none is better, and large models are balanced."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.planning.stages import (
    ModelCosts,
    cut_stages,
    imbalance,
    stage_costs,
)

# Kimi K2: weights read for one token, in millions. 61 layers, the first dense, 163,840 tokens.
ATTENTION = 7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168
DENSE, EXPERT = 3 * 7168 * 18_432, 3 * 7168 * 2048
KIMI = ModelCosts(
    layers=(ATTENTION + DENSE, *[ATTENTION + 9 * EXPERT] * 60),
    embedding=7168,
    lm_head=7168 * 163_840,
)
# Long prompts: experts are all read, and the dense layer is far cheaper than the others.
KIMI_PREFILL = ModelCosts((ATTENTION + DENSE, *[ATTENTION + 24 * EXPERT] * 60), 0, 7168 * 163_840)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("costs", [KIMI, KIMI_PREFILL])
def test_slowest_stage_of_a_large_model_is_near_the_mean(
    costs: ModelCosts, num_stages: int
) -> None:
    assert imbalance(costs, cut_stages(costs, num_stages)) <= 1.10


def test_equal_numbers_of_layers_would_not_be_balanced() -> None:
    assert imbalance(KIMI, (0, 8, 16, 24, 31, 38, 46, 53, 61)) > 1.2


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7),
    st.integers(0, 30),
    st.integers(0, 30),
    st.data(),
)
def test_no_cut_has_a_faster_slowest_stage(
    layers: list[int], embedding: int, lm_head: int, data: st.DataObject
) -> None:
    costs = ModelCosts(tuple(map(float, layers)), embedding, lm_head)
    num_layers = len(layers)
    num_stages = data.draw(st.integers(1, num_layers))
    borders = cut_stages(costs, num_stages)
    assert borders[0] == 0
    assert borders[-1] == num_layers
    assert all(first < second for first, second in pairwise(borders))
    every = [
        (0, *middle, num_layers) for middle in combinations(range(1, num_layers), num_stages - 1)
    ]
    assert borders == min(
        every,
        key=lambda cut: (
            max(stage_costs(costs, cut)),
            sum(cost * cost for cost in stage_costs(costs, cut)),
            cut,
        ),
    )


def test_ends_belong_to_the_outermost_stages() -> None:
    costs = ModelCosts((1.0, 1.0, 1.0, 1.0), embedding=5.0, lm_head=7.0)
    assert stage_costs(costs, (0, 1, 3, 4)) == [6.0, 2.0, 8.0]


@pytest.mark.parametrize("num_stages", [0, 4])
def test_impossible_numbers_of_stages_are_rejected(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"3 layers cannot form {num_stages} stages"):
        cut_stages(ModelCosts((1.0, 1.0, 1.0)), num_stages)


@pytest.mark.parametrize("layers", [(), (1.0, -1.0), (float("nan"),), (float("inf"),)])
def test_impossible_costs_are_rejected(layers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"without layers|negative or not finite"):
        ModelCosts(layers)
