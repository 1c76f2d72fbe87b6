"""Has the files of a model read by a process with limits, before this process reads them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from services.gateway.models.model_check import (
    CPU_LIMIT_S,
    MAX_REASON_CHARS,
    MEMORY_LIMIT_BYTES,
    PROGRAM_LIMIT_S,
    ModelCheck,
    printable_line,
)
from services.gateway.tools.family import Family
from shared.errors import ConfigError
from shared.lifecycle.child_process import child_environ
from shared.transport.wire_errors import UNREADABLE, one_line

MODULE = "services.gateway.models.model_check"
WALL_LIMIT_S = 180.0  # of a process that waits for a disk; on a busy machine also for a core
MAX_CHECKED = 1024
MAX_REPLY_BYTES = 8 << 20
# Native code that finds no memory or no stack aborts.
ENDED_BY_LIMITS = {signal.SIGXCPU, signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV}


class CheckedModels:
    """Checks a folder once, until one of its files changes. May be called from any thread."""

    def __init__(self, tool_format: str) -> None:
        self._tool_format = tool_format
        self._families: dict[object, Family] = {}

    def family(self, model_dir: Path) -> Family:
        """As `checked_family`."""
        state = _state(model_dir)
        found = self._families.get(state)
        if found is None:
            found = checked_family(model_dir, "", self._tool_format)
            if len(self._families) >= MAX_CHECKED:
                self._families.clear()
            self._families[state] = found
        return found


def _state(model_dir: Path) -> object:
    """Differs once a file in the folder changes. Raises ConfigError."""
    try:
        paths = sorted([*model_dir.iterdir(), *model_dir.glob("*/*.jinja")])
        stats = [(path, path.stat(follow_symlinks=path.exists())) for path in paths]
    except OSError as error:
        raise ConfigError(f"{model_dir}: cannot be read: {error}") from error
    return tuple((path, each.st_ino, each.st_size, each.st_ctime_ns) for path, each in stats)


def checked_family(
    model_dir: Path, choice: str, tool_format: str, *, module: str = MODULE
) -> Family:
    """How the model writes calls, as `family_of`; its files can then be read here. Blocks. Raises
    ConfigError for files that cannot be read, or not within the limits.
    """
    command = [sys.executable, "-m", module, str(model_dir), choice, tool_format]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=child_environ(os.environ),
            timeout=WALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{model_dir}: reading it takes more than {WALL_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise ConfigError(f"{model_dir}: {_failure(done.returncode, done.stderr)}")
    if len(done.stdout) > MAX_REPLY_BYTES:
        excess = f"{len(done.stdout)} bytes, the limit is {MAX_REPLY_BYTES}"
        raise ConfigError(f"{model_dir}: its response template takes {excess}")
    try:
        found = msgspec.msgpack.decode(done.stdout, type=ModelCheck)
    except UNREADABLE as error:
        raise ConfigError(f"{model_dir}: no result of its check: {one_line(error)}") from None
    if found.family is None:
        raise ConfigError(found.failure)
    return found.family


def _failure(status: int, errors: bytes) -> str:
    if status == -signal.SIGPROF:
        return f"its templates take more than {PROGRAM_LIMIT_S:g} s to compile"
    if -status in ENDED_BY_LIMITS:
        limits = f"{CPU_LIMIT_S} s or {MEMORY_LIMIT_BYTES >> 30} GiB"
        return f"its tokenizer or templates take more than {limits} to load (status {status})"
    tail = printable_line(errors[-MAX_REASON_CHARS:].decode(errors="replace"))
    return f"its check failed (status {status}): …{tail}"
