"""Hostile messages to every handler of every service, while a request runs and before the next.

Whatever they are, the running request ends once, no handler raises what its callers do not know,
nothing is left behind, and the next request is answered as ever.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.model_files import ModelFiles
from shared.messages import (
    AbortRequest,
    AckFinished,
    CancelQueued,
    Failure,
    Heartbeat,
    Message,
    PlacementFailed,
    PrefillFailed,
    QueueKeepalive,
    RenewLease,
    ResendTokens,
    TokenBatch,
)
from shared.subjects import cancel, control, placement, resend, start_decode
from tests.fuzz.fleet import PROCESSES, Fleet, fleet
from tests.fuzz.mutations import anything, spoiled, torn
from tests.fuzz.profile import fuzz
from tests.services.gateway.model_dir import write_model_dir
from tests.simulation.clock import run

encode = msgspec.msgpack.Encoder().encode
RUNNING = {"max_tokens": 60, "num_choices": 2}
SEEDS_PER_SUBJECT = 3


@dataclass
class Good:
    """What an undisturbed run sends."""

    text: str = ""
    messages: list[tuple[str, bytes]] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)


@cache
def files() -> tuple[Path, ModelFiles]:
    directory = write_model_dir(Path(tempfile.mkdtemp()) / "timing")
    return directory, ModelFiles(directory)


async def text_of(it: Fleet, request_id: str) -> str:
    delivery = await it.open(request_id, max_tokens=40)
    error = await it.ended(delivery)
    assert error is None, error
    return "".join(piece.text for piece in delivery.take())


@cache
def good() -> Good:
    found = Good()

    async def main() -> None:
        async with fleet(*files()) as it:
            it.network.spoil_reply = lambda data: found.replies.append(data) or data  # type: ignore[func-returns-value]
            delivery = await it.open("first", **RUNNING)
            assert await it.ended(delivery) is None
            await it.settled()
            for subject, sent in it.sent.items():
                found.messages += [(subject, data) for data in sent[-SEEDS_PER_SUBJECT:]]
            found.messages += _rare(it)
            # after it, for nobody can know the random ids of what is yet to come
            found.text = await text_of(it, "second")

    run(main())
    found.replies = sorted(set(found.replies), key=found.replies.index)[:20]
    return found


def _rare(it: Fleet) -> list[tuple[str, bytes]]:
    """What only a disturbed run sends, with the names of this one's."""
    ((worker_id, placement_id),) = {
        (batch.worker_id, entry.placement_id)
        for data in it.sent["hearth.v1.gateway.gateway-1.tokens"][:1]
        for batch in (msgspec.msgpack.decode(data, type=TokenBatch),)
        for entry in batch.entries[:1]
    }
    failure = Failure(code="worker_busy", message="no", retry_after_s=1.0)
    told: list[tuple[str, Message]] = [
        (control("decode", worker_id), AckFinished(placement_ids=(placement_id,))),
        (
            control("prefill", "prefill-1"),
            RenewLease(decode_worker_id=worker_id, placement_ids=(placement_id,), lease_s=3.0),
        ),
        (
            control("decode", worker_id),
            PrefillFailed(
                placement_id=placement_id, prefill_worker_id="prefill-1", failure=failure
            ),
        ),
        (
            resend(worker_id),
            ResendTokens(placement_id=placement_id, choice_index=0, from_position=1),
        ),
        (
            cancel("scheduler-1"),
            CancelQueued(request_id="first", gateway_id="gateway-1", attempt=1),
        ),
        (
            placement("gateway-1"),
            QueueKeepalive(scheduler_id="scheduler-1", request_ids=("first", "other")),
        ),
        (
            placement("gateway-1"),
            PlacementFailed(
                request_id="first", scheduler_id="scheduler-1", attempt=1, failure=failure
            ),
        ),
    ]
    for index in (None, 0, 1):
        abort = AbortRequest(placement_id=placement_id, reason="stop", choice_index=index)
        told.append((control("decode", worker_id), abort))
    starts = it.sent[start_decode(worker_id)][:1]
    elsewhere = [(start_decode(each), data) for data in starts for each in ("decode-1", "worker-1")]
    return elsewhere + [(subject, encode(message)) for subject, message in told]


def hostile() -> st.SearchStrategy[tuple[str, bytes]]:
    by_subject = good().messages

    def spoil(seed: tuple[str, bytes]) -> st.SearchStrategy[tuple[str, bytes]]:
        subject, data = seed
        tree = spoiled([msgspec.msgpack.decode(data)]).map(encode)
        return st.tuples(st.just(subject), tree | tree | tree | torn([data]) | anything)

    elsewhere = st.tuples(
        st.sampled_from([subject for subject, _ in by_subject]),
        st.sampled_from([data for _, data in by_subject]),
    )
    return st.sampled_from(by_subject).flatmap(spoil) | elsewhere


def is_impostor(data: bytes) -> bool:
    """A heartbeat in another's name: every process has a NATS credential of its own."""
    try:
        return msgspec.msgpack.decode(data, type=Heartbeat).process_id in PROCESSES
    except Exception:
        return False


def bad_replies() -> st.SearchStrategy[dict[int, bytes]]:
    trees = [msgspec.msgpack.decode(data) for data in good().replies]
    spoilt: Any = spoiled(trees).map(encode) | torn(good().replies) | anything
    return st.dictionaries(st.integers(0, 8), spoilt, max_size=3)


@fuzz(40)
@given(
    messages=st.deferred(lambda: st.lists(hostile(), min_size=1, max_size=12)),
    replies=st.deferred(bad_replies),
    pause_s=st.sampled_from((0.0, 0.001, 0.004, 0.02, 0.1)),
)
def test_services_bear_any_message(
    messages: list[tuple[str, bytes]], replies: dict[int, bytes], pause_s: float
) -> None:
    async def main() -> None:
        async with fleet(*files()) as it:
            num_replies = iter(range(1 << 30))
            it.network.spoil_reply = lambda data: replies.get(next(num_replies), data)
            stranger = it.network.bus("stranger")
            running = await it.open("first", **RUNNING)
            for subject, data in messages:
                if not is_impostor(data):
                    stranger.publish_bytes(subject, data)
                await asyncio.sleep(pause_s)
            await it.ended(running)
            it.network.spoil_reply = lambda data: data
            assert await text_of(it, "second") == good().text
            await it.settled()

    run(main())
