"""Runs the tests of a folder as a part of the kit does: ROWS [PYTEST ARGUMENTS]."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu_kit.kernels.gpu_tests import run_tests
from benchmarks.gpu_kit.session import Session

if __name__ == "__main__":
    run_tests(Session("tests", Path(sys.argv[1])), *sys.argv[2:])
