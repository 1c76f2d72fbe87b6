"""Records steps of a worker for an operator, one recording at a time.

ProfileSteps ──▶ recording ──N steps, or timeout──▶ complete ──KEEP_S──▶ forgotten
                     └─ raises ─▶ failed: ReadProfile gets the error
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from shared.background import Background, is_logged, item_error
from shared.engine.worker import EngineWorker
from shared.errors import HearthError, InvalidRequest, WorkerBusy
from shared.messages import ProfilePart, ProfileSteps, ReadProfile
from shared.subjects import profile

log = structlog.get_logger(__name__)

KEEP_S = 60.0  # an operator who is there reads at once
PART_BYTES = 512 << 10  # larger ones would delay heartbeats on the same connection
HEADER_BYTES = 4096  # more than the fields of a part beside its data take


@dataclass
class _StepRecording:
    number: int
    num_steps: int = 0
    trace: bytes | None = None
    error: HearthError | None = None

    @property
    def is_running(self) -> bool:
        return self.trace is None and self.error is None


class StepProfiles:
    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._recording: _StepRecording | None = None
        self._num_recordings = 0
        self._background = Background()

    async def start(self) -> None:
        worker = self._worker
        for role in worker.roles.handled:  # operators use the first role of a heartbeat
            await worker.bus.serve(
                profile(role, worker.worker_id), ProfileSteps | ReadProfile, self._on_command
            )

    async def stop(self) -> None:
        await self._background.stop()

    def _on_command(self, command: ProfileSteps | ReadProfile) -> ProfilePart:
        return self._begin(command) if isinstance(command, ProfileSteps) else self._part(command)

    def _begin(self, command: ProfileSteps) -> ProfilePart:
        if self._recording is not None and self._recording.is_running:
            raise WorkerBusy(f"{self._worker.worker_id} records steps for somebody else")
        self._num_recordings += 1
        recording = self._recording = _StepRecording(self._num_recordings)
        self._background.start_item(self._record(recording, command), is_logged)
        log.info("profile_started", num_steps=command.num_steps, timeout_s=command.timeout_s)
        return ProfilePart(number=recording.number)

    async def _record(self, recording: _StepRecording, command: ProfileSteps) -> None:
        executor = self._worker.loop.executor
        try:
            recorded = await executor.profile(command.num_steps, command.timeout_s)
        except BaseException as raised:  # the operator gets it; the worker serves
            error = item_error(raised)
            recording.error = _reported(error)
            return
        recording.num_steps, recording.trace = recorded
        log.info("profile_recorded", num_steps=recorded.num_steps, num_bytes=len(recorded.trace))
        await self._worker.clock.sleep(KEEP_S)
        if self._recording is recording:
            self._recording = None

    def _part(self, command: ReadProfile) -> ProfilePart:
        recording = self._recording
        if recording is None or recording.number != command.number:
            raise InvalidRequest("the recording is no longer there")
        if recording.error is not None:
            raise recording.error
        if recording.trace is None:
            return ProfilePart(number=recording.number)
        limit = min(PART_BYTES, self._worker.bus.max_payload_bytes - HEADER_BYTES)
        return ProfilePart(
            number=recording.number,
            num_steps=recording.num_steps,
            num_bytes=len(recording.trace),
            data=recording.trace[command.first_byte : command.first_byte + limit],
        )


def _reported(error: BaseException) -> HearthError:
    """Logs an error, with its traceback if it is no refusal. Returns what the operator gets."""
    if isinstance(error, HearthError):
        log.info("profile_refused", reason=error.message)
        return error
    log.warning("profile_failed", exc_info=error)
    return HearthError(f"the profiler failed: {error}")
