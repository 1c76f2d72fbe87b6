"""What a result says of itself: the commit that ran, no key, bars of the same work."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import control_plane, report, serve
from benchmarks.gpu_kit.outputs import commit_of
from benchmarks.sites.live import share_at_home

GIT = ("git", "-c", "user.name=tests", "-c", "user.email=tests@example.invalid")
DATE = "GIT_COMMITTER_DATE"  # also of the record of HEAD


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose commit is older than this process."""
    (tmp_path / "measured.py").touch()
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "Begin")):
        git(tmp_path, *words, date="2020-01-01T00:00:00Z")
    return tmp_path


def git(tree: Path, *words: str, date: str) -> None:
    subprocess.run([*GIT, *words], cwd=tree, check=True, env=os.environ | {DATE: date})


def test_commit_of_a_tree_with_notes_is_clean(tree: Path) -> None:
    (tree / "notes.txt").touch()
    assert len(report.commit(tree)) == len(commit_of(tree)) == 12


@pytest.mark.parametrize("commit", [report.commit, commit_of])
def test_module_that_is_not_committed_marks_the_commit(tree: Path, commit: Any) -> None:
    (tree / "new.py").touch()
    assert commit(tree).endswith("-dirty")


def test_commit_that_is_younger_than_the_process_is_marked(tree: Path) -> None:
    """The process imported its modules before."""
    git(tree, "commit", "-qm", "Go on", "--allow-empty", date="2090-01-01T00:00:00Z")
    assert report.commit(tree).endswith("-dirty")


@pytest.mark.parametrize("words", [["--api-key", "hk-1"], ["--api-key=hk-1"], ["--api", "hk-1"]])
def test_command_of_a_result_has_no_key(words: list[str]) -> None:
    argv = ["--url", "http://x", *words]
    assert "hk-1" not in " ".join(serve.shown(argv, serve.parse(argv)))


def row(server: str, client: str, **others: Any) -> dict[str, Any]:
    load = {"server": server, "shape": "split", "concurrency": 16, "client": client}
    return {**load, "requests_per_s": 300.0, "num_errors": 0, **others}


def test_figures_of_another_client_are_no_reference() -> None:
    """Those of AIPerf are a third of those of clients that only count events."""
    assert len(control_plane.bars_of([row("hearth", "quickack")])) == 1
    (_, beside) = control_plane.bars_of([row(each, "quickack") for each in ("hearth", "dynamo")])
    assert (beside.value, beside.holds) == (1.0, False)


def test_errors_of_the_peer_are_no_advantage() -> None:
    errors, *_ = control_plane.bars_of(
        [row("hearth", "aiperf"), row("dynamo", "aiperf", num_errors=3)]
    )
    assert not errors.holds


def test_each_server_is_measured_first_in_turn() -> None:
    assert "".join(control_plane.by_turns("ab", 3)) == "abbaab"


def test_requests_without_an_answer_do_not_stay_at_home() -> None:
    assert share_at_home({"requests": 80, "rejected": 40, "failed": 10, "far": 6}) == 0.3
