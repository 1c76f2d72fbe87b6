"""A template whose forks fail, and whose workers raise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.host.workers.worker_template import TemplateReport
from shared.lifecycle.child_process import ROOT

# The kernel refuses the second fork, as it does where a limit of processes is reached.
TEMPLATE = """
import errno, os
from services.host.workers import worker_template
fork, num_forks = os.fork, 0
def limited():
    global num_forks
    num_forks += 1
    if num_forks == 2:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = limited
worker_template.import_worker = lambda: None  # no worker gets so far
worker_template.main()
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[TemplateReport], str]:
    """Returns the reports and the log of a template that was asked for three workers, each with a
    spec that raises.
    """
    log = tmp_path_factory.mktemp("template") / "template.log"
    with log.open("w") as errors:
        template = subprocess.Popen(
            [sys.executable, "-c", TEMPLATE, "1"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert template.stdin is not None and template.stdout is not None
    reports = [_report(template.stdout.readline())]
    for num_reports in (2, 1, 2):
        template.stdin.write(b"{}\n")
        template.stdin.flush()
        reports += [_report(template.stdout.readline()) for _ in range(num_reports)]
    template.stdin.close()
    assert template.wait() == 0 and template.stdout.read() == b""
    return reports, Path(log).read_text()


def _report(line: bytes) -> TemplateReport:
    return msgspec.json.decode(line, type=TemplateReport)


def test_fork_that_fails_ends_no_worker(ended: tuple[list[TemplateReport], str]) -> None:
    ready, first, first_end, failed, third, third_end = ended[0]
    assert ready == TemplateReport(0)
    assert failed == TemplateReport(0, failure="Resource temporarily unavailable")
    assert (first_end, third_end) == (TemplateReport(first.pid, 1), TemplateReport(third.pid, 1))


def test_worker_that_raises_says_so(ended: tuple[list[TemplateReport], str]) -> None:
    assert ended[1].count("missing required field `config`") == 2
