"""A receiver whose output cannot be made of what a model sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.gateway.streams.receiver import GuardedReceiver, StreamEnd
from shared.telemetry.timeline import Move
from tests.services.gateway.streams.test_streams import SERVED, STOP, Recorder

MOVE = Move(from_workers=("w",), cause="worker_lost", worker="v", pause_s=1.0)
CALLS: dict[str, Callable[[GuardedReceiver], object]] = {
    "on_tokens": lambda each: each.on_tokens(0, [1], ()),
    "on_served": lambda each: each.on_served(0, SERVED),
    "on_moved": lambda each: each.on_moved(MOVE),
    "on_prompt_logprobs": lambda each: each.on_prompt_logprobs(()),
    "on_finish": lambda each: each.on_finish(0, STOP),
}


@pytest.mark.parametrize("failing", CALLS)
def test_only_the_end_follows_a_failure(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("of what a model sent")

    recorder = Recorder()
    receiver = GuardedReceiver(recorder, "r1")
    with monkeypatch.context() as failures:
        failures.setattr(recorder, failing, fail)
        CALLS[failing](receiver)
    failure = receiver.failure
    assert failure is not None
    results = [call(receiver) for call in CALLS.values()]
    assert results == [True, None, None, None, None]  # the other streams of the message go on
    receiver.on_end(StreamEnd(None, "w", 0))
    assert recorder.error is receiver.failure is failure
    assert (recorder.tokens, recorder.served) == ([], [])
    assert (recorder.moves, recorder.prompt_logprobs, recorder.finishes) == ([], [], [])
