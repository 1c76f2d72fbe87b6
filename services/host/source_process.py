"""Finds the source of a model on this host, in a process with limits: python -m … [a SourceJob on
stdin, a SourceReply on stdout].

A checkpoint's files may have any size and any content, and a drive may never answer: at worst the
process of the check ends.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path

import msgspec

from services.host.sources import ModelSource, has_fp8, planned_source
from services.local.hub_download import is_hub_id
from services.local.hub_process import downloaded
from services.local.processes.child_processes import ending
from services.local.processes.module_process import run_module
from shared.errors import ConfigError, HearthError
from shared.lifecycle.child_process import engine_environ
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from shared.telemetry.log import configure_child_logging
from shared.transport.wire_errors import printable_line

MODULE = "services.host.source_process"
MAX_CHECKS = 4  # at once
NICENESS = 10  # serving processes of this machine have priority
CPU_LIMIT_S = 120
WALL_LIMIT_S = 300.0  # of a slow drive: two tensors of 1 GB may be compared
MAX_MEMORY_BYTES = 2 << 30  # the lists of 200,000 tensors take 200 MB
MAX_REASON_CHARS = 1000


class SourceJob(msgspec.Struct, frozen=True):
    directory: str
    model: RegisteredModel
    revision: RegisteredRevision
    device: str


class SourceReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`failure`: why there is no source."""

    source: ModelSource | None = None
    failure: str = ""


class SourceFinder:
    def __init__(self, device: str) -> None:
        self._device = device
        self._turns = asyncio.Semaphore(MAX_CHECKS)

    async def find(self, model: RegisteredModel, revision: RegisteredRevision) -> ModelSource:
        """Returns the source of a model, after a download if the hub model is not cached. A
        cancellation ends download and check. Call on the main thread. Raises ConfigError.
        """
        found = Path(revision.source).expanduser()  # noqa: ASYNC240  # reads no file but of users
        if is_hub_id(found):
            found = await downloaded(found)
        async with self._turns:
            reply = await _checked(SourceJob(str(found), model, revision, self._device))
        if reply.source is None:
            raise ConfigError(reply.failure)
        return reply.source


async def _checked(job: SourceJob) -> SourceReply:
    what = f"source {job.revision.source!r}"
    try:
        async with asyncio.timeout(WALL_LIMIT_S):
            status, output = await run_module(
                MODULE, environ=engine_environ(os.environ), given=msgspec.json.encode(job)
            )
    except TimeoutError:
        raise ConfigError(f"{what}: reading it takes more than {WALL_LIMIT_S:g} s") from None
    except OSError as error:
        raise ConfigError(f"{what}: cannot start its check: {error.strerror}") from None
    if status or not output:
        raise ConfigError(f"{what}: its check ended with {ending(status)}")
    return msgspec.json.decode(output, type=SourceReply)


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # log lines go there
    configure_child_logging("source-check")
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SourceJob)
    is_fp8 = has_fp8(job.device)  # a driver reserves more memory than the limit
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    os.write(output, msgspec.json.encode(reply_to(job, is_fp8=is_fp8)))
    os._exit(0)  # nothing is left to free one by one


def reply_to(job: SourceJob, *, is_fp8: bool) -> SourceReply:
    """Reads the files of the source, without limits."""
    found = Path(job.directory)
    try:
        source = planned_source(found, job.model, job.revision, job.device, has_fp8=is_fp8)
        return SourceReply(source)
    except HearthError as error:
        reason = error.message
    except BaseException as error:  # anybody may have written the files
        reason = f"source {job.revision.source!r}: {type(error).__name__}: {error}"
    return SourceReply(failure=printable_line(reason, MAX_REASON_CHARS))


if __name__ == "__main__":
    main()
