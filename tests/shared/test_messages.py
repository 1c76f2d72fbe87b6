"""Decoding a message validates the fields on which handlers rely."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from shared.kv_layout import KvShard
from shared.messages import (
    MAX_DURATION_S,
    AbortRequest,
    BlockPage,
    Choice,
    DataPlaneAddress,
    Failure,
    Heartbeat,
    KvTarget,
    ListBlocks,
    Message,
    ModelCard,
    Placed,
    RenewLease,
    Request,
    ResendTokens,
    RunPrefill,
    SamplingParams,
    Served,
    TokenBatch,
    TokenEntry,
    TokenLogprobs,
    WorkerLoad,
)
from shared.numerics import Numerics

PLACEMENT_ID = b"p" * 16
SERVED = Served(num_cached_tokens=0, prefill_worker_id=None)
HEARTBEAT = Heartbeat(
    process_id="decode-1",
    epoch=2**60,
    sequence_number=1,
    roles=("decode",),
    state="ready",
    interval_s=0.25,
)
CARD = ModelCard(
    name="m",
    revision="r",
    kv_format="k",
    block_size=16,
    max_context_tokens=64,
    vocab_size=99,
    numerics=Numerics("exact", "timing", "uint8", "1"),
)
LEASE = RenewLease(decode_worker_id="decode-1", placement_ids=(PLACEMENT_ID,), lease_s=3)
PLACED = Placed(request_id="r", placement_id=PLACEMENT_ID, worker_id="decode-1")
REQUEST = Request(
    request_id="r",
    tenant_id="t",
    gateway_id="gateway-1",
    model="m",
    revision="r",
    cache_root=bytes(16),
    prompt_token_ids=bytes(4),
    block_hashes=b"",
    sampling=SamplingParams(seed=1, max_tokens=1),
    choices=(Choice(choice_index=0),),
    deadline_s=60.0,
)
RUN_PREFILL = RunPrefill(
    placement_id=PLACEMENT_ID,
    tenant_id="t",
    decode_worker_id="decode-1",
    model="m",
    revision="r",
    kv_format="k",
    cache_root=bytes(16),
    token_ids=bytes(4),
    block_hashes=b"",
    first_token=0,
    targets=(
        KvTarget(
            shard=KvShard(0, 1, 0, 1),
            address=DataPlaneAddress(host="h", port=1, unix_path="", instance_id=b"i"),
        ),
    ),
    lease_s=3.0,
    deadline_s=60.0,
    numerics=Numerics("exact", "timing", "uint8", "1"),
    request_id="r",
)


def round_trip(message: Message) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@pytest.mark.parametrize("lease_s", [math.nan, math.inf, -1.0, MAX_DURATION_S + 1])
def test_duration_must_be_finite_and_not_negative(lease_s: float) -> None:
    """A NaN deadline never expires, and blocks all later deadlines in the same heap."""
    with pytest.raises(msgspec.ValidationError, match="lease_s"):
        round_trip(msgspec.structs.replace(LEASE, lease_s=lease_s))
    with pytest.raises(msgspec.ValidationError, match="retry_after_s"):
        round_trip(Failure(code="overloaded", message="", retry_after_s=lease_s))


@pytest.mark.parametrize(
    "process_id",
    ["", ".a", "a.", "a.b.c", "a.*", "*", ">", "two words", "line\n", "\r\nPUB x 0\r\n", "x" * 257],
)
def test_process_id_must_be_one_or_two_subject_tokens(process_id: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="worker_id"):
        round_trip(msgspec.structs.replace(PLACED, worker_id=process_id))


@pytest.mark.parametrize("placement_id", [b"", b"p" * 15, b"p" * 17, bytes(1 << 20)])
def test_placement_id_must_have_128_bits(placement_id: bytes) -> None:
    """Tables of placement ids limit the number of ids, not their size."""
    with pytest.raises(msgspec.ValidationError, match="placement_id"):
        round_trip(AbortRequest(placement_id=placement_id, reason="fenced"))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (msgspec.structs.replace(HEARTBEAT, roles=()), "roles"),
        (msgspec.structs.replace(HEARTBEAT, sequence_number=-1), "sequence_number"),
        (msgspec.structs.replace(CARD, block_size=0), "block_size"),
        (msgspec.structs.replace(CARD, vocab_size=-5), "vocab_size"),
        (msgspec.structs.replace(CARD, features=("x" * 257,)), "features"),
        (WorkerLoad(step=1, step_budget_s=math.nan), "step_budget_s"),
        (WorkerLoad(step=1, step_budget_s=1, num_free_blocks=-1), "num_free_blocks"),
        (msgspec.structs.replace(SERVED, num_cached_tokens=-1), "num_cached_tokens"),
        (ListBlocks(cursor=-1), "cursor"),
        (
            ResendTokens(placement_id=PLACEMENT_ID, choice_index=0, from_position=-1),
            "from_position",
        ),
        (DataPlaneAddress(host="h", port=65536, unix_path="", instance_id=b"i"), "port"),
        (DataPlaneAddress(host="h", port=1, unix_path="", instance_id=b""), "instance_id"),
        (
            BlockPage(
                worker_id="decode-1",
                epoch=1,
                sequence_number=1,
                model="m",
                revision="r",
                kv_format="k",
                stored=(),
                next_cursor=-4,
            ),
            "next_cursor",
        ),
    ],
)
def test_invalid_field_is_rejected(message: Message, field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        round_trip(message)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_token_id_must_fit_in_32_bits(token_id: int) -> None:
    batch = TokenBatch(
        worker_id="decode-1", entries=(TokenEntry(PLACEMENT_ID, 0, 0, (1, token_id)),)
    )
    with pytest.raises(msgspec.ValidationError):
        round_trip(batch)


def test_top_tokens_and_logprobs_must_match_in_length() -> None:
    with pytest.raises(msgspec.ValidationError, match="differ in length"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([-1.0, [1, 2], [-1.0]]), type=TokenLogprobs)


@pytest.mark.parametrize("message", [HEARTBEAT, CARD, LEASE, PLACED])
def test_valid_message_round_trips(message: Message) -> None:
    assert round_trip(message) == message


def test_heartbeat_with_ever_more_features_is_rejected() -> None:
    names = [f"demo/{number}" for number in range(10_000)]
    for count, is_valid in ((0, True), (64, True), (65, False), (10_000, False)):
        card = msgspec.structs.replace(CARD, features=tuple(names[:count]))
        heartbeat = msgspec.structs.replace(HEARTBEAT, model=card)
        if is_valid:
            assert round_trip(heartbeat) == heartbeat
            continue
        with pytest.raises(msgspec.ValidationError, match=r"length <= 64 - at `\$.model.features`"):
            round_trip(heartbeat)


@pytest.mark.parametrize(
    ("message", "field"),
    [(CARD, "features"), (REQUEST, "needs"), (PLACED, "needs"), (RUN_PREFILL, "needs")],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_message_of_a_peer_that_knows_no_features_has_none(message: Message, field: str) -> None:
    """And that peer ignores the field."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert sent.pop(field, []) == []  # a card's is left out
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(message))
    assert received == message

    with_names = {**sent, field: ["demo/1"]}
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(with_names), type=type(message))
    assert getattr(received, field) == ("demo/1",)
    too_many = {**sent, field: ["demo/1"] * 65}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode(too_many), type=type(message))
