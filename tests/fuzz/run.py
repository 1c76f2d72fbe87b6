"""Runs the fuzz tests for a given time: `python -m tests.fuzz.run --seconds 600 http`.

Every test gets a separate process and an equal share of the time. atheris mutates the bytes from
which hypothesis makes its examples, towards code that no example has reached; without it hypothesis
draws at random. In both cases a failure ends the test's process, which prints the example.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, seed, settings

PACKAGE = "tests.fuzz"
ROUND = 200  # examples between two checks of the clock
MAX_BYTES = 8192  # for one example's choices
MAX_RSS_MB = 4096
NUM_SEEDS = 100
NAMES = sorted(path.stem[5:] for path in Path(__file__).parent.glob("test_*.py"))


def tests_of(module: Any) -> Iterator[tuple[str, bool]]:
    """The names of the tests that draw examples with hypothesis, and whether CPU time is tested."""
    for name, value in vars(module).items():
        if name.startswith("test_") and getattr(value, "is_hypothesis_test", False):
            yield name, getattr(value, "is_timed", False)


def run_all(names: list[str], seconds: int) -> int:
    """Returns how many tests failed."""
    tests = [
        (stem, test, is_timed)
        for stem in (f"test_{name}" for name in names)
        for test, is_timed in tests_of(importlib.import_module(f"{PACKAGE}.{stem}"))
    ]
    num_failed = 0
    for stem, test, is_timed in tests:
        share = str(max(1, seconds // len(tests)))
        print(f"{stem}.{test}: {share} s", flush=True)
        command = [sys.executable, "-m", f"{PACKAGE}.run", "--one", stem, test, "--seconds", share]
        command += ["--timed"] if is_timed else []
        num_failed += subprocess.run(command, check=False).returncode != 0
    print(f"{len(tests)} tests, {num_failed} failed", flush=True)
    return num_failed


def run_one(stem: str, name: str, seconds: int, *, is_timed: bool) -> None:
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris is None or is_timed:
        print("without atheris", flush=True)
        run_with_hypothesis(getattr(importlib.import_module(f"{PACKAGE}.{stem}"), name), seconds)
    else:
        run_with_atheris(atheris, stem, name, seconds)


def run_with_atheris(atheris: Any, stem: str, name: str, seconds: int) -> None:
    with atheris.instrument_imports(include=["services", "shared"]):
        module = importlib.import_module(f"{PACKAGE}.{stem}")
    found = tempfile.mkdtemp(prefix="hearth-fuzz-")
    options = [f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-rss_limit_mb={MAX_RSS_MB}"]
    options += [f"-artifact_prefix={found}/", "-print_final_stats=1", "-len_control=0"]
    corpus = tempfile.mkdtemp(prefix="hearth-corpus-")  # too few bytes end before an example does
    for number in range(NUM_SEEDS):
        (Path(corpus) / str(number)).write_bytes(os.urandom(MAX_BYTES // 4))
    atheris.Setup([sys.argv[0], *options, corpus], getattr(module, name).hypothesis.fuzz_one_input)
    atheris.Fuzz()


def run_with_hypothesis(test: Any, seconds: int) -> None:
    test._hypothesis_internal_use_settings = settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    end = time.monotonic() + seconds
    num_rounds = 0
    while time.monotonic() < end:
        seed(time.time_ns())(test)()
        num_rounds += 1
    print(f"{num_rounds * ROUND} examples", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--seconds", type=int, default=600, help="in all")
    parser.add_argument("--one", nargs=2, metavar=("FILE", "TEST"), help=argparse.SUPPRESS)
    parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"no {', '.join(sorted(unknown))}: one of {', '.join(NAMES)}")
    if given.one:
        run_one(*given.one, given.seconds, is_timed=given.timed)
    else:
        sys.exit(min(1, run_all(given.names or NAMES, given.seconds)))


if __name__ == "__main__":
    main()
