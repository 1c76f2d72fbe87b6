"""Runs an agent's program, unmodified, in an empty home and a folder with one file.

The cluster has the wide checkpoint, whose model calls the tool that it is offered, greedily: of
several tools always the same one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.account import AGENT_MODEL
from tests.support.cluster.hearth_up import Cluster, run_cluster
from tests.wide.checkpoint import write_wide_checkpoint

TRANSCRIPTS = Path(__file__).parent / "transcripts"
TIMEOUT_S = 240
LEAST_CACHED = 0.95  # of the prompt of a second request


def program_of(name: str) -> str:
    """Returns the path of a program, as an option's type: it runs in another folder."""
    found = shutil.which(name)
    if found is None:
        raise argparse.ArgumentTypeError(f"no program {name}: npm has it")
    return str(Path(found).absolute())


@dataclass(frozen=True)
class Place:
    """Where an agent runs."""

    cluster: Cluster
    home: Path
    work: Path

    def run(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        """Returns what it wrote to stdout. Raises TimeoutExpired."""
        done = subprocess.run(
            command,
            cwd=self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        sys.stderr.write(done.stderr)
        return done.stdout


@contextlib.contextmanager
def run_place(
    write: Callable[[Path], Path] = write_wide_checkpoint, model: str = AGENT_MODEL
) -> Iterator[Place]:
    """Runs a cluster with the checkpoint of `write`, named `model`."""
    with tempfile.TemporaryDirectory(prefix="hearth-agent-") as name:
        folder = Path(name)
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        (work / "README.md").write_text("A file.\n")
        checkpoint = write(folder / model)
        make_greedy(checkpoint / "generation_config.json")
        with run_cluster(folder, "--model", str(checkpoint)) as cluster:
            yield Place(cluster, home, work)


def make_greedy(config: Path) -> None:
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "do_sample": False}))


def write_transcript(
    name: str, messages: Sequence[Mapping[str, Any]], problems: Sequence[str]
) -> int:
    """Returns an exit status: 0 without problems."""
    path = TRANSCRIPTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in messages))
    print(f"{len(messages)} messages in {path}", *problems, sep="\n")
    return int(bool(problems))
