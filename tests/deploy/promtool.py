"""Prometheus's own checker, where it is installed: HEARTH_PROMTOOL, or promtool on the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

_FOUND = shutil.which(os.environ.get("HEARTH_PROMTOOL", "promtool"))
needs_promtool = pytest.mark.skipif(
    _FOUND is None,
    reason="no promtool: apt-get install prometheus, or set HEARTH_PROMTOOL to its path",
)


def promtool(*arguments: str, given: str = "") -> str:
    """Returns its output. Fails the test unless it succeeds without a remark."""
    assert _FOUND is not None
    done = subprocess.run([_FOUND, *arguments], input=given, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output
