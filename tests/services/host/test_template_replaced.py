"""Launches that wait for one template which does not fork."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.host.workers import workers as module
from services.host.workers.workers import WorkerProcesses, WorkerSpec, _Template
from shared.clock import MonotonicClock
from shared.config import WorkerConfig
from shared.errors import ConfigError
from tests.support.waiting import until


def hung_template() -> _Template:
    """Its process takes what is written, and answers nothing."""
    process: Any = SimpleNamespace(
        pid=0, returncode=0, stdin=SimpleNamespace(write=lambda data: None)
    )
    template = _Template(process)
    template.ready.set()
    return template


async def test_late_launch_does_not_drop_the_template_that_replaced_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORK_S", 0.1)
    workers = WorkerProcesses(
        tmp_path, {}, MonotonicClock(), num_threads=1, on_end=lambda worker, status, words: None
    )
    workers._template = hung = hung_template()
    spec = WorkerSpec(
        config=WorkerConfig(nats_url="nats://w:p@h:4222", process_id="w", model_dir=tmp_path),
        log_path="",
    )
    first = asyncio.create_task(workers._forked(hung, spec))
    await asyncio.sleep(0.02)
    late = asyncio.create_task(workers._forked(hung, spec))
    with pytest.raises(TimeoutError):
        await first
    workers._template = new = hung_template()
    with pytest.raises(TimeoutError):
        await late
    workers._forked_ended(hung, 1, 0)
    assert workers._template is new
    with pytest.raises(TimeoutError):
        await workers._forked(new, spec)
    assert workers._template is None and new.replaced.is_set()


async def test_template_that_cannot_fork_is_retained(tmp_path: Path) -> None:
    workers = WorkerProcesses(
        tmp_path, {}, MonotonicClock(), num_threads=1, on_end=lambda worker, status, words: None
    )
    workers._template = template = hung_template()
    output = template.process.stdout = asyncio.StreamReader()
    spec = WorkerSpec(
        config=WorkerConfig(nats_url="nats://w:p@h:4222", process_id="w", model_dir=tmp_path),
        log_path="",
    )
    starting = asyncio.create_task(workers._forked(template, spec))
    reading = asyncio.create_task(workers._read(template))
    await until(lambda: template.starting)
    output.feed_data(b'{"pid":0,"failure":"Cannot allocate memory"}\n')
    with pytest.raises(ConfigError, match=r"^cannot fork a worker: Cannot allocate memory$"):
        await starting
    output.feed_eof()
    await reading
    assert workers._template is template and not template.starting
