"""The plan of a link, from what its ends report, and what the previous release makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.kv_wire import frames
from shared.kv_wire.dialer import Dialer
from shared.kv_wire.frames import Frame, Hello, Welcome, fault_of, sealed_sum
from shared.kv_wire.kv_server import KvServer
from shared.kv_wire.link import (
    DEVICE_FRAME_BYTES,
    FRAME_BYTES,
    MAX_DEVICE_FRAME_BYTES,
    MAX_FRAME_BYTES,
    LinkEnd,
)
from shared.kv_wire.ports.push_plan import kv_links, max_frame_bytes, plan_push
from shared.messages import DataPlaneAddress, KvLinks
from tests.shared.kv_wire.support import INSTANCE, RecordingSink, fill_with, header

OLD = LinkEnd()  # of a release that reports nothing
RECORDED_SUM = 8429089016513698242  # of `header(100)`, by the release without kinds of checksums


def end(host: str, device: str = "") -> LinkEnd:
    return LinkEnd(host=host, device=device, max_frame_bytes=MAX_DEVICE_FRAME_BYTES)


@pytest.mark.parametrize(
    ("sender", "receiver", "is_local", "place", "frame_bytes", "num_copies"),
    [
        (end("a"), end("a"), True, "same host", FRAME_BYTES, 4),
        (end("a"), end("b"), False, "other host", FRAME_BYTES, 5),
        (end("a"), end("a"), False, "same host", FRAME_BYTES, 5),  # no common folder
        (end("a", "GPU-1"), end("a", "GPU-1"), True, "same GPU", DEVICE_FRAME_BYTES, 5),
        (end("a", "GPU-1"), end("a", "GPU-2"), True, "peer GPUs", DEVICE_FRAME_BYTES, 5),
        (end("a", "GPU-1"), end("b", "GPU-1"), False, "other host", DEVICE_FRAME_BYTES, 6),
        (end("a"), end("a", "GPU-2"), True, "same host", DEVICE_FRAME_BYTES, 4),
        (OLD, OLD, False, "other host", FRAME_BYTES, 5),
        (OLD, end("a", "GPU-2"), True, "same host", MAX_FRAME_BYTES, 4),
        (end("a", "GPU-1"), OLD, False, "other host", MAX_FRAME_BYTES, 6),
    ],
)
def test_plan_follows_from_both_ends(
    sender: LinkEnd,
    receiver: LinkEnd,
    is_local: bool,
    place: str,
    frame_bytes: int,
    num_copies: int,
) -> None:
    plan = plan_push(sender, receiver, is_local=is_local)
    assert (plan.port, plan.place) == ("memfd" if is_local else "tcp", place)
    assert plan.frame_bytes == frame_bytes <= max_frame_bytes(sender, receiver)
    assert len(plan.copies) == num_copies


def test_time_is_that_of_the_slower_end_and_of_the_wire() -> None:
    near = plan_push(end("a"), end("a"), is_local=True)
    far = plan_push(end("a"), end("b"), is_local=False)
    slow = plan_push(end("a"), end("b"), is_local=False, wire_bytes_per_s=125e6)
    assert near.seconds(1 << 30) < far.seconds(1 << 30) < slow.seconds(1 << 30)
    assert slow.seconds(125e6) == pytest.approx(1.0)
    # the wire does not slow down what does not go over it
    assert plan_push(end("a"), end("a"), is_local=True, wire_bytes_per_s=1.0) == near


async def test_both_ends_of_a_link_have_one_plan_which_learns_from_pushes(
    server: KvServer, dialer: Dialer, address: DataPlaneAddress
) -> None:
    server.expect(b"placement-a", RecordingSink())
    link = await dialer.link(address)
    port = "memfd" if address.unix_path else "tcp"
    if address.port == 1:
        port = "memfd"
    assert (link.plan.port, link.plan.place) == (port, "same host")
    assert kv_links(dialer.plans) == (KvLinks(port, "same host", 1),)
    await link.send(header(3), fill_with(b"abc"))
    link.observe(1 << 30, 0.5)
    assert link.plan.seconds(1 << 30) == pytest.approx(0.5)
    link.observe(100, 9.0)  # tells nothing of the rate
    assert link.plan.seconds(1 << 30) == pytest.approx(0.5)
    link.observe(1 << 30, 1.0)
    assert 0.5 < link.plan.seconds(1 << 30) < 1.0
    await link.close()
    assert dialer.plans == []


# ── the previous release ─────────────────────────────────────────────────────────────────────────


class OldHello(msgspec.Struct, frozen=True, tag="Hello"):
    """As the previous release reads and writes it."""

    instance_id: bytes
    key_id: bytes = b""
    nonce: bytes = b""
    ciphers: tuple[str, ...] = ()
    region: str = ""


def test_hello_and_welcome_of_the_previous_release_are_read_and_it_reads_ours() -> None:
    ours = Hello(INSTANCE, end=end("a", "GPU-1"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=OldHello).region == ""
    theirs = frames.decode_record(msgspec.msgpack.encode(OldHello(INSTANCE)))
    assert isinstance(theirs, Hello) and theirs.end == OLD
    body = {"type": "Welcome", "instance_id": INSTANCE, "num_slots": 4, "slot_bytes": 8 << 20}
    welcome = frames.decode_record(msgspec.msgpack.encode(body))
    assert isinstance(welcome, Welcome) and (welcome.frame_bytes, welcome.end) == (0, OLD)


def test_sum_and_bytes_of_a_frame_are_those_of_the_previous_release() -> None:
    """It computes the sum over its own encoding of the header, which has no kind of checksum."""
    ours = header(100)
    fields = msgspec.to_builtins(ours, builtin_types=(bytes,))
    assert "checksum_kind" not in fields and list(fields)[-1] == "numerics"
    assert sealed_sum(ours, 77) == RECORDED_SUM
    with_kind = msgspec.structs.replace(ours, checksum_kind="xxh3-64")
    assert sealed_sum(with_kind, 77) != RECORDED_SUM  # a header is not altered unseen
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(with_kind), type=type(ours)) == with_kind


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(msgspec.UNSET, None), ("xxh3-64", None), ("sum-of-gpu", "'sum-of-gpu' is none of xxh3-64")],
)
def test_frame_with_an_unknown_kind_of_checksum_is_rejected(kind: Any, fault: str | None) -> None:
    found = fault_of(msgspec.structs.replace(header(100), checksum_kind=kind))
    assert (found is None) is (fault is None) and (fault or "") in (found or "")
    assert frames.fault_of_frame(Frame(0, header(9 << 20)), 16 << 20) is None
    assert "payload" in (frames.fault_of_frame(Frame(0, header(9 << 20))) or "")
