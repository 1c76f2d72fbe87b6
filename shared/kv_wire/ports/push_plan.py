"""Plans how KV is pushed over a link, from what both ends report at its opening. Pure.

    place                             port     copies of each byte, sender | receiver
    same GPU, peer GPUs, same host    memfd    gather, to host | copy, to device, scatter
    other host                        tcp      gather, to host, send | receive, to device, scatter
                                      nixl     gather, to host | read, to device, scatter

An end without a device has no `to host`; instead of `to device` it copies within the host
(`stage`). A host whose unix socket cannot be opened is reached over TCP, too. NIXL is chosen where
both ends have it and the link is not sealed, as it does not encrypt.

Both ends work at the same time, so a push takes the time of the slower one. The rates are those of
benchmarks/kv_transfer.py on two cores, 55 GB/s of a PCIe 5 bus and a tenth of an H100's memory:
first guesses, which each link replaces by what its pushes took.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from shared.kv_wire.link import (
    DEVICE_FRAME_BYTES,
    FRAME_BYTES,
    MAX_DEVICE_FRAME_BYTES,
    MAX_FRAME_BYTES,
    LinkEnd,
    Place,
    PortName,
    PushPlan,
)
from shared.messages import KvLinks

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Bytes a second of each kind of copy
RATES = {
    "gather": 16e9,
    "copy": 16e9,
    "stage": 16e9,
    "scatter": 16e9,
    "to host": 55e9,
    "to device": 55e9,
    "gather on the device": 3e11,
    "scatter on the device": 3e11,
    "send": 4.2e9,
    "receive": 4.2e9,
    "read": 10e9,
}
PORT_COPIES: dict[PortName, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "memfd": ((), ("copy",)),
    "tcp": (("send",), ("receive",)),
    "nixl": ((), ("read",)),
}
MAX_KINDS = 16  # of links in a heartbeat
WIRE_COPIES = frozenset({"send", "receive", "read"})


@cache
def this_host() -> str:
    """Returns what is equal in all processes on this kernel, also in containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def link_end(device: str = "", ports: tuple[str, ...] = ()) -> LinkEnd:
    """Returns an end in this process, whose KV is on a device or in memory of the host."""
    return LinkEnd(
        host=this_host(), device=device, max_frame_bytes=MAX_DEVICE_FRAME_BYTES, ports=ports
    )


def plan_push(
    sender: LinkEnd,
    receiver: LinkEnd,
    *,
    is_local: bool,
    is_sealed: bool = False,
    refused: str = "",
    wire_bytes_per_s: float | None = None,
) -> PushPlan:
    """Returns the plan of a link. `is_local`: it is over a unix socket, through which the receiver
    passes its memory. `refused` is a port that has failed on this link. `wire_bytes_per_s` limits a
    link between hosts; None: not known.
    """
    port: PortName = "memfd" if is_local else "tcp"
    has_nixl = "nixl" in sender.ports and "nixl" in receiver.ports
    if has_nixl and not is_local and not is_sealed and refused != "nixl":
        port = "nixl"
    place = _place(sender, receiver, is_local=is_local)
    sent, received = PORT_COPIES[port]
    by_sender = ("gather on the device", "to host") if sender.device else ("gather",)
    by_receiver = ("stage", "scatter")
    if receiver.device:
        by_receiver = ("to device", "scatter on the device")
    sender_copies, receiver_copies = (*by_sender, *sent), (*received, *by_receiver)
    ends = (_rate(copies, wire_bytes_per_s) for copies in (sender_copies, receiver_copies))
    return PushPlan(
        port=port,
        place=place,
        frame_bytes=_frame_bytes(sender, receiver),
        copies=(*sender_copies, *receiver_copies),
        bytes_per_s=min(ends),
        refused=refused,
    )


def max_frame_bytes(sender: LinkEnd, receiver: LinkEnd) -> int:
    """Returns the largest frame of the link: more than in every release where a device is at an
    end, if both ends take more.
    """
    if not (sender.device or receiver.device):
        return MAX_FRAME_BYTES
    known = min(sender.max_frame_bytes, receiver.max_frame_bytes)
    return max(MAX_FRAME_BYTES, min(known, DEVICE_FRAME_BYTES))


def kv_links(plans: Iterable[PushPlan]) -> tuple[KvLinks, ...]:
    """Counts the links of each port and place, the most frequent first."""
    counts = Counter((each.port, each.place, each.refused) for each in plans)
    return tuple(
        KvLinks(port, place, count, refused)
        for (port, place, refused), count in counts.most_common(MAX_KINDS)
    )


def _frame_bytes(sender: LinkEnd, receiver: LinkEnd) -> int:
    if not (sender.device or receiver.device):
        return FRAME_BYTES
    return max_frame_bytes(sender, receiver)


def _place(sender: LinkEnd, receiver: LinkEnd, *, is_local: bool) -> Place:
    if not is_local and not (sender.host and sender.host == receiver.host):
        return "other host"
    if not (sender.device and receiver.device):
        return "same host"
    return "same GPU" if sender.device == receiver.device else "peer GPUs"


def _rate(copies: tuple[str, ...], wire_bytes_per_s: float | None) -> float:
    """Returns the bytes a second of an end that makes these copies one after the other."""
    rate = 1 / sum(1 / RATES[each] for each in copies)
    if wire_bytes_per_s is None or WIRE_COPIES.isdisjoint(copies):
        return rate
    return min(rate, wire_bytes_per_s)
