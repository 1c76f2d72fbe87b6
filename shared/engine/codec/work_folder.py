"""A folder that is published atomically, and resumes the work of a killed process.

    OUT.partial/lock       locked by the working process; the kernel unlocks it if that dies
    OUT.partial/files/     renamed to OUT when all files are finished

A file below `files` with its final name is finished; an unfinished one has a suffix.
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
        """A file that gets its final name once it is completely on disk. Raises OSError."""
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

    def retain_only(self, names: Iterable[str]) -> None:
        """Removes all other files, which an earlier run left for another source folder."""
        retained = {self.path(name) for name in names}
        for path in sorted(self.files.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in retained:
                path.unlink()

    def publish(self) -> None:
        """Renames the folder of finished files to the target, atomically."""
        folders = [path for path in self.files.rglob("*") if path.is_dir()]
        for folder in sorted(folders, reverse=True):  # the deepest first
            _sync(folder)
        _sync(self.files)
        self.files.rename(self.target)
        _sync(self.target.parent)


@contextmanager
def work_folder(target: Path, source: Path, *, resumes: bool = True) -> Iterator[WorkFolder]:
    """Raises ConfigError if `target` exists, is inside of `source`, which the work reads, or
    another process writes it.

    An OSError becomes a CheckpointError that states how to continue. Unless the work `resumes`,
    nothing of an earlier run is used and nothing of this one remains.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already: name a new folder")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{target} is inside of {source}: name a folder outside of it")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder")
    work = WorkFolder(target)
    lock_path = work.root / "lock"
    if not _is_ours(work):
        raise ConfigError(f"{work.root} exists and is not from an interrupted run")
    try:
        work.root.mkdir(mode=0o700, exist_ok=True)
        with lock_path.open("ab") as lock:
            _lock(lock, target)
            work.files.mkdir(exist_ok=True)
            if not resumes:
                work.retain_only(())
            try:
                yield work
            finally:
                if not (resumes and any(path.is_file() for path in work.files.rglob("*"))):
                    shutil.rmtree(work.root)  # published, or no finished file to resume from
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        message = f"{target}: {what}"
        if work.root.exists():
            message += (
                f"; finished files remain in {work.root.name}: run the same command to continue"
            )
        raise CheckpointError(message) from None


def _is_ours(work: WorkFolder) -> bool:
    """Whether the work folder is missing, or a folder of this user without links, which could
    lead to other files. An empty one is from a run that was killed at its start.
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
        raise ConfigError(f"{target}: another process is writing it") from None
    if os.fstat(lock.fileno()).st_nlink == 0 or target.exists():
        raise ConfigError(f"{target}: another process has just written it")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
