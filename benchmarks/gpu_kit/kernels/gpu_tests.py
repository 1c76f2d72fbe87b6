"""The tests that need a GPU, a row for each as it ends: the first ones, the rest or a shard of it.

Without a device, the kernels of the first tests are launched: small in a dry run, of each function
once or, for the rest, all; and at real sizes to be compiled.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_kit.failures import raise_for, recorded
from benchmarks.gpu_kit.session import Session, Unavailable

ROOT = Path(__file__).resolve().parents[3]
FIRST = "tests/kernels/gpu/test_first.py"
PLACES = ("tests/kernels/gpu", "tests/shared/engine/test_on_devices.py")
NEEDED = ("pytest", "hypothesis", "msgspec", "structlog")  # imported by tests/conftest.py
MAX_WORKERS = 8
OPTIONS = ("-vv", "--tb=short", "--continue-on-collection-errors", "-p", "no:cacheprovider")


def run(session: Session, chosen: str = "first") -> None:
    """Runs the tests that are `chosen`: "first", "rest", or a shard of the rest, such as "1/4"."""
    is_first = chosen == "first"
    if session.is_dry:
        launch(session, is_first=is_first)
        return
    session.need_device()
    if is_first:
        run_tests(session, "-m", "gpu and first", FIRST)
    else:
        shard = () if chosen == "rest" else ("--shard", chosen)
        run_tests(session, "-m", "gpu and not first", *shard, *PLACES)


def run_tests(session: Session, *arguments: str) -> None:
    """Runs pytest in this process. Raises RuntimeError unless all tests passed or were skipped."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise Unavailable(f"not installed: {', '.join(missing)}")
    import pytest

    from benchmarks.gpu_kit.kernels.pytest_rows import RowPlugin

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a machine's other plugins take seconds
    rows = RowPlugin(session)
    options = *OPTIONS, "-p", "benchmarks.gpu_kit.kernels.pytest_rows", f"--rootdir={ROOT}"
    command = [*options, "-c", str(ROOT / "pyproject.toml"), *workers(), *arguments]
    status = pytest.main(command, plugins=[rows])
    session.add(case="counts", is_late=rows.is_late, by_outcome=dict(rows.counts))
    if rows.is_late:
        raise RuntimeError(f"the part's time ended after {rows.counts.total()} tests")
    if status or not rows.counts["passed"]:
        raise RuntimeError(f"{rows.counts['failed']} tests failed, {rows.counts['passed']} passed")


def workers() -> list[str]:
    """Returns the options of pytest-xdist: several processes compile kernels concurrently."""
    if find_spec("xdist") is None:
        return []
    number = max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // 2))
    return ["-p", "xdist.plugin", "-n", str(number), "--dist", "worksteal"]


def launch(session: Session, *, is_first: bool) -> None:
    """A row for each operation, with the number of its calls. Raises RuntimeError at the end for
    kernels that do not compile.
    """
    from tests.support.kernels.cases.case import Inputs
    from tests.support.kernels.cases.sizes import REAL, SMALL
    from tests.support.kernels.cases.table import CASES, samples

    if not is_first and session.mode == "compile":
        raise Unavailable("all but the first tests compile their kernels on the device")
    counts: Counter[str] = Counter()
    failed: list[str] = []
    is_compiled = session.mode == "compile"
    inputs = Inputs(REAL if is_compiled else SMALL, session.device, is_computed=False)
    for case in samples() if is_first and not is_compiled else CASES:
        with recorded(session, case.op, failed):
            case.launch(inputs)
        counts[case.op] += 1
    for op, number in counts.items():
        session.add(case=op, calls=number)
    raise_for(failed)
