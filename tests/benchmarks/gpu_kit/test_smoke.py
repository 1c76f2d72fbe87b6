"""A kernel's wrong result, or its error, fails the part; the kernels after it are still checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.gpu_kit.failures import recorded, unavailable_as_row
from benchmarks.gpu_kit.kernels import tools
from benchmarks.gpu_kit.kernels.smoke import CASES, FIRST, check_all
from kernels.ops import TRITON_MODULES
from tests.benchmarks.gpu_kit.on_cpu import OnCpu, session_in
from tests.support.kernels.cases.case import Case, Inputs, Result, Results


def case_of(found: float, wanted: float = 1.0, *, is_exact: bool = True) -> Case:
    def full(value: float) -> Tensor:
        return torch.full((4,), value, dtype=torch.bfloat16)

    def launch(inputs: Inputs, is_exact: bool) -> Results:
        return (Result(full(found), lambda: full(wanted)),)

    return Case("linear", launch, (("is_exact", is_exact),), ("linear",))


def raising(error: Exception) -> Case:
    def launch(inputs: Inputs) -> Results:
        raise error

    return Case("linear", launch, (), ("linear",))


def by_case(session: OnCpu) -> dict[str, list[str]]:
    """The kinds of rows of each case."""
    found: dict[str, list[str]] = {}
    for row in session.rows:
        kinds = [kind for kind in ("ok", "digest", "raised", "status") if kind in row]
        found.setdefault(row["case"], []).extend(kinds)
    return found


def test_wrong_results_are_rows_and_failures(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    nan = float("nan")
    check_all(session, {"near": case_of(1.015), "far": case_of(1.04), "nan": case_of(nan)})
    assert session.failures == ["far", "nan"]
    assert [row["ok"] for row in session.rows if "ok" in row] == [True, False, False]
    assert all(row["sources"] for row in session.rows)


def test_only_exact_results_are_digested(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    check_all(session, {"exact": case_of(1.0), "free": case_of(1.0, is_exact=False)})
    assert by_case(session) == {"exact": ["ok", "digest"], "free": ["ok"]}


def test_kernel_that_raises_is_a_row_and_fails_the_part(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    cases = {"broken": raising(ValueError("out of resources")), "fine": case_of(1.0)}
    with pytest.raises(RuntimeError, match="failed: broken"):
        check_all(session, cases)
    assert by_case(session) == {"broken": ["raised"], "fine": ["ok", "digest"]}


def test_lost_device_ends_the_part(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    session.is_lost = True
    cases = {"broken": raising(RuntimeError("launch failed")), "fine": case_of(1.0)}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check_all(session, cases)
    assert list(by_case(session)) == ["broken"]


def test_missing_feature_is_no_failure(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    with unavailable_as_row(session, "IPC"):
        raise OSError("not on this runtime")
    failed: list[str] = []
    with recorded(session, "next", failed):
        session.add(case="next", ok=True)
    assert (by_case(session), failed) == ({"IPC": ["status"], "next": ["ok"]}, [])


SUMS = {"grouped_sums", "lane_sums"}  # by the kernels of `grouped_linear` and `lane_linear`
EXPERT_ROWS = {"add_experts", "sort_by_expert"}  # by the name of their module


def test_every_operation_of_the_engine_has_a_case() -> None:
    launched = {op for case in FIRST.values() for op in case.kernels}
    assert set(TRITON_MODULES) - SUMS - EXPERT_ROWS | {"expert_rows"} <= launched


def test_tools_launch_cases_of_the_table() -> None:
    assert {*tools.CHECKED, *tools.PROFILED} <= CASES.keys()
