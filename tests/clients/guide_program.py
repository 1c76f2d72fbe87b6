"""Runs a program of the guides in a client's environment, as a reader does."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.account import Account
from tests.support.guide_blocks import Block

GUIDES_MODEL = "hearth-demo"
LIMIT_S = 120


def run_program(block: Block, account: Account, model: str) -> str:
    """Returns what it printed. Raises AssertionError if it failed."""
    environ = {**os.environ, "HEARTH_URL": account.url, "HEARTH_API_KEY": account.token}
    done = subprocess.run(
        [sys.executable, "-c", block.text.replace(GUIDES_MODEL, model)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{block}: {done.stderr}"
    return done.stdout
