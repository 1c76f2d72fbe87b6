"""The recording of a rank's steps, which its leader fetches in parts.

    leader ──ProfileSteps──▶ rank: steps are recorded; ──ReadProfile──▶ ◀──ProfilePart──, until the
    last part is read

The parts of a recording that is not complete have no `num_bytes`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from shared.clock import Clock
from shared.engine.executors.executor import RecordedSteps
from shared.engine.executors.step_profile import StepProfile
from shared.engine.step import StepInputs
from shared.errors import InvalidRequest
from shared.messages import ProfilePart, ProfileSteps, ReadProfile

PART_BYTES = 1 << 20
NOT_RECORDED = nullcontext()


class Recorded(Protocol):
    """A future, of threads or of a loop."""

    def done(self) -> bool: ...
    def result(self) -> RecordedSteps: ...


class RankTrace:
    """The last recording. Its memory is free once all of it is read."""

    def __init__(self) -> None:
        self._recorded: Recorded | None = None

    def set(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def part(self, read: ReadProfile) -> ProfilePart:
        """Raises what the recording raised; InvalidRequest if there is none."""
        if self._recorded is None:
            raise InvalidRequest("no steps are recorded")
        if not self._recorded.done():
            return ProfilePart(number=read.number)
        num_steps, trace = self._recorded.result()
        data = trace[read.first_byte : read.first_byte + PART_BYTES]
        if read.first_byte + len(data) >= len(trace):
            self._recorded = None
        return ProfilePart(number=read.number, num_steps=num_steps, num_bytes=len(trace), data=data)


class RankProfile:
    """Records steps of the thread that calls it; another thread writes the trace."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._profile: StepProfile | None = None
        self._ends_at = 0.0
        self._trace = RankTrace()
        self._thread = ThreadPoolExecutor(1, "rank-profile")

    def begin(self, command: ProfileSteps) -> ProfilePart:
        self._profile = StepProfile(command.num_steps, "cpu")
        self._ends_at = self._clock.now() + command.timeout_s
        self._profile.start()
        return ProfilePart(number=0)

    def step(self, inputs: StepInputs) -> AbstractContextManager[None]:
        return NOT_RECORDED if self._profile is None else self._profile.step(inputs)

    def part(self, read: ReadProfile) -> ProfilePart:
        """Ends a recording whose time is over. Raises what it raised."""
        profile = self._profile
        if profile is not None:
            if profile.is_recording and self._clock.now() < self._ends_at:
                return ProfilePart(number=read.number)
            profile.stop()
            self._profile = None
            self._trace.set(self._thread.submit(profile.recorded))
        return self._trace.part(read)
