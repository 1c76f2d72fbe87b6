"""A kernel's wrong result, or its error, fails the part; the kernels after it are still checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.gpu_kit.cases.case import Build, Case
from benchmarks.gpu_kit.failures import recorded, unavailable_as_row
from benchmarks.gpu_kit.kernels.smoke import CASES, check_all
from benchmarks.gpu_kit.session import Session
from kernels.ops import TRITON_MODULES
from tests.benchmarks.gpu_kit.on_cpu import OnCpu, session_in

ROOT = Path(__file__).parents[3]
INTERPRETED = (
    *("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul", "copy_blocks"),
    *("rotate_and_store", "rotate_and_store_latent", "sample", "top_k", "penalize"),
    *("gather_blocks, checksum", "scatter_blocks, checksum", "apply_token_mask", "decompress"),
    *("linear qkv, 1 rows, exact", "lane_linear o, 1 rows", "compressed_linear qkv, 1 rows, free"),
    *("grouped_linear Mixtral-8x7B gate_up, 64 tokens", "decode_attention 1 x 2048, exact"),
    *(f"{op} Mixtral-8x7B, 64 tokens" for op in ("route", "sort_by_expert", "add_experts")),
    "per_head_linear, 64 rows",
)


def case_of(found: float, wanted: float = 1.0, *, is_exact: bool = True) -> Build:
    def full(value: float) -> Tensor:
        return torch.full((4,), value)

    return lambda _: Case(("linear",), lambda: full(found), lambda: full(wanted), is_exact=is_exact)


def raising(error: Exception) -> Build:
    def build(_: object) -> Case:
        raise error

    return build


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
    check_all(session, {"near": case_of(1.015), "far": case_of(1.02), "nan": case_of(nan)})
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
    session = Session("smoke", Path(os.devnull), mode="dry")
    launched = {op for build in CASES.values() for op in build(session).kernels}
    assert set(TRITON_MODULES) - SUMS - EXPERT_ROWS | {"expert_rows"} <= launched


@pytest.mark.long
def test_cases_agree_with_their_references() -> None:
    """Under Triton's interpreter, in a process of its own: a variable selects it."""
    assert set(INTERPRETED) <= set(CASES)
    code = f"from {__name__} import check_interpreted; check_interpreted()"
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def check_interpreted() -> None:
    session = OnCpu("smoke", Path(os.devnull))
    chosen: dict[str, Callable[..., Case]] = {name: CASES[name] for name in INTERPRETED}
    check_all(session, chosen)
    assert session.failures == []
