"""Modifies messages between real services while they work.

A message of an old run has no receiver that waits for it. So each example names messages of the
running fleet, by kind and number: at that moment one is spoilt, lost, duplicated, delayed or
misdirected, or is followed by a command that its sender may send about its contents. Every message
comes from a permitted sender; messages about the `spared` request are not modified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.errors import StopTest

from shared.messages import (
    AbortRequest,
    AckFinished,
    BlocksRemoved,
    CancelQueued,
    Failure,
    KvEvents,
    Message,
    Placed,
    PlacementFailed,
    PrefillFailed,
    QueueKeepalive,
    RenewLease,
    RunPrefill,
    StartDecode,
    SubmitRequest,
)
from shared.packing import BLOCK_HASH_BYTES
from shared.subjects import cancel, control, owner_of, placement, sender_of
from tests.fuzz.mutations import anything, spoiled, torn
from tests.support.world.bus import Parcel, SimulatedNetwork

encode = msgspec.msgpack.Encoder().encode
HOWS = ("spoil", "spoil", "after", "after", "twice", "twice", "tear", "lose", "late", "elsewhere")
# By their last word. The first few of each kind belong to the start of a request.
KINDS = {
    "submit": 1, "start": 1, "run": 1, "placement": 2, "tokens": 30, "control": 3, "cancel": 1,
    "resend": 2, "match": 1, "list_blocks": 3, "kv_events": 6, "heartbeat": 12, "reply": 8,
    "pins": 4,
}  # fmt: skip
FAILURE = Failure(code="worker_busy", message="no", retry_after_s=1.0)

# The most critical kinds are sampled more often.
places = st.sampled_from((*KINDS, *("tokens", "placement") * 3)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.integers(0, KINDS[kind]))
)
plans = st.dictionaries(places, st.sampled_from(HOWS), min_size=4, max_size=20)
Plan = dict[tuple[str, int], str]


class Meddler:
    def __init__(
        self, network: SimulatedNetwork, plan: Plan, draw: Callable[[Any], Any], spared: str
    ) -> None:
        self.exhausted: StopTest | None = None  # what hypothesis raised when the choices ended
        self._plan, self._draw = plan, draw
        self._network = network
        self._spared = {spared.encode()}  # and the ids of its placements
        self._seen: Counter[str] = Counter()
        self._past: dict[str, list[bytes]] = {}
        self._post, self._send_request = network.post, network.send_request
        network.post, network.send_request = self.post, self.send_request  # type: ignore[method-assign]
        network.spoil_reply = self.reply

    def stop(self) -> None:
        self._plan = {}

    def post(self, connection: Any, subject: str, parcel: Parcel) -> None:
        self._take(connection, subject, parcel, lambda each: self._post(connection, subject, each))

    def send_request(
        self, connection: Any, subject: str, parcel: Parcel, on_no_responders: Any
    ) -> None:
        def send(each: Parcel) -> None:
            self._send_request(connection, subject, each, on_no_responders)

        self._take(connection, subject, parcel, send)

    def reply(self, data: bytes) -> bytes:
        how = self._how("reply", data)
        try:
            return data if how is None else self._spoilt(data)
        except StopTest as error:
            self._stop_early(error)
            return data

    def _take(
        self, connection: Any, subject: str, parcel: Parcel, send: Callable[[Parcel], None]
    ) -> None:
        data, kind = parcel.data, subject.rpartition(".")[2]
        self._record(kind, data)
        how = self._how(kind, data)
        if how in (None, "after", "twice", "late", "elsewhere"):
            send(parcel)
        if how is not None:
            for at, sent in self._drawn_instead(how, subject, parcel):
                sent = Parcel(sent, parcel.reply, parcel.wire_subject)
                if at == subject:
                    send(sent)
                else:
                    self._post(connection, at, sent)
        self._past.setdefault(subject, []).append(data)

    def _how(self, kind: str, data: bytes) -> str | None:
        if any(name in data for name in self._spared):
            return None
        number, self._seen[kind] = self._seen[kind], self._seen[kind] + 1
        return self._plan.get((kind, number))

    def _record(self, kind: str, data: bytes) -> None:
        """Records the placements of the spared request."""
        if kind in ("start", "run", "placement") and any(name in data for name in self._spared):
            sent = msgspec.msgpack.decode(data)
            if "placement_id" in sent:
                self._spared.add(sent["placement_id"])

    def _drawn_instead(self, how: str, subject: str, parcel: Parcel) -> list[tuple[str, bytes]]:
        try:
            return self._instead(how, subject, parcel)
        except StopTest as error:
            self._stop_early(error)
            return [(subject, parcel.data)]

    def _stop_early(self, error: StopTest) -> None:
        """The services must not meet the exception: it is for hypothesis, after the run."""
        self.exhausted = error
        self.stop()

    def _instead(self, how: str, subject: str, parcel: Parcel) -> list[tuple[str, bytes]]:
        data = parcel.data
        match how:
            case "spoil":
                return [(subject, self._spoilt(data))]
            case "tear":
                return [(subject, self._draw(torn([data]) | anything))]
            case "twice":
                return [(subject, data)]
            case "late":
                past = self._past.get(subject, [data])
                return [(subject, self._draw(st.sampled_from(past)))]
            case "elsewhere":
                other = self._draw(st.sampled_from(("prefill-1", "decode-1", "worker-1")))
                parts = subject.split(".")
                return [(".".join((*parts[:3], other, *parts[4:])), self._spoilt(data))]
            case "after":
                some = st.lists(st.sampled_from(_commands(subject, parcel)), min_size=1, max_size=4)
                return [
                    (at, self._draw(st.just(encode(sent)) | _spoiling(sent)))
                    for at, sent in self._draw(some)
                ]
        return []

    def _spoilt(self, data: bytes) -> bytes:
        return self._draw(spoiled([msgspec.msgpack.decode(data)]).map(encode))


def _spoiling(message: Message) -> st.SearchStrategy[bytes]:
    return spoiled([msgspec.msgpack.decode(encode(message))]).map(encode)


def _commands(subject: str, parcel: Parcel) -> list[tuple[str, Message]]:
    """The messages that this sender may send next about the ids that it has just named."""
    owner, kind = owner_of(subject) or "", subject.rpartition(".")[2]
    sender = sender_of(parcel.wire_subject)
    if kind == "submit":
        submit = msgspec.msgpack.decode(parcel.data, type=SubmitRequest)
        request_id = submit.request.request_id
        cancels = [
            CancelQueued(request_id=request_id, gateway_id=sender, attempt=attempt)
            for attempt in (None, 0, 1, 2)
        ]
        return [(cancel("scheduler-1"), each) for each in cancels]
    if kind == "placement":
        placed = msgspec.msgpack.decode(parcel.data)
        return _of_scheduler(owner, sender, placed.get("request_id", "first"), placed)
    if kind == "start":
        start = msgspec.msgpack.decode(parcel.data, type=StartDecode)
        return [*_of_owner(owner, start.placement_id), (subject, start)]
    if kind == "run":
        run = msgspec.msgpack.decode(parcel.data, type=RunPrefill)
        renewed = RenewLease(
            decode_worker_id=sender, placement_ids=(run.placement_id,) * 2, lease_s=0.0
        )
        abort = AbortRequest(placement_id=run.placement_id, reason="superseded")
        return [(control("prefill", owner), renewed), (control("prefill", owner), abort)]
    if kind == "control" and sender.startswith("prefill"):
        sent = msgspec.msgpack.decode(parcel.data).get("placement_id", bytes(16))
        failed = PrefillFailed(placement_id=sent, prefill_worker_id=sender, failure=FAILURE)
        return [(subject, failed)]
    if kind == "kv_events":
        return [(subject, _halved(msgspec.msgpack.decode(parcel.data, type=KvEvents)))]
    return [(subject, msgspec.msgpack.decode(parcel.data))]  # type: ignore[list-item]


def _halved(events: KvEvents) -> KvEvents:
    """The next events, with half a block hash at the end."""
    half = BlocksRemoved(block_hashes=bytes(BLOCK_HASH_BYTES // 2))
    number = events.sequence_number + 1
    return msgspec.structs.replace(events, sequence_number=number, events=(*events.events, half))


def _of_scheduler(
    gateway: str, sender: str, request_id: str, placed: dict[str, Any]
) -> list[tuple[str, Message]]:
    failed = PlacementFailed(request_id=request_id, scheduler_id=sender, attempt=1, failure=FAILURE)
    keepalive = QueueKeepalive(scheduler_id=sender, request_ids=(request_id, request_id, "other"))
    sent: list[tuple[str, Message]] = [
        (placement(gateway), failed),
        (placement(gateway), keepalive),
    ]
    if "worker_id" in placed:
        placement_id, worker_id = placed["placement_id"], placed["worker_id"]
        other = "first" if request_id == "second" else "second"
        sent += [
            (placement(gateway), Placed(request_id=of, placement_id=where, worker_id=by))
            for of, where, by in (
                (request_id, bytes(16), "worker-1"),
                (request_id, placement_id, "prefill-1"),
                (other, placement_id, worker_id),
            )
        ]
        sent += _of_owner(worker_id, placement_id)
    return sent


def _of_owner(worker: str, placement_id: bytes) -> list[tuple[str, Message]]:
    at = control("decode", worker)
    aborts = [
        AbortRequest(placement_id=placement_id, reason="stop", choice_index=index)
        for index in (None, 0, 1, 7)
    ]
    return [(at, AckFinished(placement_ids=(placement_id,) * 2)), *((at, each) for each in aborts)]
