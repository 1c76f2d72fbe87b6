"""The `hearth` command in the test's process: 0.01 s, instead of 0.6 s for an interpreter."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import structlog

from services.__main__ import main

ROOT = Path(__file__).parents[3]


def call_hearth(
    arguments: tuple[str, ...], environ: Mapping[str, str], text: str = ""
) -> CompletedProcess[str]:
    """Calls the console script's function, with this environment and `text` as standard input."""
    output, errors = io.StringIO(), io.StringIO()
    status = 0
    # A command configures logging for its process, but other tests of this process read their logs.
    with (
        patch.object(structlog, "configure"),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        patch.object(sys, "argv", ["hearth", *arguments]),
        patch.object(sys, "stdin", io.StringIO(text)),
        patch.dict(os.environ, environ, clear=True),
    ):
        try:
            main()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
    return CompletedProcess(["hearth", *arguments], status, output.getvalue(), errors.getvalue())
