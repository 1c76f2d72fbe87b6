"""The recovery core with several choices and with logprobs, also on random networks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.streams import streams as core
from services.gateway.streams.actions import Publish, Resend, Submit
from services.gateway.streams.queued_openings import Opening
from services.gateway.streams.receiver import StreamEnd
from services.gateway.streams.streams import Streams
from shared.errors import (
    GrammarFailed,
    GrammarReplayFailed,
    HearthError,
    InvalidRequest,
    RequestTimeout,
    UnknownPlacement,
)
from shared.messages import (
    AbortRequest,
    AckFinished,
    Choice,
    Failure,
    Finish,
    ResendTokens,
    SamplingParams,
    SubmitRequest,
    TokenBatch,
    TokenEntry,
    TokenLogprobs,
)
from shared.packing import unpack_token_ids
from shared.subjects import control
from tests.services.gateway.streams.test_streams import (
    P1,
    P2,
    SERVED,
    STOP,
    Recorder,
    Rig,
    abort,
    request,
    running,
)


class Choices(Rig):
    """A running request of two choices; choice 0 meets a stop string at its second token."""

    def __init__(self, *, num_choices: int = 2, num_logprobs: int | None = None) -> None:
        super().__init__()
        sampling = SamplingParams(seed=1, max_tokens=100, num_logprobs=num_logprobs)
        choices = tuple(Choice(choice_index=index) for index in range(num_choices))
        self.streams = Streams("g")
        self.client = ChoiceRecorder()
        opened = msgspec.structs.replace(request(), sampling=sampling, choices=choices)
        self.streams.open([Opening(opened, self.client)], self.now)
        self.queue()
        self.place()
        self.actions()

    def entry(self, entry: TokenEntry, worker_id: str = "w1") -> None:
        self.streams.on_token_batch(TokenBatch(worker_id=worker_id, entries=(entry,)), self.now)

    def received(
        self, index: int, first: int, *token_ids: int, finish: Finish | None = None
    ) -> None:
        self.entry(TokenEntry(P1, index, first, token_ids, finish))


class ChoiceRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.by_choice: dict[int, list[int]] = {}
        self.logprobs: list[float] = []

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        known = self.by_choice.setdefault(choice_index, [])
        known += token_ids
        self.logprobs += [each.logprob for each in logprobs]
        return choice_index != 0 or len(known) < 2


def stop(choice_index: int) -> tuple[str, AbortRequest]:
    message = AbortRequest(placement_id=P1, reason="stop", choice_index=choice_index)
    return control("decode", "w1"), message


def test_stop_aborts_choice_then_placement() -> None:
    rig = Choices()
    rig.received(0, 0, 5, 6)
    assert rig.published() == [stop(0)]
    rig.received(1, 0, 7, finish=STOP)
    assert rig.published() == [abort("w1", P1, "stop")]  # the first abort may be lost
    assert rig.client.by_choice == {0: [5, 6], 1: [7]}
    assert rig.client.ends == [StreamEnd(None, "w1", 0)]


def test_abort_is_repeated_if_stopped_choice_continues() -> None:
    rig = Choices()
    rig.received(0, 0, 5, 6)
    rig.actions()
    rig.received(0, 2, 7)
    assert rig.actions() == []  # the first abort may still arrive
    rig.tick(1.0)
    rig.received(0, 3, 8)
    rig.received(0, 4, 9)
    assert rig.published() == [stop(0)]
    rig.received(1, 0, 7)
    rig.tick(1.0)
    rig.received(0, 5, 9, finish=STOP)  # the choice finished without the abort
    assert rig.actions() == []
    assert rig.client.by_choice[0] == [5, 6]


def test_choice_stopped_in_last_entry_is_not_aborted() -> None:
    rig = Choices()
    rig.received(0, 0, 5, 6, finish=STOP)
    assert rig.actions() == []
    rig.received(1, 0, 7, finish=STOP)
    assert [message for _, message in rig.published()] == [AckFinished(placement_ids=(P1,))]


def test_only_unfinished_choices_are_resubmitted() -> None:
    rig = Choices(num_choices=4)
    rig.received(0, 0, 5, 6)  # stopped
    rig.received(1, 0, 7, finish=STOP)
    rig.received(2, 0, 8, 9)
    rig.actions()
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    choices = rig.submit().request.choices
    assert [each.choice_index for each in choices] == [2, 3]
    assert [unpack_token_ids(each.output_token_ids) for each in choices] == [[8, 9], []]
    rig.place(P2, "w2")
    for index, first in ((2, 2), (3, 0)):
        rig.entry(TokenEntry(P2, index, first, (4,), STOP), "w2")
    assert rig.client.by_choice == {0: [5, 6], 1: [7], 2: [8, 9, 4], 3: [4]}
    assert [message for _, message in rig.published()] == [AckFinished(placement_ids=(P2,))]


def test_failed_resend_of_stopped_choice_is_ignored() -> None:
    rig = Choices()
    rig.received(0, 1, 6)
    (resend,) = rig.actions()
    rig.received(0, 0, 5)
    assert rig.published() == [stop(0)]
    error = UnknownPlacement("that choice is gone")
    rig.streams.on_resend_failed(resend.message, error, rig.now, is_bus_trusted=True)
    assert rig.actions() == []


def test_silent_choice_is_resent_while_another_sends() -> None:
    rig = Choices()
    rig.tick(core.TOKEN_TIMEOUT_S - 0.1)
    rig.received(1, 0, 7)
    rig.tick(0.1)
    (action,) = rig.actions()
    assert action.message == ResendTokens(placement_id=P1, choice_index=0, from_position=0)


def test_failed_resends_are_counted_by_choice() -> None:
    rig = Choices(num_choices=core.MAX_FAILED_RESENDS)
    rig.tick(core.TOKEN_TIMEOUT_S)
    for action in rig.actions():
        error = RequestTimeout("no reply")
        rig.streams.on_resend_failed(action.message, error, rig.now, is_bus_trusted=True)
    assert rig.actions() == []
    rig.tick(core.RESEND_RETRY_S)
    assert len(rig.actions()) == core.MAX_FAILED_RESENDS


def test_length_finish_after_worker_loss_retains_served() -> None:
    rig = running(max_tokens=1)
    entry = TokenEntry(P1, 0, 0, (5,), None, SERVED)
    rig.streams.on_token_batch(TokenBatch(worker_id="w1", entries=(entry,)), rig.now)
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    (finish,) = rig.client.finishes
    assert finish.served == SERVED


# ── choices that no worker can continue ──────────────────────────────────────────────────────────


def grammar_failed(error: type[HearthError] = GrammarFailed) -> Finish:
    return Finish(
        reason="failed", served=SERVED, failure=Failure(code=error.code, message="too complex")
    )


@pytest.mark.parametrize("error", [GrammarFailed, GrammarReplayFailed])
def test_choice_whose_grammar_fails_ends_alone(error: type[HearthError]) -> None:
    rig = Choices(num_choices=3)
    rig.received(1, 0, 7, 8, finish=grammar_failed(error))
    rig.received(1, 2, 9)  # it has ended
    assert (rig.actions(), rig.client.ends, rig.client.finishes) == ([], [], [])
    rig.received(2, 0, 4)
    rig.received(0, 0, 5, 6)  # stopped
    rig.received(2, 1, 4, finish=STOP)
    assert rig.client.by_choice == {0: [5, 6], 1: [7, 8], 2: [4, 4]}
    assert rig.client.ends == [StreamEnd(None, "w1", 0)]
    assert rig.client.finishes == [STOP, grammar_failed(error)]


def test_choice_whose_grammar_fails_is_not_resubmitted() -> None:
    rig = Choices()
    rig.received(1, 0, 7, finish=grammar_failed())
    rig.streams.on_worker_lost("w1", rig.now, is_excluded=True)
    assert [each.choice_index for each in rig.submit().request.choices] == [0]
    rig.place(P2, "w2")
    rig.entry(TokenEntry(P2, 0, 0, (5,), STOP), "w2")
    assert rig.client.ends == [StreamEnd(None, "w2", 1)]
    assert rig.client.finishes == [STOP, grammar_failed()]


@pytest.mark.parametrize("num_choices", [1, 2])
def test_request_fails_if_the_grammars_of_all_choices_do(num_choices: int) -> None:
    rig = Choices(num_choices=num_choices)
    for index in range(num_choices):
        assert not rig.client.ends
        rig.received(index, 0, 7, finish=grammar_failed())
    assert isinstance(rig.client.error, GrammarFailed)
    assert rig.client.finishes == []
    assert [message for _, message in rig.published()] == [AckFinished(placement_ids=(P1,))]


def test_another_failure_ends_the_request() -> None:
    rig = Choices()
    rig.received(1, 0, 7, finish=grammar_failed(InvalidRequest))
    assert isinstance(rig.client.error, InvalidRequest)


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────────


def scored(first: int, end: int, finish: Finish | None = None) -> TokenEntry:
    """An entry of choice 1. The token id and the logprob at a position equal the position."""
    positions = range(first, end)
    logprobs = tuple(TokenLogprobs(float(place)) for place in positions)
    return TokenEntry(P1, 1, first, tuple(positions), finish, logprobs=logprobs)


def test_logprobs_stay_with_tokens_across_overlaps_and_gaps() -> None:
    rig = Choices(num_logprobs=0)
    for first, end in ((0, 2), (1, 3), (5, 7), (6, 8), (3, 6), (0, 9)):
        rig.entry(scored(first, end))
    assert rig.client.by_choice[1] == list(range(9))
    assert rig.client.logprobs == [float(place) for place in range(9)]


def test_missing_logprobs_fail_request() -> None:
    rig = Choices(num_logprobs=0)
    rig.received(1, 0, 5)
    assert "logprobs" in str(rig.client.error)
    assert rig.published() == [abort("w1", P1, "failed")]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.2, 0.5]),
    num_choices=st.integers(1, 3),
)
def test_any_network_gives_same_tokens_and_one_end(
    seed: int, loss: float, num_choices: int
) -> None:
    """Entries are lost, duplicated and reordered, and workers die; resends and placements arrive.

    Choice 0 stops after its second token; a worker that receives the abort drops the choice.
    """
    rng = random.Random(seed)
    rig = Choices(num_choices=num_choices, num_logprobs=0)
    answers = [
        [100 * index + place for place in range(rng.randrange(1, 30))]
        for index in range(num_choices)
    ]
    placements: dict[bytes, dict[int, int]] = {P1: dict.fromkeys(range(num_choices), 0)}

    def worker_of(placement_id: bytes) -> str:
        return f"w{list(placements).index(placement_id) + 1}"

    def entry_of(placement_id: bytes, index: int, start: int, end: int) -> TokenEntry:
        answer = answers[index]
        tokens = tuple(answer[start:end])
        scores = tuple(TokenLogprobs(float(token)) for token in tokens)
        finish = STOP if end == len(answer) else None
        return TokenEntry(placement_id, index, start, tokens, finish, logprobs=scores)

    def place(message: SubmitRequest) -> None:
        rig.queue(message.attempt)
        placement_id = rng.randbytes(16)
        placements[placement_id] = {
            choice.choice_index: len(unpack_token_ids(choice.output_token_ids))
            for choice in message.request.choices
        }
        rig.place(placement_id, worker_of(placement_id))

    def resend(worker_id: str, message: ResendTokens) -> None:
        index, start = message.choice_index, message.from_position
        if index not in placements[message.placement_id]:
            error = UnknownPlacement("forgotten")
            rig.streams.on_resend_failed(message, error, rig.now, is_bus_trusted=True)
            return
        end = rng.randrange(start, len(answers[index]) + 1)
        entry = entry_of(message.placement_id, index, start, end)
        batch = TokenBatch(worker_id=worker_id, entries=(entry,))
        rig.streams.on_resent(message, batch, rig.now)

    for _ in range(1200):
        for action in rig.actions():
            match action:
                case Submit(message):
                    place(message)
                case Resend(worker_id, message):
                    resend(worker_id, message)
                case Publish(message=AbortRequest() as message) if rng.random() >= loss:
                    if message.choice_index is not None:
                        placements[message.placement_id].pop(message.choice_index, None)
        if rig.client.ends:
            break
        placement_id = rng.choice(list(placements))
        if placements[placement_id]:
            index = rng.choice(list(placements[placement_id]))
            start = rng.randrange(placements[placement_id][index], len(answers[index]) + 1)
            end = min(len(answers[index]), start + rng.randrange(4))
            if rng.random() >= loss:
                entry = entry_of(placement_id, index, start, end)
                batch = TokenBatch(worker_id=worker_of(placement_id), entries=(entry,))
                rig.streams.on_token_batch(batch, rig.now)
        if rng.random() < 0.01 and len(placements) < 4:
            rig.streams.on_worker_lost(f"w{len(placements)}", rig.now, is_excluded=True)
        rig.tick(0.04)
    assert rig.client.error is None
    assert len(rig.streams) == 0
    received = rig.client.by_choice
    assert received[0][:2] == answers[0][:2]
    assert received[0] == answers[0][: len(received[0])]
    assert [received[index] for index in range(1, num_choices)] == answers[1:]
    assert sorted(rig.client.logprobs) == sorted(
        float(each) for tokens in received.values() for each in tokens
    )
