"""Reads the files of a model in a process with limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.gateway.models.model_check import (
    CPU_LIMIT_S,
    MAX_REASON_CHARS,
    MAX_REPLY_BYTES,
    MEMORY_LIMIT_BYTES,
    PROGRAM_LIMIT_S,
    CheckedModel,
    ModelCheck,
)
from shared.errors import ConfigError
from shared.lifecycle.child_process import child_environ, is_stopped
from shared.transport.wire_errors import UNREADABLE, one_line, printable_line

MODULE = "services.gateway.models.model_check"
WALL_LIMIT_S = 180.0  # a process may wait for a disk, on a busy machine also for a core
SUSPECT_S = 0.5  # twice, and a stopped process is killed
# Native code that finds no memory or no stack aborts.
ENDED_BY_LIMITS = {signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV}


def checked_model(
    model_dir: Path,
    choice: str,
    tool_format: str,
    template_file: str = "",
    *,
    module: str = MODULE,
) -> CheckedModel:
    """Returns what the gateway needs of the model. `choice`, `tool_format`: see `family_of`;
    `template_file`: see `ModelText`. Blocks its thread; others run. Raises ConfigError for files
    that cannot be read within the limits.
    """
    command = [sys.executable, "-m", module, str(model_dir), choice, tool_format, template_file]
    try:
        done = _completed(command)
        if done.returncode == -signal.SIGKILL:  # no limit sends it: one more may live
            done = _completed(command)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{model_dir}: reading it takes more than {WALL_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise ConfigError(f"{model_dir}: {_failure(done.returncode, done.stderr)}")
    if len(done.stdout) > MAX_REPLY_BYTES:
        raise ConfigError(f"{model_dir}: the result of its check is too long")
    try:
        found = msgspec.msgpack.decode(done.stdout, type=ModelCheck)
    except UNREADABLE as error:
        raise ConfigError(f"{model_dir}: no result of its check: {one_line(error)}") from None
    if found.model is None:
        raise ConfigError(found.failure)
    return found.model


def _completed(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Runs the command, and kills a process that has been stopped. Raises TimeoutExpired."""
    until, was_stopped = time.monotonic() + WALL_LIMIT_S, False
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environ(os.environ),
    ) as process:
        while True:
            try:
                output, errors = process.communicate(timeout=SUSPECT_S)
                return subprocess.CompletedProcess(command, process.returncode, output, errors)
            except subprocess.TimeoutExpired:
                before, was_stopped = was_stopped, is_stopped(process.pid)
                is_late = time.monotonic() >= until
                if is_late or (before and was_stopped):
                    process.kill()
                if is_late:
                    raise


def _failure(status: int, errors: bytes) -> str:
    if status == -signal.SIGPROF:
        return f"its templates take more than {PROGRAM_LIMIT_S:g} s to compile"
    if -status in ENDED_BY_LIMITS:
        limits = f"{CPU_LIMIT_S} s or {MEMORY_LIMIT_BYTES >> 30} GiB"
        return f"its tokenizer or templates take more than {limits} to load (status {status})"
    if status == -signal.SIGKILL:
        return "the process that checks it was killed, or stopped, twice"
    tail = printable_line(errors[-MAX_REASON_CHARS:].decode(errors="replace"), MAX_REASON_CHARS)
    return f"its check failed (status {status}): …{tail}"
