"""Source trees of releases: the working tree, and commits unpacked beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.cluster.service_processes import ROOT

PREVIOUS = Path(__file__).parent / "previous_release.txt"
WORKING_TREE = "."


class CommitMissing(Exception):
    """The clone does not have the commit, as a shallow one."""


class Release(NamedTuple):
    """A source tree, by the first digits of its commit; that of the working tree is `.`."""

    name: str
    root: Path


def previous_commit() -> str:
    """Returns the commit of the previous release, which fleets are upgraded from."""
    lines = PREVIOUS.read_text().splitlines()
    return next(line.split()[0] for line in lines if line and not line.startswith("#"))


def release_of(commit: str) -> Release:
    """Unpacks a commit into the cache, once. Raises CommitMissing."""
    if commit == WORKING_TREE:
        return Release(WORKING_TREE, ROOT)
    full = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").strip().decode()
    name = full[:12]
    root = _cache() / name
    if not root.exists():
        _cache().mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=_cache()))
        archive = subprocess.Popen(["git", "archive", full], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x"], cwd=draft, stdin=archive.stdout, check=True)
        assert archive.wait() == 0, f"git archive {full}"
        try:
            draft.rename(root)
        except OSError:  # another run was faster
            shutil.rmtree(draft)
    return Release(name, root)


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise CommitMissing(
            f"this clone has no commit {arguments[-1].partition('^')[0]}: git fetch --unshallow"
        ) from None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hearth" / "releases"
