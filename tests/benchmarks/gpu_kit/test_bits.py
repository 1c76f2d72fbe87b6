"""The verdict on bits: its rows come in order, and what is unequal or raises denies it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_kit.bit_checks import batch_ops
from benchmarks.gpu_kit.bit_checks.sizes import FULL
from benchmarks.gpu_kit.bit_checks.verdict import Verdict
from benchmarks.gpu_kit.kernels.bits import Check, compare_rows, judge
from benchmarks.gpu_kit.operands import experts
from benchmarks.gpu_kit.session import Session
from kernels.ops import TRITON_MODULES
from kernels.reference.grouped_linear import grouped_linear
from tests.benchmarks.gpu_kit.on_cpu import OnCpu, session_in


def comparing(case: str, found: float, wanted: float = 1.0) -> Check:
    return lambda verdict: verdict.compare(case, torch.tensor([found]), torch.tensor([wanted]))


def raising(verdict: Verdict) -> None:
    raise ValueError("out of resources")


def verdicts(session: OnCpu) -> list[dict[str, Any]]:
    return [row for row in session.rows if row["case"] == "verdict"]


def test_verdict_comes_first_early_and_last(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    judge(session, {"a": comparing("a", 1.0)}, {"b": comparing("b", 1.0)})
    cases = [row["case"] for row in session.rows]
    assert cases == ["verdict", "a", "verdict", "b", "verdict"]
    found = [(row["state"], row.get("exact")) for row in verdicts(session)]
    assert found == [("running", None), ("main", True), ("final", True)]


@pytest.mark.parametrize("value", [1.0000001, float("nan")])
def test_unequal_bits_deny_exactness(value: float, tmp_path: Path) -> None:
    session = session_in(tmp_path)
    with pytest.raises(RuntimeError, match="unequal bits"):
        judge(session, {"a": comparing("a", 1.0)}, {"b": comparing("b", value, value + 1e-7)})
    main, final = verdicts(session)[1:]
    assert (main["exact"], final["exact"], final["unequal"]) == (True, False, ["b"])


def test_operation_that_raises_denies_exactness(tmp_path: Path) -> None:
    """It is a row, and the operations after it are still compared."""
    session = session_in(tmp_path)
    with pytest.raises(RuntimeError, match="raised"):
        judge(session, {"broken": raising, "a": comparing("a", 1.0)}, {})
    (final,) = verdicts(session)[2:]
    assert (final["exact"], final["raised"], final["num_equal"]) == (False, ["broken"], 1)


def test_row_that_depends_on_the_batch_is_found(tmp_path: Path) -> None:
    """Only batches of more than 64 rows change the last row's bits."""
    session = session_in(tmp_path)
    x = torch.ones(FULL.many_rows, 2)

    def op(rows: slice) -> torch.Tensor:
        own = x[rows].clone()
        own[-1] += float(len(own) > 64)
        return own

    verdict = Verdict(session)
    compare_rows(verdict, "op", batch_ops.RowOp(("linear",), op))
    assert len(verdict.unequal) == len(FULL.num_rows)
    (first, *_) = (row for row in session.rows if "is_equal" in row)
    assert (first["rows_that_differ"], first["most"]) == (
        0.5,
        1.0,
    )  # one of the last and first rows


SUMS = {"grouped_sums", "lane_sums"}  # by the kernels of `grouped_linear` and `lane_linear`
BY_ELEMENT = {"apply_token_mask", "copy_blocks", "gather_blocks", "penalize", "scatter_blocks"}
EXPERT_ROWS = {"add_experts", "sort_by_expert"}  # by the name of their module
FAST = {"expert_mlp"}  # in the fast mode alone


def test_every_operation_that_sums_is_compared() -> None:
    session = Session("bits", Path(os.devnull), mode="dry")
    builds = {**batch_ops.MAIN, **batch_ops.OTHERS}
    compared = {op for build in builds.values() for op in build(session).kernels}
    assert set(TRITON_MODULES) - SUMS - BY_ELEMENT - EXPERT_ROWS - FAST == (
        compared - {"expert_rows"} | {"prefill_attention"}
    )
    assert "expert_rows" in compared


@pytest.mark.parametrize("product", experts.PRODUCTS)
def test_rows_of_experts_return_to_their_tokens(product: str, tmp_path: Path) -> None:
    """A token's rows are the same whichever other tokens are in its batch."""
    session = session_in(tmp_path)
    mixture = experts.mixture_of(session, experts.QWEN3)
    own = experts.operands(session, mixture, product, 12)
    rows = {}
    for tokens in (range(12), range(5, 9)):
        routed = experts.routed(session, mixture, tokens)
        y = own.wanted(routed)
        index = routed.tokens if own.is_by_token else None
        x = own.x if own.is_by_token else own.x[routed.choices]
        expected = grouped_linear(
            x.float(), index, routed.offsets, own.weight.float(), lanes=own.lanes
        )
        torch.testing.assert_close(y, expected)
        rows[tokens] = y[routed.by_token].view(len(tokens), -1)
    torch.testing.assert_close(rows[range(5, 9)], rows[range(12)][5:9])
