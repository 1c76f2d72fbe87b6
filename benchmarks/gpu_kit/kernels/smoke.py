"""Each kernel once, at the shapes of Llama-3.1-8B, beside torch in FP32 on the same device.

The most used kernels come first. The bits of each exact result are digested: two runs on cards of
one kind must agree.

    python -m benchmarks.gpu_kit.kernels.smoke NAME ...   launches, for NVIDIA's tools
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_kit.cases import attention, experts, gemm, kv, rows, sampling
from benchmarks.gpu_kit.cases.case import Build, Case
from benchmarks.gpu_kit.failures import raise_for, recorded
from benchmarks.gpu_kit.session import Session

CASES: dict[str, Build] = {
    **gemm.CASES,
    **attention.CASES,
    **kv.CASES,
    **rows.CASES,
    **sampling.CASES,
    **experts.CASES,
    **attention.LATENT_CASES,
    **kv.LATENT_CASES,
}


def run(session: Session, *names: str) -> None:
    """`names` of cases; all without any."""
    check_all(session, {name: CASES[name] for name in names or CASES})


def check_all(session: Session, cases: Mapping[str, Build]) -> None:
    """Raises RuntimeError at the end for cases that raised."""
    failed: list[str] = []
    for name, build in cases.items():
        with recorded(session, name, failed):
            check(session, name, build(session))
    raise_for(failed)


def check(session: Session, name: str, case: Case) -> None:
    found = case.launch()
    if session.is_dry:  # nothing was computed
        return
    session.check(name, found, case.wanted, tolerance=case.tolerance, kernels=case.kernels)
    if case.is_exact:
        session.digest(name, found, kernels=case.kernels)


def launch(session: Session, *names: str) -> None:
    """Prints the name of each case after its launch."""
    for name in names or CASES:
        CASES[name](session).launch()
        session.synchronize()
        print(f"launched {name}", flush=True)


if __name__ == "__main__":
    launch(Session("smoke", Path(os.devnull)), *sys.argv[1:])
