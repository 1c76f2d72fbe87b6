"""Shows the logs of the newest cluster of this user on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.cli.logs.log_lines import LogLine
from services.cli.logs.log_tail import LogTail, find_logs, follow, last_lines
from services.local.state import clusters_dir, newest_cluster
from services.local.state_home import state_home
from shared.config import LOG_LEVELS
from shared.errors import ConfigError

POLL_S = 0.2


def run_logs(
    processes: tuple[str, ...], *, is_following: bool, level: str, num_lines: int, is_json: bool
) -> None:
    """Prints the lines. Raises ConfigError."""
    if level not in LOG_LEVELS:
        raise ConfigError(f"--level {level!r} is none of {', '.join(LOG_LEVELS)}")
    folders, is_running = log_folders()
    if not is_running:
        print("note: no cluster is running: logs of the last one, which failed", file=sys.stderr)
    _check_names(find_logs(folders), processes)
    lines = _lines(folders, processes, level, num_lines, is_following=is_following and is_running)
    try:
        _print(lines, is_json=is_json)
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def log_folders() -> tuple[list[Path], bool]:
    """Returns the folders of a cluster's logs, and whether it runs. The workers of many models log
    in the folder of their host. Raises ConfigError.
    """
    directory, is_running = newest_cluster(clusters_dir())
    own = directory / "logs"
    hosts = state_home() / "hearth" / "hosts"
    return [own, *(hosts / each.stem / "logs" for each in own.glob("host*.log"))], is_running


def _check_names(found: dict[str, Path], processes: tuple[str, ...]) -> None:
    for each in processes:
        if each not in found:
            raise ConfigError(f"no log of {each!r}: there are those of {', '.join(found)}")


def _lines(
    folders: list[Path],
    processes: tuple[str, ...],
    level: str,
    num_lines: int,
    *,
    is_following: bool,
) -> Iterator[LogLine]:
    def find() -> dict[str, Path]:
        found = find_logs(folders)
        return {name: path for name, path in found.items() if not processes or name in processes}

    tails = {name: LogTail(path) for name, path in find().items()}
    logged = (line for tail in tails.values() for line in tail.read())
    yield from last_lines((each for each in logged if each.has_level(level)), num_lines)
    if is_following:
        added = follow(find, tails, lambda: _wait(folders[0]))
        yield from (each for each in added if each.has_level(level))


def _wait(folder: Path) -> bool:
    """Returns whether the cluster may log more."""
    time.sleep(POLL_S)
    return folder.is_dir()


def _print(lines: Iterable[LogLine], *, is_json: bool) -> None:
    has_colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for each in lines:
        print(each.json() if is_json else each.text(has_colors=has_colors), flush=True)
