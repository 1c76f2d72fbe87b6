"""The recovery core without a bus: each event and the actions that it causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from services.gateway.streams import streams as core
from services.gateway.streams.actions import (
    Publish,
    ReportBrokenSteps,
    ReportResubmission,
    Resend,
    Submit,
)
from services.gateway.streams.choice_tokens import MAX_AHEAD_ENTRIES, ChoiceTokens
from services.gateway.streams.early_entries import (
    EARLY_LIMIT_S,
    MAX_EARLY_ENTRIES,
    MAX_EARLY_VALUES,
    MAX_RETIRED,
    EarlyEntries,
    RetiredPlacements,
)
from services.gateway.streams.queued_openings import Opening, QueuedOpenings, TenantOpenings
from services.gateway.streams.receiver import StreamEnd
from services.gateway.streams.resubmissions import (
    LINK_WINDOW_S,
    MAX_LINK_LOSSES,
    MAX_RESUBMISSIONS,
    RECOVERY_WINDOW_S,
)
from services.gateway.streams.stream import (
    TRANSITIONS,
    IllegalTransition,
    Stream,
    StreamState,
)
from services.gateway.streams.streams import Streams
from services.scheduler.waiting_for_host import NO_WORKER_GRACE_S
from shared.errors import (
    ContextFull,
    DeadlineExceeded,
    DeviceFailed,
    HearthError,
    InvalidRequest,
    NoCapacity,
    NoResponders,
    OutOfMemory,
    OutsideRegions,
    Overloaded,
    RequestBreaksWorkers,
    RequestTimeout,
    SendForbidden,
    StepFailed,
    UnknownPlacement,
    WorkerBusy,
)
from shared.messages import (
    AbortRequest,
    AckFinished,
    CancelQueued,
    Choice,
    Failure,
    Finish,
    Placed,
    PlacementFailed,
    Queued,
    QueueKeepalive,
    Request,
    ResendTokens,
    SamplingParams,
    Served,
    TokenBatch,
    TokenEntry,
    TokenLogprobs,
)
from shared.packing import unpack_token_ids
from shared.subjects import cancel, control
from shared.telemetry.timeline import Move

P1, P2, P3 = b"1" * 16, b"2" * 16, b"3" * 16
SERVED = Served(num_cached_tokens=1, prefill_worker_id=None)
STOP = Finish(reason="stop", served=SERVED)
FAILED = Finish(
    reason="failed", served=SERVED, failure=Failure(code=WorkerBusy.code, message="no room")
)
QUEUED = Queued(scheduler_id="s1", num_ahead=0)
RESEND = ResendTokens(placement_id=P1, choice_index=0, from_position=0)


def request(request_id: str = "r1", max_tokens: int = 100, needs: tuple[str, ...] = ()) -> Request:
    return Request(
        request_id=request_id,
        tenant_id="t",
        gateway_id="g",
        model="m",
        revision="r",
        cache_root=b"",
        prompt_token_ids=b"",
        block_hashes=b"",
        sampling=SamplingParams(seed=1, max_tokens=max_tokens),
        choices=(Choice(choice_index=0),),
        deadline_s=60.0,
        needs=needs,
    )


class Recorder:
    def __init__(self, stops_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self.finishes: list[Finish] = []
        self.ends: list[StreamEnd] = []
        self.served: list[Served] = []
        self.prompt_logprobs: list[list[TokenLogprobs]] = []
        self.moves: list[Move] = []
        self.stops_at = stops_at

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        self.tokens += token_ids
        return self.stops_at is None or len(self.tokens) < self.stops_at

    def on_served(self, choice_index: int, served: Served) -> None:
        self.served.append(served)

    def on_moved(self, move: Move) -> None:
        self.moves.append(move)

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self.prompt_logprobs.append(list(logprobs))

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        self.finishes.append(finish)

    def on_end(self, end: StreamEnd) -> None:
        self.ends.append(end)

    @property
    def error(self) -> HearthError | None:
        (end,) = self.ends
        return end.error


class Rig:
    """Streams with one open request; `tick` advances the clock."""

    def __init__(
        self, *, stops_at: int | None = None, max_tokens: int = 100, is_queueable: bool = True
    ) -> None:
        self.streams = Streams("g")
        self.now = 10.0
        self.client = Recorder(stops_at)
        self.reports: list[ReportResubmission | ReportBrokenSteps] = []
        opened = request(max_tokens=max_tokens)
        self.streams.open([Opening(opened, self.client, is_queueable=is_queueable)], self.now)

    @property
    def stream(self) -> Stream:
        return self.streams._by_request["r1"]

    def actions(self) -> list[Any]:
        """The actions that send a message. The others are added to `reports`."""
        actions = self.streams.take_actions()
        reports = [
            each for each in actions if isinstance(each, ReportResubmission | ReportBrokenSteps)
        ]
        self.reports += reports
        return [each for each in actions if each not in reports]

    def submit(self) -> Any:
        (action,) = (each for each in self.actions() if isinstance(each, Submit))
        return action.message

    def resubmission_causes(self) -> list[str]:
        self.actions()
        return [each.cause for each in self.reports if isinstance(each, ReportResubmission)]

    def published(self) -> list[tuple[str, Any]]:
        actions = self.actions()
        return [(each.subject, each.message) for each in actions if isinstance(each, Publish)]

    def queue(self, attempt: int = 1) -> None:
        self.streams.on_queued("r1", attempt, QUEUED, self.now)

    def place(self, placement_id: bytes = P1, worker_id: str = "w1", attempt: int = 0) -> None:
        placed = Placed(
            request_id="r1", placement_id=placement_id, worker_id=worker_id, attempt=attempt
        )
        self.streams.on_placed(placed, self.now)

    def tokens(
        self,
        first_position: int,
        *token_ids: int,
        finish: Finish | None = None,
        placement_id: bytes = P1,
        worker_id: str = "w1",
    ) -> None:
        entry = TokenEntry(placement_id, 0, first_position, token_ids, finish)
        batch = TokenBatch(worker_id=worker_id, entries=(entry,))
        self.streams.on_token_batch(batch, self.now)

    def reject(self, error: HearthError, attempt: int = 1, *, is_bus_trusted: bool = True) -> None:
        self.streams.on_rejected("r1", attempt, error, self.now, is_bus_trusted=is_bus_trusted)

    def tick(self, delay_s: float, *, is_bus_trusted: bool = True) -> None:
        self.now += delay_s
        self.streams.tick(self.now, is_bus_trusted=is_bus_trusted)


def running(**fields: Any) -> Rig:
    rig = Rig(**fields)
    rig.queue()
    rig.place()
    rig.actions()
    return rig


def cancelling(scheduler_id: str, *, attempt: int | None = 1) -> tuple[str, CancelQueued]:
    message = CancelQueued(request_id="r1", gateway_id="g", attempt=attempt)
    return cancel(scheduler_id), message


def failing(failure: Failure, *, attempt: int = 1, scheduler_id: str = "s1") -> PlacementFailed:
    return PlacementFailed(
        request_id="r1", scheduler_id=scheduler_id, attempt=attempt, failure=failure
    )


def abort(worker_id: str, placement_id: bytes, reason: Any) -> tuple[str, AbortRequest]:
    message = AbortRequest(placement_id=placement_id, reason=reason)
    return control("decode", worker_id), message


def test_move_is_reported_before_the_first_token_of_the_next_worker() -> None:
    rig = running()
    rig.tokens(0, 5)
    rig.now += 1.0
    for worker_id, placement_id in (("w2", P2), ("w3", P3)):  # w2 is lost before its first token
        rig.streams.on_worker_lost(rig.stream.last_worker_id, rig.now, is_excluded=True)
        rig.now += 0.25
        rig.place(placement_id, worker_id)
    assert rig.client.moves == []
    rig.tokens(1, 6, placement_id=P3, worker_id="w3")
    rig.tokens(2, 7, placement_id=P3, worker_id="w3")
    move = Move(from_workers=("w1", "w2"), cause="worker_lost", worker="w3", pause_s=1.5)
    assert rig.client.moves == [move]
    assert [each.move for each in rig.stream.tries] == [None, None, move]


def test_pause_before_the_first_token_of_all_counts_from_the_submission() -> None:
    rig = running()
    rig.now += 0.5
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    rig.now += 0.5
    rig.place(P2, "w2")
    rig.tokens(0, 5, placement_id=P2, worker_id="w2")
    assert [(each.from_workers, each.pause_s) for each in rig.client.moves] == [(("w1",), 1.0)]


def test_try_that_was_never_placed_moves_nothing() -> None:
    rig = Rig()
    rig.queue()
    rig.streams.on_scheduler_lost("s1", rig.now)
    rig.place(P2, "w2")
    rig.tokens(0, 5, placement_id=P2, worker_id="w2")
    assert rig.resubmission_causes() == ["scheduler_lost"]
    assert rig.client.moves == []


def test_request_runs_from_submit_to_acknowledgement() -> None:
    rig = Rig()
    assert rig.submit().attempt == 1
    rig.queue()
    rig.place()
    rig.tokens(0, 5, 6)
    rig.tokens(2, 7, finish=STOP)
    assert rig.client.tokens == [5, 6, 7]
    assert rig.client.finishes == [STOP]
    assert rig.client.ends == [StreamEnd(None, "w1", 0)]
    ack = AckFinished(placement_ids=(P1,))
    assert rig.published() == [(control("decode", "w1"), ack)]
    assert len(rig.streams) == 0


def test_tokens_and_placed_may_arrive_early() -> None:
    rig = Rig()
    rig.tokens(0, 5)
    rig.tokens(1, 6, finish=STOP)
    assert rig.client.tokens == []
    rig.place()
    rig.queue()
    assert rig.client.tokens == [5, 6]
    assert rig.client.error is None


def test_tokens_of_unnamed_placement_are_fenced() -> None:
    rig = Rig()
    rig.actions()
    rig.tokens(0, 5, placement_id=P2, worker_id="w2")
    rig.tick(EARLY_LIMIT_S)
    assert rig.published() == [abort("w2", P2, "fenced")]
    rig.tokens(1, 6, placement_id=P2, worker_id="w2")
    assert rig.published() == []
    rig.tick(1.0)
    rig.tokens(2, 6, placement_id=P2, worker_id="w2")
    assert rig.published() == [abort("w2", P2, "fenced")]
    rig.place(P2, "w2")  # `Placed` arrives after the abort
    assert rig.submit().attempt == 2


def test_duplicates_overlaps_and_reordering() -> None:
    rig = running()
    rig.tokens(0, 5, 6)
    rig.tokens(0, 5, 6)
    rig.tokens(1, 6, 7)
    rig.tokens(4, 9)
    assert [type(action) for action in rig.actions()] == [Resend]
    rig.tokens(5, 10)
    assert rig.actions() == []  # one resend is pending
    rig.tokens(3, 8)
    assert rig.client.tokens == [5, 6, 7, 8, 9, 10]


def test_gap_is_filled_by_resend() -> None:
    rig = running()
    rig.tokens(0, 5)
    rig.tokens(2, 7)
    (action,) = rig.actions()
    assert action == Resend("w1", ResendTokens(placement_id=P1, choice_index=0, from_position=1))
    entry = TokenEntry(P1, 0, 1, (6, 7, 8), STOP)
    batch = TokenBatch(worker_id="w1", entries=(entry,))
    rig.streams.on_resent(action.message, batch, rig.now)
    assert rig.client.tokens == [5, 6, 7, 8]
    assert rig.client.error is None


def test_silent_worker_is_excluded_after_failed_resends() -> None:
    rig = running()
    rig.tokens(0, 5)
    for attempt in range(core.MAX_FAILED_RESENDS):
        rig.tick(core.TOKEN_TIMEOUT_S if attempt == 0 else core.RESEND_RETRY_S)
        (action,) = rig.actions()
        assert isinstance(action, Resend)
        error = RequestTimeout("no reply")
        rig.streams.on_resend_failed(action.message, error, rig.now, is_bus_trusted=True)
    message = rig.submit()
    assert message.excluded_workers == ("w1",)
    assert unpack_token_ids(message.request.choices[0].output_token_ids) == [5]


def test_untrusted_bus_does_not_resubmit() -> None:
    rig = running()
    rig.tick(core.TOKEN_TIMEOUT_S)
    for _ in range(20):
        for action in rig.actions():
            error = RequestTimeout("no reply")
            rig.streams.on_resend_failed(action.message, error, rig.now, is_bus_trusted=False)
        rig.tick(core.RESEND_RETRY_S, is_bus_trusted=False)
    assert not any(isinstance(action, Submit) for action in rig.actions())
    rig = Rig()
    rig.queue()
    rig.actions()
    rig.tick(30.0, is_bus_trusted=False)
    rig.tick(core.KEEPALIVE_LIMIT_S - 0.1)
    assert rig.actions() == []


def test_bus_return_triggers_resend_of_silent_choice() -> None:
    """The Finish may be lost with the connection, and its loss leaves no gap in the tokens."""
    rig = running()
    rig.tokens(0, 5)
    rig.streams.on_bus_back(rig.now)
    rig.tick(core.RESEND_RETRY_S / 2)
    rig.tokens(1, 6)
    rig.tick(core.RESEND_RETRY_S)
    assert rig.actions() == []  # the choice sends tokens
    rig.streams.on_bus_back(rig.now)
    rig.tick(core.RESEND_RETRY_S)
    (resend,) = rig.actions()
    assert isinstance(resend, Resend)
    assert resend.message.from_position == 2


def test_unknown_placement_is_resubmitted_without_exclusion() -> None:
    rig = running()
    rig.tick(core.TOKEN_TIMEOUT_S)
    (action,) = rig.actions()
    error = UnknownPlacement("gone")
    rig.streams.on_resend_failed(action.message, error, rig.now, is_bus_trusted=False)
    message = rig.submit()
    assert (message.attempt, message.excluded_workers) == (2, ())


def test_lost_worker_is_fenced_and_replaced() -> None:
    rig = running()
    rig.tokens(0, 5, 6)
    rig.tokens(3, 8)
    rig.actions()
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    first, second = rig.actions()
    assert (first.subject, first.message) == abort("w1", P1, "superseded")
    assert second.message.excluded_workers == ("w1",)
    assert second.message.request.deadline_s == 60.0
    rig.tokens(2, 7)  # of the old placement: ignored
    rig.queue(attempt=2)
    rig.place(P2, "w2")
    rig.tokens(2, 70, placement_id=P2, worker_id="w2")
    assert rig.client.tokens == [5, 6, 70]  # the old placement's buffered token 8 is dropped
    rig.tokens(3, 80, finish=STOP, placement_id=P2, worker_id="w2")
    assert rig.client.ends == [StreamEnd(None, "w2", 1)]


def test_late_placement_of_a_submission_without_the_tokens_is_aborted() -> None:
    """A scheduler that was frozen has placed the first submission, on a worker whose numerics may
    differ: it would compute the tokens that are here anew, and continue those.
    """
    rig = running()
    rig.tokens(0, 5, 6)
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    rig.queue(attempt=2)
    rig.actions()
    rig.place(P2, "w2", attempt=1)
    assert rig.published() == [abort("w2", P2, "superseded")]
    rig.place(P3, "w3", attempt=2)
    rig.tokens(2, 70, finish=STOP, placement_id=P3, worker_id="w3")
    assert rig.client.tokens == [5, 6, 70]


def test_late_placement_of_an_older_submission_serves_a_request_without_tokens() -> None:
    rig = Rig()
    rig.queue()
    rig.streams.on_scheduler_lost("s1", rig.now)
    rig.place(attempt=1)
    rig.tokens(0, 5, finish=STOP)
    assert rig.client.tokens == [5]


def test_request_that_must_not_wait_may_wait_once_it_has_run() -> None:
    rig = Rig(is_queueable=False)
    assert not rig.submit().is_queueable
    rig.queue()
    rig.streams.on_scheduler_lost("s1", rig.now)
    assert not rig.submit().is_queueable
    rig.queue(attempt=2)
    rig.place()
    rig.actions()
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    assert rig.submit().is_queueable


def test_placement_on_excluded_worker_is_aborted() -> None:
    rig = running()
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    rig.actions()
    rig.place(P2, "w1")
    published = [each for each in rig.actions() if isinstance(each, Publish)]
    assert (published[0].subject, published[0].message) == abort("w1", P2, "superseded")


def test_worker_lost_after_last_token_ends_request() -> None:
    rig = running(max_tokens=2)
    rig.tokens(0, 5, 6)
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    assert [finish.reason for finish in rig.client.finishes] == ["length"]
    assert rig.client.error is None
    assert not any(isinstance(action, Submit) for action in rig.actions())


def failed_with(error_class: type[HearthError]) -> Finish:
    failure = Failure(code=error_class.code, message="the device says no")
    return Finish(reason="failed", served=SERVED, failure=failure)


def test_request_that_alone_fails_steps_of_two_workers_ends() -> None:
    rig = running()
    rig.tokens(0, 5, finish=failed_with(StepFailed))
    submit = rig.submit()
    assert submit.excluded_workers == ("w1",)
    assert unpack_token_ids(submit.request.choices[0].output_token_ids) == [5]
    rig.queue(submit.attempt)
    rig.place(P2, "w2")
    rig.tokens(1, finish=failed_with(StepFailed), placement_id=P2, worker_id="w2")
    assert isinstance(rig.client.error, RequestBreaksWorkers)
    assert rig.client.tokens == [5]
    rig.actions()
    assert rig.reports[-1] == ReportBrokenSteps("r1", "t")
    assert len(rig.streams) == 0


def test_request_that_lacks_memory_of_two_workers_ends_with_that() -> None:
    rig = running()
    rig.tokens(0, 5, finish=failed_with(OutOfMemory))
    submit = rig.submit()
    assert submit.excluded_workers == ("w1",)
    rig.queue(submit.attempt)
    rig.place(P2, "w2")
    rig.tokens(1, finish=failed_with(OutOfMemory), placement_id=P2, worker_id="w2")
    assert isinstance(rig.client.error, OutOfMemory)
    assert (rig.client.error.http_status, rig.client.tokens) == (503, [5])
    assert len(rig.streams) == 0


def test_failed_devices_are_not_held_against_the_request() -> None:
    rig, placement_id = running(), P1
    for number, following in enumerate((P2, P3, b"4" * 16), 1):
        finish, worker_id = failed_with(DeviceFailed), f"w{number}"
        rig.tokens(0, finish=finish, placement_id=placement_id, worker_id=worker_id)
        submit = rig.submit()
        assert len(submit.excluded_workers) == number
        rig.queue(submit.attempt)
        rig.place(following, f"w{number + 1}")
        placement_id = following
    assert rig.client.ends == []


def lose_resends(rig: Rig) -> None:
    for _ in range(core.MAX_FAILED_RESENDS):
        rig.streams.on_resend_failed(RESEND, RequestTimeout("late"), rig.now, is_bus_trusted=True)


@pytest.mark.parametrize(
    ("cause", "resubmit"),
    [
        ("worker_lost", lambda rig: rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)),
        ("worker_failed", lambda rig: rig.tokens(0, finish=FAILED)),
        (
            "placement_unknown",
            lambda rig: rig.streams.on_resend_failed(
                RESEND, UnknownPlacement("none"), rig.now, is_bus_trusted=True
            ),
        ),
        ("resends_failed", lose_resends),
        ("step_failed", lambda rig: rig.tokens(0, finish=failed_with(StepFailed))),
        ("worker_failed", lambda rig: rig.tokens(0, finish=failed_with(DeviceFailed))),
        ("context_full", lambda rig: rig.tokens(0, finish=failed_with(ContextFull))),
    ],
)
def test_resubmission_of_running_request_reports_cause(
    cause: str, resubmit: Callable[[Rig], None]
) -> None:
    rig = running()
    resubmit(rig)
    assert rig.resubmission_causes() == [cause]
    (report,) = rig.reports
    assert isinstance(report, ReportResubmission)
    assert (report.request_id, report.worker_id) == ("r1", "w1")


@pytest.mark.parametrize(
    ("cause", "resubmit"),
    [
        ("scheduler_lost", lambda rig: rig.streams.on_scheduler_lost("s1", rig.now)),
        ("scheduler_silent", lambda rig: rig.tick(core.KEEPALIVE_LIMIT_S)),
        ("bus_reconnected", lambda rig: rig.streams.on_bus_back(rig.now)),
    ],
)
def test_resubmission_of_queued_request_reports_cause(
    cause: str, resubmit: Callable[[Rig], None]
) -> None:
    rig = Rig()
    rig.queue()
    resubmit(rig)
    assert rig.resubmission_causes() == [cause]


def test_resubmissions_are_limited() -> None:
    rig = running()
    for attempt in range(MAX_RESUBMISSIONS):
        rig.streams.on_worker_lost("w1", rig.now, is_excluded=False)
        assert rig.submit().attempt == attempt + 2
        rig.place(bytes([attempt]) * 16, "w1")
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=False)
    assert isinstance(rig.client.error, NoCapacity)


def lose_site(rig: Rig, number: int, *token_ids: int) -> None:
    """Another site takes the request, sends tokens, and is lost."""
    placement_id = bytes([number]) * 16
    rig.place(placement_id, "b/gw/00ff")
    rig.tokens(len(rig.client.tokens), *token_ids, placement_id=placement_id, worker_id="b/gw/00ff")
    rig.actions()
    rig.streams.on_worker_lost("b/gw/00ff", rig.now, is_excluded=True)


def test_cuts_of_a_link_are_free_while_tokens_come_and_exclude_no_site() -> None:
    rig = Rig()
    for number in range(3 * MAX_LINK_LOSSES):
        lose_site(rig, number, number)
        assert rig.submit().excluded_workers == ()
    for number in range(MAX_LINK_LOSSES - 1):
        lose_site(rig, 100 + number)
    assert rig.client.ends == []
    lose_site(rig, 200)
    assert isinstance(rig.client.error, NoCapacity)


def test_request_waits_longer_for_a_link_than_for_a_worker() -> None:
    rig = Rig()
    lose_site(rig, 1, 5)
    attempt = 2
    while not rig.client.ends:
        rig.reject(NoCapacity("no worker"), attempt)
        rig.tick(core.SUBMIT_BACKOFF_S)
        attempt += 1
    assert LINK_WINDOW_S - 1.0 <= rig.now - 10.0 <= LINK_WINDOW_S + 1.0


@pytest.mark.parametrize(
    "code", [WorkerBusy.code, ContextFull.code, NoCapacity.code, RequestTimeout.code]
)
def test_retryable_failure_continues_on_another_worker(code: str) -> None:
    rig = running()
    failure = Failure(code=code, message="handed back")
    finish = Finish(reason="failed", served=SERVED, failure=failure)
    rig.tokens(0, 5, finish=finish)
    ack, submit = rig.actions()
    assert ack.message == AckFinished(placement_ids=(P1,))
    assert submit.message.excluded_workers == ("w1",)
    assert unpack_token_ids(submit.message.request.choices[0].output_token_ids) == [5]
    rig.place(P2, "w2")
    rig.tokens(1, 6, finish=STOP, placement_id=P2, worker_id="w2")
    assert rig.client.tokens == [5, 6]
    assert rig.client.error is None


def test_other_failures_end_the_request() -> None:
    rig = running()
    failure = Failure(code="invalid_request", message="bad", param="seed")
    rig.tokens(0, finish=Finish(reason="failed", served=SERVED, failure=failure))
    assert isinstance(rig.client.error, InvalidRequest)
    assert rig.client.error.param == "seed"


def test_stop_string_aborts() -> None:
    rig = running(stops_at=2)
    rig.tokens(0, 5, 6)
    assert rig.published() == [abort("w1", P1, "stop")]
    assert rig.client.error is None
    rig.tokens(2, 7)
    assert rig.client.tokens == [5, 6]


def test_stop_string_in_last_entry_acknowledges() -> None:
    rig = running(stops_at=2)
    rig.tokens(0, 5, 6, finish=STOP)
    assert [message for _, message in rig.published()] == [AckFinished(placement_ids=(P1,))]
    assert rig.client.finishes == [STOP]


def test_new_request_fails_soon_without_any_scheduler() -> None:
    rig = Rig()
    while not rig.client.ends:
        rig.reject(NoResponders("none"), rig.submit().attempt)
        rig.tick(core.SUBMIT_BACKOFF_S)
    assert isinstance(rig.client.error, NoCapacity)
    assert rig.client.error.retry_after_s is not None
    assert 0.3 < rig.now - 10.0 <= core.NO_SCHEDULER_WINDOW_S + 0.2


def test_request_waits_for_slow_scheduler() -> None:
    rig = Rig()
    rig.reject(NoResponders("none"), rig.submit().attempt)
    rig.tick(core.NO_SCHEDULER_WINDOW_S + 0.1)
    rig.reject(RequestTimeout("late"), rig.submit().attempt)
    rig.tick(core.SUBMIT_BACKOFF_S)
    rig.reject(RequestTimeout("late"), rig.submit().attempt)
    rig.tick(core.SUBMIT_BACKOFF_S)
    rig.reject(RequestTimeout("late"), rig.submit().attempt)
    assert rig.client.ends == []


def test_forbidden_submission_ends_at_once() -> None:
    """No scheduler would get it; what a scheduler refuses, another one may take."""
    rig = Rig()
    rig.reject(OutsideRegions("elsewhere"), rig.submit().attempt)
    assert rig.client.ends == []
    rig.tick(core.SUBMIT_BACKOFF_S)
    rig.reject(SendForbidden("not this class"), rig.submit().attempt)
    assert rig.client.error is not None and rig.client.error.http_status == 403


def test_accepted_request_waits_for_restarting_schedulers() -> None:
    rig = running()
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    for _ in range(50):
        rig.reject(NoResponders("none"), rig.submit().attempt)
        rig.tick(core.SUBMIT_BACKOFF_S)
    assert rig.client.ends == []
    returned = Rig()
    returned.queue()
    returned.actions()
    leaving = Failure(code=NoCapacity.code, message="leaving", retry_after_s=0.0)
    returned.streams.on_placement_failed(failing(leaving), returned.now)
    for _ in range(20):
        returned.tick(core.SUBMIT_BACKOFF_S)
        returned.reject(NoResponders("none"), returned.submit().attempt)
    assert returned.client.ends == []


@pytest.mark.parametrize("error", [NoResponders("none"), RequestTimeout("late")])
def test_submit_is_retried_until_window_closes(error: HearthError) -> None:
    rig = Rig()
    num_tries = 0
    while not rig.client.ends:
        attempt = rig.submit().attempt
        num_tries += 1
        rig.reject(error, attempt, is_bus_trusted=False)  # other schedulers may still reconnect
        rig.tick(core.SUBMIT_BACKOFF_S)
    assert num_tries >= 3
    assert isinstance(rig.client.error, NoCapacity)
    assert rig.client.error.retry_after_s is not None
    waited_s = rig.now - 10.0
    assert core.SUBMIT_WINDOW_S - 0.2 <= waited_s <= core.SUBMIT_WINDOW_S + 0.2


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=7.0), NoCapacity("none")])
def test_rejection_of_new_request_is_final(error: HearthError) -> None:
    rig = Rig()
    rig.reject(error)
    assert rig.client.error is error


def test_accepted_request_waits_for_capacity() -> None:
    rig = running()
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    rig.actions()
    rig.reject(NoCapacity("all excluded"), attempt=2)
    rig.tick(core.SUBMIT_BACKOFF_S)
    message = rig.submit()
    assert message.excluded_workers == ()  # a lost worker may be the only one
    rig.reject(UnknownPlacement("stale attempt"), attempt=2)
    rig.queue(attempt=3)
    failure = Failure(code=NoCapacity.code, message="still none")
    rig.streams.on_placement_failed(failing(failure, attempt=3), rig.now)
    rig.tick(core.SUBMIT_BACKOFF_S)
    assert rig.submit().attempt == 4


@pytest.mark.parametrize("waits_s", [0.0, 30.0])
def test_tries_without_a_worker_share_a_window(waits_s: float) -> None:
    """`waits_s`: in a queue, for a worker that then leaves as well."""
    rig = running()
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    failure = Failure(code=NoCapacity.code, message="no worker serves", retry_after_s=1.0)
    rig.queue(attempt=rig.submit().attempt)
    rig.streams.on_placement_failed(failing(failure, attempt=2), rig.now)
    rig.tick(core.SUBMIT_BACKOFF_S)
    keepalive = QueueKeepalive(scheduler_id="s1", request_ids=("r1",))
    attempt, queue_s = rig.submit().attempt, waits_s or NO_WORKER_GRACE_S
    began_at = rig.now + waits_s
    while not rig.client.ends:
        rig.queue(attempt=attempt)
        for _ in range(round(queue_s)):
            rig.tick(1.0)
            rig.streams.on_keepalive(keepalive, rig.now)
        rig.streams.on_placement_failed(failing(failure, attempt=attempt), rig.now)
        rig.tick(core.SUBMIT_BACKOFF_S)
        attempt, queue_s = attempt + 1, NO_WORKER_GRACE_S
    assert isinstance(rig.client.error, NoCapacity)
    waited_s = rig.now - began_at
    assert RECOVERY_WINDOW_S - 2.2 <= waited_s <= RECOVERY_WINDOW_S + 2.2


def test_frozen_gateway_retries_after_it_resumes() -> None:
    """The first attempt times out during the freeze, and the submission window ends."""
    rig = Rig()
    rig.actions()
    rig.now += 6.0
    for attempt in (1, 2):
        rig.reject(RequestTimeout("no reply"), attempt)
        rig.tick(core.SUBMIT_BACKOFF_S)
        assert rig.submit().attempt == attempt + 1
    rig.reject(RequestTimeout("no reply"), attempt=3)
    assert isinstance(rig.client.error, NoCapacity)


def test_bus_return_resubmits_queued_requests() -> None:
    """Their `Placed` may be lost. A late CancelQueued affects the earlier attempt only."""
    rig = Rig()
    rig.queue()
    rig.actions()
    rig.streams.on_bus_back(rig.now)
    cancelled, resubmit = rig.actions()
    assert (cancelled.subject, cancelled.message) == cancelling("s1")
    assert resubmit.message.attempt == 2
    rig.place()  # `Placed` was only delayed
    rig.queue(attempt=2)
    keepalive = QueueKeepalive(scheduler_id="s1", request_ids=("r1",))
    rig.streams.on_keepalive(keepalive, rig.now)
    assert rig.published() == [cancelling("s1", attempt=2)]


def test_placement_failure_of_new_request_is_final() -> None:
    rig = Rig()
    rig.queue()
    failure = Failure(code=Overloaded.code, message="waited too long", retry_after_s=2.0)
    rig.streams.on_placement_failed(failing(failure), rig.now)
    assert isinstance(rig.client.error, Overloaded)


@pytest.mark.parametrize("is_queued", [False, True])
def test_late_failure_of_earlier_attempt_is_ignored(is_queued: bool) -> None:
    rig = Rig()
    rig.queue()
    rig.tick(core.KEEPALIVE_LIMIT_S)
    rig.actions()
    if is_queued:
        rig.queue(attempt=2)
    failure = Failure(code=Overloaded.code, message="waited too long", retry_after_s=2.0)
    rig.streams.on_placement_failed(failing(failure, scheduler_id="s0"), rig.now)
    assert rig.client.ends == []
    assert rig.actions() == []


def test_tokens_from_unnamed_worker_are_ignored() -> None:
    rig = Rig()
    rig.queue()
    rig.tokens(0, 13, worker_id="w2")  # before and after `Placed`
    rig.place()
    rig.tokens(0, 13, worker_id="w2")
    assert rig.client.tokens == []
    rig.tokens(0, 5)
    assert rig.client.tokens == [5]


def test_request_of_leaving_scheduler_is_resubmitted() -> None:
    rig = Rig()
    rig.queue()
    rig.actions()
    failure = Failure(code=NoCapacity.code, message="leaving", retry_after_s=0.0)
    rig.streams.on_placement_failed(failing(failure), rig.now)
    rig.tick(core.SUBMIT_BACKOFF_S)
    assert rig.submit().attempt == 2


def test_queued_request_depends_on_keepalives() -> None:
    rig = Rig()
    rig.actions()
    keepalive = QueueKeepalive(scheduler_id="s1", request_ids=("r1",))
    rig.streams.on_keepalive(keepalive, rig.now)  # replaces the lost `Queued` reply
    for _ in range(5):
        rig.tick(core.KEEPALIVE_LIMIT_S - 0.1)
        rig.streams.on_keepalive(keepalive, rig.now)
    assert rig.actions() == []
    other = QueueKeepalive(scheduler_id="s2", request_ids=("r1",))
    rig.streams.on_keepalive(other, rig.now)
    assert rig.published() == [cancelling("s2")]
    rig.tick(core.KEEPALIVE_LIMIT_S)
    cancelled, resubmit = rig.actions()
    assert (cancelled.subject, cancelled.message) == cancelling("s1")
    assert resubmit.message.attempt == 2


def test_keepalive_of_running_or_ended_request_is_cancelled() -> None:
    rig = running()
    keepalive = QueueKeepalive(scheduler_id="s1", request_ids=("r1", "r9"))
    rig.streams.on_keepalive(keepalive, rig.now)
    assert [message.request_id for _, message in rig.published()] == ["r1", "r9"]


def test_requests_of_lost_scheduler_are_resubmitted() -> None:
    rig = Rig()
    rig.queue()
    rig.actions()
    rig.streams.on_scheduler_lost("s2", rig.now)
    assert rig.actions() == []
    rig.streams.on_scheduler_lost("s1", rig.now)
    assert rig.submit().attempt == 2


def test_late_replies_to_ended_request_are_cancelled() -> None:
    rig = Rig()
    error = HearthError("left")
    rig.streams.close("r1", "client_gone", error, rig.now)
    rig.streams.close("r1", "client_gone", error, rig.now)
    assert rig.client.ends == [StreamEnd(error, None, 0)]
    rig.actions()
    rig.queue()
    rig.place()
    assert rig.published() == [
        cancelling("s1"),
        abort("w1", P1, "superseded"),
    ]


def test_finished_placement_is_acknowledged_again() -> None:
    rig = running()
    rig.tokens(0, 5, finish=STOP)
    rig.actions()
    rig.tick(1.0)
    rig.tokens(0, 5, finish=STOP)
    assert [message for _, message in rig.published()] == [AckFinished(placement_ids=(P1,))]
    assert rig.client.tokens == [5]


def test_deadline_ends_request() -> None:
    for rig, expected in ((running(), [abort("w1", P1, "deadline")]), (Rig(), [])):
        rig.tick(60.0)
        assert isinstance(rig.client.error, DeadlineExceeded)
        assert rig.published() == expected


@pytest.mark.parametrize("make", [running, Rig])
def test_stream_that_raises_in_a_tick_ends_alone(make: Callable[[], Rig]) -> None:
    rig, other = make(), Recorder()
    rig.streams.open([Opening(request("r2"), other)], rig.now)
    rig.actions()
    watch = rig.streams._watch

    def fail_one(stream: Stream, now: float, is_bus_trusted: bool) -> None:
        if stream.request_id == "r1":
            raise KeyError("missing")
        watch(stream, now, is_bus_trusted)

    with patch.object(rig.streams, "_watch", fail_one):
        rig.tick(60.0)
    assert type(rig.client.error) is HearthError
    assert isinstance(other.error, DeadlineExceeded) and not len(rig.streams)


def test_resubmission_sends_remaining_time() -> None:
    rig = running()
    rig.now += 25.0
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    assert rig.submit().request.deadline_s == pytest.approx(35.0)


def test_unknown_choice_is_ignored() -> None:
    rig = running()
    entry = TokenEntry(P1, 3, 0, (1,))
    rig.streams.on_token_batch(TokenBatch(worker_id="w1", entries=(entry,)), rig.now)
    assert rig.client.tokens == []


def test_placement_id_of_another_request_is_rejected() -> None:
    rig, other = running(), Recorder()
    rig.streams.open([Opening(request("r2"), other)], rig.now)
    rig.streams.on_queued("r2", 1, QUEUED, rig.now)
    rig.streams.on_placed(Placed(request_id="r2", placement_id=P1, worker_id="w1"), rig.now)
    assert rig.resubmission_causes() == ["placement_retired"]
    rig.tokens(0, 5, 6, finish=STOP)
    assert (rig.client.tokens, other.tokens) == ([5, 6], [])
    rig.streams.close("r2", "client_gone", HearthError("gone"), rig.now)
    assert rig.client.error is None and other.error is not None


@pytest.mark.parametrize("first_position", [0, 95, 2**53])
def test_tokens_beyond_max_tokens_fail_request(first_position: int) -> None:
    rig = running(max_tokens=100)
    rig.tokens(first_position, *range(101))
    assert rig.client.tokens == []
    assert "more tokens" in str(rig.client.error)
    assert rig.published() == [abort("w1", P1, "failed")]


def test_unrequested_logprobs_fail_request() -> None:
    rig = running()
    entry = TokenEntry(P1, 0, 0, (1, 2), logprobs=(TokenLogprobs(-1.0),))
    rig.streams.on_token_batch(TokenBatch(worker_id="w1", entries=(entry,)), rig.now)
    assert "logprobs" in str(rig.client.error)


def test_illegal_transitions_raise() -> None:
    for state, allowed in TRANSITIONS.items():
        for target in StreamState:
            stream = Stream(
                Opening(request(), Recorder()), 0.0, queue=QueuedOpenings((), 0.0, TenantOpenings())
            )
            stream.state = state
            if target in allowed:
                stream.transition_to(target)
            else:
                with pytest.raises(IllegalTransition):
                    stream.transition_to(target)


def test_number_of_early_values_is_bounded() -> None:
    early, half = EarlyEntries(), (0,) * (MAX_EARLY_VALUES // 2)
    scored = TokenLogprobs(-1.0, half[:1000], tuple(map(float, half[:1000])))
    early.add("w", TokenEntry(P1, 0, 0, half), 0.0)
    early.add("w", TokenEntry(P2, 0, 0, (), prompt_logprobs=(scored,) * 900), 0.0)
    early.add("w", TokenEntry(P3, 0, 0, half), 0.0)
    assert early.take(P1, "w") == []
    assert len(early.take(P2, "w")) == len(early.take(P3, "w")) == 1
    early.add("w", TokenEntry(P1, 0, 0, (*half, *half, 1)), 0.0)
    assert len(early) == 0


def test_number_of_buffered_entries_is_bounded() -> None:
    early = EarlyEntries()
    for number in range(MAX_EARLY_ENTRIES + 5):
        placement_id = (number // 10).to_bytes(16, "big")
        early.add("w", TokenEntry(placement_id, 0, number, (1,)), 0.0)
    assert len(early) <= MAX_EARLY_ENTRIES
    assert early.take((0).to_bytes(16, "big"), "w") == []
    assert len(early.take((5).to_bytes(16, "big"), "w")) == 10
    retired = RetiredPlacements()
    for number in range(MAX_RETIRED + 1):
        retired.add(number.to_bytes(16, "big"), is_finished=True, now=0.0)
    assert (0).to_bytes(16, "big") not in retired
    assert (1).to_bytes(16, "big") in retired
    choice = ChoiceTokens(0)
    for position in range(1, MAX_AHEAD_ENTRIES + 50):
        choice.accept(TokenEntry(P1, 0, position, (position,)))
    assert len(choice.accept(TokenEntry(P1, 0, 0, (0,)))[0]) == MAX_AHEAD_ENTRIES + 1


@pytest.mark.parametrize("error_class", [HearthError, InvalidRequest, DeadlineExceeded])
def test_another_site_ends_no_request_with_an_error(error_class: type[HearthError]) -> None:
    rig = Rig()
    rig.queue()
    rig.place(worker_id="b/gw/00ff")
    rig.tokens(0, 7, worker_id="b/gw/00ff")
    rig.tokens(1, finish=failed_with(error_class), worker_id="b/gw/00ff")
    assert rig.resubmission_causes() == ["worker_failed"]
    assert rig.stream.excluded_workers == {"b/gw/00ff"}
    rig.queue(attempt=2)
    rig.place(P2, "c/gw/00ff")
    rig.tokens(1, *range(101), placement_id=P2, worker_id="c/gw/00ff")  # more than max_tokens
    assert rig.resubmission_causes() == ["worker_failed"] * 2
    assert rig.client.tokens == [7]


def test_early_entries_of_other_sites_push_out_none_of_this_one() -> None:
    rig = Rig()
    rig.queue()
    rig.tokens(0, 7)
    for number in range(MAX_EARLY_ENTRIES + 1):
        rig.tokens(0, 1, placement_id=number.to_bytes(16, "big"), worker_id="b/gw/00ff")
    rig.place()
    assert rig.client.tokens == [7]
