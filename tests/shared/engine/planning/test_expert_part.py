"""Which experts and columns a rank holds, and what ranks send each other for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from shared.engine.model_config.moe_config import MoeConfig, Routing
from shared.engine.parallel.expert_part import expert_part, expert_range, split_of
from shared.engine.planning.step_bytes import StepShape
from shared.errors import ConfigError

MOE = MoeConfig(
    num_experts=16,
    experts_per_token=2,
    intermediate_size=1024,
    routing=Routing(score="softmax"),
)
STEP = StepShape(hidden_size=768, vocab_size=1000, num_tokens=4, moe=MOE)


@pytest.mark.parametrize(
    ("num_experts", "tp", "inner", "expected"),
    [
        (16, 2, 1024, "ep"),
        (16, 4, 1024, "tp"),
        (128, 8, 768, "ep"),
        (8, 8, 1024, "tp"),
        (8, 8, 64, "ep"),  # its columns are too few
    ],
)
def test_auto_spreads_many_experts(num_experts: int, tp: int, inner: int, expected: str) -> None:
    moe = changed(MOE, num_experts=num_experts, intermediate_size=inner)
    assert split_of(moe, tp, "auto") == expected


def test_experts_are_contiguous_and_even() -> None:
    ranges = [expert_range(10, rank, 4) for rank in range(4)]
    assert ranges == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_shared_expert_is_cut_by_columns_in_both() -> None:
    moe = changed(MOE, shared_intermediate_size=300)
    for asked in ("ep", "tp"):
        shared = [expert_part(moe, rank, 2, asked).shared for rank in range(2)]  # type: ignore[arg-type]
        assert shared == [(0, 160), (160, 300)]
    narrow = changed(MOE, shared_intermediate_size=40)
    with pytest.raises(ConfigError, match="the 40 columns of the shared expert are too few"):
        expert_part(narrow, 0, 4, "ep")


def test_rows_of_experts_are_sent() -> None:
    """A layer: the sum of o_proj, and the rows of two experts of each of four tokens."""
    row = 768
    sums = replace(STEP, moe=None).stage_traffic(2, 1, is_first=False, is_last=False).num_bytes / 2
    assert sums == 4 * row * 4
    spread = replace(STEP, experts="ep").stage_traffic(2, 1, is_first=False, is_last=False)
    assert spread.num_bytes == sums + 4 * row * 2  # half of 8 rows, in BF16
    cut = replace(STEP, experts="tp").stage_traffic(2, 1, is_first=False, is_last=False)
    assert cut.num_bytes == sums + 8 * row * 4
