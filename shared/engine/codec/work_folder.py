"""A folder that appears whole or not at all, and goes on where a killed process stopped.

    OUT.partial/lock       held by the process at work; the kernel frees it if that dies
    OUT.partial/files/     becomes OUT when all is done

A file below `files` that has its own name is finished; one under work has another name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shared.errors import CheckpointError, ConfigError

UNDER_WORK = ".unfinished"


class WorkFolder:
    def __init__(self, target: Path) -> None:
        self.target = target
        self.root = target.with_name(f"{target.name}.partial")
        self.files = self.root / "files"

    def path(self, name: str) -> Path:
        return self.files / name

    @contextmanager
    def written(self, name: str) -> Iterator[IO[bytes]]:
        """A file that gets its name when it is whole and on the disk. Raises OSError."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + UNDER_WORK)
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def keep_only(self, names: Iterable[str]) -> None:
        """What an earlier try of another folder has left is removed."""
        wanted = {self.path(name) for name in names}
        for path in sorted(self.files.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in wanted:
                path.unlink()

    def publish(self) -> None:
        """The files get the folder's name, all at once."""
        folders = [path for path in self.files.rglob("*") if path.is_dir()]
        for folder in sorted(folders, reverse=True):  # the deepest first
            _sync(folder)
        _sync(self.files)
        self.files.rename(self.target)
        _sync(self.target.parent)


@contextmanager
def work_folder(target: Path) -> Iterator[WorkFolder]:
    """Raises ConfigError if `target` is there or another process makes it.

    What the disk refuses is a CheckpointError that says how to go on.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already: name a folder that is not")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder")
    work = WorkFolder(target)
    lock_path = work.root / "lock"
    if not _is_ours(work):
        raise ConfigError(f"{work.root} is in the way: it is not of an earlier try")
    try:
        work.root.mkdir(mode=0o700, exist_ok=True)
        with lock_path.open("ab") as lock:
            _lock(lock, target)
            work.files.mkdir(exist_ok=True)
            try:
                yield work
            finally:
                if not any(path.is_file() for path in work.files.rglob("*")):
                    shutil.rmtree(work.root)  # published, or nothing to go on with
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        told = f"{target}: {what}"
        if work.root.exists():
            told += (
                f"; what is finished is kept in {work.root.name}: the same command goes on there"
            )
        raise CheckpointError(told) from None


def _is_ours(work: WorkFolder) -> bool:
    """Not there, or a folder of this user's, without links, which would lead to others' files.

    An empty one is of a try that was killed at once.
    """
    if any(path.is_symlink() for path in (work.root, work.files, work.root / "lock")):
        return False
    if not work.root.exists():
        return True
    is_own = work.root.is_dir() and work.root.stat().st_uid == os.getuid()
    return is_own and ((work.root / "lock").is_file() or not any(work.root.iterdir()))


def _lock(lock: IO[bytes], target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{target}: another process is making it") from None
    if os.fstat(lock.fileno()).st_nlink == 0 or target.exists():
        raise ConfigError(f"{target}: another process has just made it")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
