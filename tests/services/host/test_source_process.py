"""A source is read in a process with limits, which a host outlives."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.host import source_process
from services.host.source_process import MAX_REASON_CHARS, SourceFinder, SourceJob, reply_to
from services.host.sources import ModelSource, planned_source
from shared.errors import ConfigError
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from tests.support.services.live_host import children, link_model
from tests.support.waiting import LIMIT_S, until

REVISION = RegisteredRevision(name="r1", source=str(DEMO_MODEL_DIR))
MODEL = RegisteredModel(name="m", revisions=(REVISION,), max_context_tokens=100)
WEIGHTS, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "hearth_bundle.json"
SHARD = "model-00001-of-00001.safetensors"
NO_FILE = "is not a regular file"


def job(folder: Path) -> SourceJob:
    return SourceJob(str(folder), MODEL, RegisteredRevision(name="r1", source=str(folder)), "cpu")


async def found(folder: Path) -> ModelSource:
    async with asyncio.timeout(LIMIT_S):
        return await SourceFinder("cpu").find(MODEL, job(folder).revision)


async def test_process_finds_what_the_files_say() -> None:
    expected = planned_source(DEMO_MODEL_DIR, MODEL, REVISION, "cpu", has_fp8=True)
    assert await found(DEMO_MODEL_DIR) == expected


async def test_process_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children(os.getpid())
    monkeypatch.setattr(source_process, "WALL_LIMIT_S", 0.05)
    with pytest.raises(ConfigError, match=r"^source '.*': reading it takes more than 0\.05 s$"):
        await found(DEMO_MODEL_DIR)
    await until(lambda: children(os.getpid()) == before)


async def test_process_that_ends_fails_its_source_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_process, "MODULE", "no_such_module")
    with pytest.raises(ConfigError, match=r"^source '.*': its check ended with exit status 1$"):
        await found(DEMO_MODEL_DIR)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def sharded(directory: Path) -> Path:
    """Returns the demo model with an index, in place of the file of its weights."""
    link_model(directory)
    (directory / WEIGHTS).rename(directory / SHARD)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": SHARD}}))
    return directory


@pytest.mark.parametrize("make", [pipe, endless, folder])
@pytest.mark.parametrize("name", [WEIGHTS, INDEX, MANIFEST, SHARD])
def test_what_is_no_file_is_named_and_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    source = sharded(tmp_path / "m") if name in (INDEX, SHARD) else link_model(tmp_path / "m")
    (source / name).unlink(missing_ok=True)
    make(source / name)
    reply = reply_to(job(source), is_fp8=True)
    if name == MANIFEST:  # a worker checks a bundle as it loads it
        assert reply.source is not None
    else:
        assert f"{name}: " in reply.failure and NO_FILE in reply.failure


def test_vast_files_are_not_read(tmp_path: Path) -> None:
    source = sharded(tmp_path / "m")
    with (source / INDEX).open("r+b") as file:
        file.truncate(100_000_001)
    failure = reply_to(job(source), is_fp8=True).failure
    assert f"{INDEX}: [Errno 27] has more than 100000000 bytes: '{source / INDEX}'" in failure


def test_reason_is_short_and_printable(tmp_path: Path) -> None:
    """Heartbeats carry it, and terminals show it."""
    source = link_model(tmp_path / "m")
    header = json.dumps({"\x1b[2J" + "a" * 1_000_000: {"dtype": "X"}}).encode()
    (source / WEIGHTS).unlink()
    (source / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    failure = reply_to(job(source), is_fp8=True).failure
    assert failure.isprintable()
    assert len(failure) == MAX_REASON_CHARS
