"""Determines which peers are alive, from the progress in their heartbeats. No I/O.

A peer is suspect when its heartbeats stop, or when they continue but its engine makes no step
within the budget it announced (the process responds, but its engine hangs). A peer with a late
heartbeat gets a request: if the server reports no responder, the peer's connection has ended and
it is suspect before the silence limit.

A process judges peers only while its own state is sound: it receives its own heartbeat from the
server, and its event loop does not lag. If all peers are silent at once, the cause is the bus or
this process, and no peer is suspected, nor for SILENCE_LIMIT_S afterwards: others may take longer
to reconnect.

    peer:    unknown ──heartbeat──▶ live ──silent, gone or no step──▶ suspect ──heartbeat, step─┐
                                     │ ▲────────────────────────────────────────────────────────┘
                                     └─stopped──▶ forgotten
    restart: a new epoch is a new peer; the old one is lost.
    doubled: a replaced epoch comes back, so two processes have one id. It is lost once, and takes
             no work until one epoch is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from shared.messages import Heartbeat, Role
from shared.subjects import is_at_site

HEARTBEAT_INTERVAL_S = 0.25
SITE_INTERVAL_S = 1.0  # what a site sends to others
LATE_S = 0.3  # time since the last heartbeat, before the peer gets a request
MAX_ECHO_GAP_S = 0.5  # a longer gap means that the bus was disconnected
SILENCE_LIMIT_S = 1.0  # four missed heartbeats
# A process that loads a model imports for seconds, and the server may drop its connection meanwhile
START_LATE_S = 5.0
START_SILENCE_LIMIT_S = 20.0
MAX_LOOP_LAG_S = 0.2
TICK_S = 0.1
FORGET_AFTER_S = 60.0
# The younger of two processes with one id leaves before SILENCE_LIMIT_S loses the other
LEFT_AFTER_S = 0.75
MIN_RETURNS = 2  # heartbeats of a replaced epoch before its process counts as alive
MAX_REPLACED = 8  # epochs remembered for a peer
MAX_PEERS = 8192  # further peers are ignored until others are forgotten
MAX_WITH_SITES = MAX_PEERS // 2  # with so many peers, further ones of other sites are ignored


class Loss(Enum):
    UNRESPONSIVE = "silent"
    DISCONNECTED = "gone"
    STUCK = "stuck"
    RESTARTED = "restarted"
    STOPPED = "stopped"
    DOUBLED = "doubled"


@dataclass(slots=True)
class _ReplacedEpoch:
    """An epoch of a peer's id before its current one. One late heartbeat of it means nothing."""

    sequence_number: int
    num_returns: int = 0
    returned_at: float = -inf

    def is_alive(self, now: float) -> bool:
        return self.num_returns >= MIN_RETURNS and now - self.returned_at <= SILENCE_LIMIT_S


@dataclass(slots=True)
class Peer:
    heartbeat: Heartbeat
    last_heartbeat_at: float
    progressed_at: float
    is_suspect: bool = False
    is_doubled: bool = False
    replaced: dict[int, _ReplacedEpoch] = field(default_factory=dict)  # key: epoch

    def update(self, heartbeat: Heartbeat, now: float) -> None:
        """Takes the next heartbeat of the same epoch."""
        if _has_moved(self.heartbeat, heartbeat):
            self.progressed_at, self.is_suspect = now, False
        self.heartbeat, self.last_heartbeat_at = heartbeat, now

    @property
    def late_s(self) -> float:
        return LATE_S * self._slowness if self.heartbeat.starting is None else START_LATE_S

    @property
    def silence_limit_s(self) -> float:
        if self.heartbeat.starting is not None:
            return START_SILENCE_LIMIT_S
        return SILENCE_LIMIT_S * self._slowness

    @property
    def _slowness(self) -> float:
        """The interval of this peer's heartbeats, over that of a process of this site."""
        interval_s = self.heartbeat.interval_s
        if interval_s <= HEARTBEAT_INTERVAL_S:
            return 1.0
        return min(interval_s, SITE_INTERVAL_S) / HEARTBEAT_INTERVAL_S


class Fleet:
    """The state of all peers, as one process sees it."""

    def __init__(self, own_process_id: str, own_epoch: int | None = None) -> None:
        """Watches peers. Heartbeats of the own id with an epoch other than `own_epoch` are no
        echoes.
        """
        self.own_process_id = own_process_id
        self._own_epoch = own_epoch
        self._peers: dict[str, Peer] = {}
        self._last_echo_at = -inf
        self._last_tick_at = inf
        self._sound_since = inf  # time since which bus and event loop have worked without a gap

    def observe(self, heartbeat: Heartbeat, now: float) -> Loss | None:
        """Records a heartbeat. Returns a Loss if its process has stopped or restarted."""
        if heartbeat.process_id == self.own_process_id:
            if self._own_epoch in (None, heartbeat.epoch):
                self._on_echo(now)
            return None
        known = self._peers.get(heartbeat.process_id)
        if known is not None and _is_stale(heartbeat, known.heartbeat):
            return None
        if known is not None and heartbeat.epoch in known.replaced:
            return self._on_replaced_epoch(known, heartbeat, now)
        if known is not None and heartbeat.state == "stopped" and _is_other(heartbeat, known):
            return None
        if heartbeat.state == "stopped":
            return Loss.STOPPED if self._peers.pop(heartbeat.process_id, None) else None
        most = MAX_WITH_SITES if is_at_site(heartbeat.process_id) else MAX_PEERS
        if known is None and len(self._peers) >= most:
            return None
        if known is None:
            self._peers[heartbeat.process_id] = Peer(heartbeat, now, now)
            return None
        if _is_other(heartbeat, known):
            self._peers[heartbeat.process_id] = restarted_peer(known, heartbeat, now)
            return Loss.RESTARTED
        known.update(heartbeat, now)
        return None

    def _on_replaced_epoch(self, peer: Peer, heartbeat: Heartbeat, now: float) -> Loss | None:
        """The process with this epoch was taken for gone, or for restarted with a new epoch."""
        epoch = peer.replaced[heartbeat.epoch]
        if heartbeat.state == "stopped":
            epoch.num_returns = 0
            return None
        if heartbeat.sequence_number <= epoch.sequence_number:
            return None
        epoch.sequence_number = heartbeat.sequence_number
        epoch.num_returns, epoch.returned_at = epoch.num_returns + 1, now
        if now - peer.last_heartbeat_at > LEFT_AFTER_S:  # the other one has left
            del peer.replaced[heartbeat.epoch]
            self._peers[heartbeat.process_id] = Peer(
                heartbeat, now, now, is_doubled=peer.is_doubled, replaced=peer.replaced
            )
            return None
        if peer.is_doubled or not epoch.is_alive(now):
            return None
        peer.is_doubled = True
        return Loss.DOUBLED

    def tick(self, now: float) -> list[tuple[str, Loss]]:
        """Returns the peers that became suspect since the last call. Must be called every
        TICK_S.
        """
        if now - self._last_tick_at > TICK_S + MAX_LOOP_LAG_S:
            self._sound_since = now
        self._last_tick_at = now
        if not self.can_judge(now):
            return []
        lost = []
        for process_id, peer in list(self._peers.items()):
            if peer.is_doubled:
                peer.is_doubled = any(each.is_alive(now) for each in peer.replaced.values())
            loss = _loss_of(peer, now)
            if loss is not None and not peer.is_suspect:
                peer.is_suspect = True
                lost.append((process_id, loss))
            if now - peer.last_heartbeat_at > FORGET_AFTER_S:
                del self._peers[process_id]
        return lost

    def late(self, now: float) -> list[Heartbeat]:
        """Returns the last heartbeats of the peers that should get a ReportAlive request."""
        if not self.can_judge(now):
            return []
        return [
            peer.heartbeat
            for peer in self._peers.values()
            if not peer.is_suspect and now - peer.last_heartbeat_at > peer.late_s
        ]

    def bus_was_away(self, now: float) -> None:
        """Suspends judgement for SILENCE_LIMIT_S, since other peers may still be reconnecting."""
        self._sound_since = now

    def mark_disconnected(self, last: Heartbeat, now: float) -> Loss | None:
        """Marks the sender of `last` suspect after a request to it had no responder.

        Returns None if the peer has sent a newer heartbeat since `last`.
        """
        peer = self._peers.get(last.process_id)
        is_old = peer is None or peer.heartbeat is not last
        if peer is None or is_old or peer.is_suspect or not self.can_judge(now):
            return None
        peer.is_suspect = True
        return Loss.DISCONNECTED

    def can_judge(self, now: float) -> bool:
        """Whether the silence of a peer is meaningful: bus and loop have been sound long enough."""
        is_bus_there = now - self._last_echo_at <= MAX_ECHO_GAP_S
        return is_bus_there and now - self._sound_since >= SILENCE_LIMIT_S

    def live(self, role: Role) -> Iterator[Heartbeat]:
        """Returns the last heartbeats of the processes of a role that accept new work."""
        for peer in self._peers.values():
            is_sound = not peer.is_suspect and not peer.is_doubled
            takes_work = is_sound and peer.heartbeat.state == "ready"
            if takes_work and role in peer.heartbeat.roles:
                yield peer.heartbeat

    def everyone(self) -> Iterator[Heartbeat]:
        """Returns the last heartbeats of all peers that are not forgotten."""
        return (peer.heartbeat for peer in list(self._peers.values()))

    def is_live(self, process_id: str) -> bool:
        """Whether the process is known and not suspect; it may be draining."""
        peer = self._peers.get(process_id)
        return peer is not None and not peer.is_suspect

    def is_contested(self, heartbeat: Heartbeat) -> bool:
        """Whether another process with the same id is known, so `heartbeat` describes neither."""
        peer = self._peers.get(heartbeat.process_id)
        return peer is not None and (peer.is_doubled or _is_other(heartbeat, peer))

    def is_lost(self, process_id: str) -> bool:
        """Whether the process is suspect. An unknown process is not lost: it may have just
        started.
        """
        peer = self._peers.get(process_id)
        return peer is not None and peer.is_suspect

    def heartbeat_of(self, process_id: str) -> Heartbeat | None:
        peer = self._peers.get(process_id)
        return None if peer is None else peer.heartbeat

    def _on_echo(self, now: float) -> None:
        if now - self._last_echo_at > MAX_ECHO_GAP_S:
            self.bus_was_away(now)
        self._last_echo_at = now


def restarted_peer(known: Peer, heartbeat: Heartbeat, now: float) -> Peer:
    """Returns the peer after a heartbeat of another epoch."""
    last = _ReplacedEpoch(known.heartbeat.sequence_number)
    replaced = {**known.replaced, known.heartbeat.epoch: last}
    newest = dict(list(replaced.items())[-MAX_REPLACED:])
    return Peer(heartbeat, now, now, is_doubled=known.is_doubled, replaced=newest)


def _is_stale(heartbeat: Heartbeat, known: Heartbeat) -> bool:
    same_epoch = heartbeat.epoch == known.epoch
    return same_epoch and heartbeat.sequence_number <= known.sequence_number


def _is_other(heartbeat: Heartbeat, peer: Peer) -> bool:
    return heartbeat.epoch != peer.heartbeat.epoch


def _has_moved(known: Heartbeat, heartbeat: Heartbeat) -> bool:
    """Whether the engine has progressed; without an engine, or before it is ready, every heartbeat
    counts as progress.
    """
    if heartbeat.load is None or known.load is None or known.state == "starting":
        return True
    return known.load.step != heartbeat.load.step


def _loss_of(peer: Peer, now: float) -> Loss | None:
    if now - peer.last_heartbeat_at > peer.silence_limit_s:
        return Loss.UNRESPONSIVE
    load = peer.heartbeat.load
    if load is not None and now - peer.progressed_at > load.step_budget_s + SILENCE_LIMIT_S:
        return Loss.STUCK
    return None
