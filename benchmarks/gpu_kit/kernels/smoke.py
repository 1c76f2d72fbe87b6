"""Each kernel once, at the shapes of real models, beside torch in FP32 on the same device.

The most used kernels come first. The bits of each exact result are digested: two runs on cards of
one kind must agree.

    python -m benchmarks.gpu_kit.kernels.smoke NAME ...   launches, for NVIDIA's tools
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_kit.failures import raise_for, recorded
from benchmarks.gpu_kit.session import Session
from tests.support.kernels.cases import table
from tests.support.kernels.cases.case import Case

CASES = {str(case): case for case in table.CASES}
# Options and functions whose other cases are enough for a first contact.
LATER = {"one", "chunk", "rank", "half"}
VARIANTS = ("_of_more_heads", "_in_window", "_with_bias")


def is_first(case: Case) -> bool:
    is_later = LATER & {str(value) for _, value in case.options}
    return str(case).startswith("linear-") or not (
        is_later or case.function.__name__.endswith(VARIANTS)
    )


FIRST = {name: case for name, case in CASES.items() if is_first(case)}


def run(session: Session) -> None:
    check_all(session, FIRST)


def check_all(session: Session, cases: Mapping[str, Case]) -> None:
    """Raises RuntimeError at the end for cases that raised."""
    failed: list[str] = []
    for name, case in cases.items():
        with recorded(session, name, failed):
            check(session, name, case)
    raise_for(failed)


def check(session: Session, name: str, case: Case) -> None:
    """A case's results are numbered after the first."""
    for number, result in enumerate(case.launch(session.inputs)):
        label = f"{name}, {number}" if number else name
        session.check(label, result, kernels=case.kernels)
        if case.is_exact:
            session.digest(label, result.found, kernels=case.kernels)


def launch(session: Session, *names: str) -> None:
    """Prints the name of each case after its launch."""
    for name in names:
        CASES[name].launch(session.inputs)
        session.synchronize()
        print(f"launched {name}", flush=True)


if __name__ == "__main__":
    launch(Session("smoke", Path(os.devnull)), *sys.argv[1:])
