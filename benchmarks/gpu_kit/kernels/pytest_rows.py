"""Plugins of pytest for a part of the kit: a row for each test as it ends, and shards.

`RowPlugin` adds the rows, in the process that reports: with xdist, the controller. A row that was
added survives the end of all processes, whatever ends them. The module itself is a plugin, too
(`-p`): it selects a shard, and replaces a worker whose device fails every call after an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Generator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_kit.session import Session

ROOT = Path(__file__).resolve().parents[3]
MAX_MESSAGE = 600
MAX_MESSAGES = 300  # later failures have rows without one: a part's rows are limited
RESERVED_S = 20.0  # xdist waits 10 s for busy workers, then kills them
TEST_FILE = re.compile(r"/test_(\w+)\.py")


class RowPlugin:
    """Stops the tests shortly before the session's end: `is_late`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._outcomes: dict[str, str] = {}
        self._num_messages = 0
        self.is_late = False

    @property
    def counts(self) -> Counter[str]:
        """The number of tests by outcome."""
        return Counter(self._outcomes.values())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has one row, and another for each failure of its fixtures or its process."""
        if report.when == "call" or report.outcome != "passed":
            columns: dict[str, Any] = {"seconds": round(report.duration, 3)}
            if ops := kernels_of(report.nodeid, report.user_properties):
                columns["kernels"] = ops
            self._add(report, **columns)
        if self._session.left_s < RESERVED_S:
            self.is_late = True
            pytest.exit("the part's time ends")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport, **columns: Any) -> None:
        if report.failed and self._num_messages < MAX_MESSAGES:
            self._num_messages += 1
            columns["message"] = message_of(report)
        if self._outcomes.get(report.nodeid) != "failed":
            self._outcomes[report.nodeid] = report.outcome
        self._session.add(case=report.nodeid, outcome=report.outcome, **columns)


def message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the exception of a failed test, or what ended its process."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)[:MAX_MESSAGE]


def kernels_of(nodeid: str, properties: list[tuple[str, object]]) -> tuple[str, ...]:
    """Returns the operations under test: the property `kernels`, else that of the file's name."""
    for name, value in properties:
        if name == "kernels" and isinstance(value, list | tuple):
            return tuple(map(str, value))
    named = TEST_FILE.search(nodeid)
    is_kernel = named and any((ROOT / "kernels" / "gpu").glob(f"*/{named[1]}.py"))
    return (named[1],) if named and is_kernel else ()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="the I-th of N parts of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = config.getoption("--shard")
    if not shard:
        return
    chosen = [item for item in items if is_in_shard(item.nodeid, shard)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def is_in_shard(nodeid: str, shard: str) -> bool:
    """Whether a test is in a shard, by a hash: it stays in its shard when other tests come and
    go.
    """
    index, number = map(int, shard.split("/"))
    if not 1 <= index <= number:
        raise pytest.UsageError(f"shard {shard} is none of 1/{number} to {number}/{number}")
    digest = blake2b(nodeid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % number == index - 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the process if the device is lost, and xdist starts another worker.

    After an illegal access every later call of the process would fail.
    """
    result = yield
    if is_device_lost():
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        item.session.shouldstop = f"the device fails every call after {item.nodeid}"
    return result


def is_device_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
