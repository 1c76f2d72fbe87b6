"""Health is progress: who is alive, judged from heartbeats, without I/O.

A peer is suspect when its heartbeats stop, or when they go on but its engine makes no step beyond
the budget it announced (it answers, but it is wedged). One that is late is asked: if the server
says that nobody has its name, its connection has ended, and its silence need not be waited for.

A watcher judges only while it can trust itself: its own heartbeat comes back from the server and
its own loop does not lag. When everybody falls silent at once, it is the bus or the watcher, and
nobody is suspected; nor for SILENCE_LIMIT_S after, for others need longer to be back than it does.

    peer:    unknown ──heartbeat──▶ live ──silent, gone or no step──▶ suspect ──heartbeat, step─┐
                                     │ ▲────────────────────────────────────────────────────────┘
                                     └─stopped──▶ forgotten
    restart: a new epoch is a new peer; the old one is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf

from shared.messages import Heartbeat, Role

HEARTBEAT_INTERVAL_S = 0.25
LATE_S = 0.3  # since the last heartbeat: time to ask
MAX_ECHO_GAP_S = 0.5  # beyond it the bus was away
SILENCE_LIMIT_S = 1.0  # four missed heartbeats
MAX_LOOP_LAG_S = 0.2
TICK_S = 0.1
FORGET_AFTER_S = 60.0
MAX_PEERS = 8192  # what is beyond waits until others are forgotten


class Loss(Enum):
    SILENT = "silent"
    GONE = "gone"
    STUCK = "stuck"
    RESTARTED = "restarted"
    STOPPED = "stopped"


@dataclass(slots=True)
class Peer:
    heartbeat: Heartbeat
    last_heartbeat_at: float
    progressed_at: float
    is_suspect: bool = False


class Fleet:
    """What one process believes of all others."""

    def __init__(self, own_process_id: str) -> None:
        self._own_process_id = own_process_id
        self._peers: dict[str, Peer] = {}
        self._last_echo_at = -inf
        self._last_tick_at = inf
        self._sound_since = inf  # the bus and this process's loop, without a break

    def observe(self, heartbeat: Heartbeat, now: float) -> Loss | None:
        """Takes in a heartbeat; tells if it means that the process as known before is lost."""
        if heartbeat.process_id == self._own_process_id:
            self._on_echo(now)
            return None
        known = self._peers.get(heartbeat.process_id)
        if known is not None and _is_stale(heartbeat, known.heartbeat):
            return None
        if heartbeat.state == "stopped":
            return Loss.STOPPED if self._peers.pop(heartbeat.process_id, None) else None
        if known is None and len(self._peers) >= MAX_PEERS:
            return None
        self._peers[heartbeat.process_id] = self._updated(known, heartbeat, now)
        if known is not None and known.heartbeat.epoch != heartbeat.epoch:
            return Loss.RESTARTED
        return None

    def tick(self, now: float) -> list[tuple[str, Loss]]:
        """Call every TICK_S. Returns the peers that became suspect since the last call."""
        if now - self._last_tick_at > TICK_S + MAX_LOOP_LAG_S:
            self._sound_since = now
        self._last_tick_at = now
        if not self.can_judge(now):
            return []
        lost = []
        for process_id, peer in list(self._peers.items()):
            loss = _loss_of(peer, now)
            if loss is not None and not peer.is_suspect:
                peer.is_suspect = True
                lost.append((process_id, loss))
            if now - peer.last_heartbeat_at > FORGET_AFTER_S:
                del self._peers[process_id]
        return lost

    def late(self, now: float) -> list[Heartbeat]:
        """The last heartbeats of the peers to ask whether they are still there."""
        if not self.can_judge(now):
            return []
        return [
            peer.heartbeat
            for peer in self._peers.values()
            if not peer.is_suspect and now - peer.last_heartbeat_at > LATE_S
        ]

    def bus_was_away(self, now: float) -> None:
        """If only for a moment: others may still be on their way back."""
        self._sound_since = now

    def gone(self, last: Heartbeat, now: float) -> Loss | None:
        """Nobody answered to the name of `last`'s sender, which may have spoken meanwhile."""
        peer = self._peers.get(last.process_id)
        is_old = peer is None or peer.heartbeat is not last
        if peer is None or is_old or peer.is_suspect or not self.can_judge(now):
            return None
        peer.is_suspect = True
        return Loss.GONE

    def can_judge(self, now: float) -> bool:
        """Whether the silence of others means something: this side has heard well for a while."""
        is_bus_there = now - self._last_echo_at <= MAX_ECHO_GAP_S
        return is_bus_there and now - self._sound_since >= SILENCE_LIMIT_S

    def live(self, role: Role) -> Iterator[Heartbeat]:
        """Processes of a role that take new work."""
        for peer in self._peers.values():
            takes_work = not peer.is_suspect and peer.heartbeat.state == "ready"
            if takes_work and role in peer.heartbeat.roles:
                yield peer.heartbeat

    def everyone(self) -> Iterator[Heartbeat]:
        """The last heartbeat of each that is not forgotten."""
        return (peer.heartbeat for peer in self._peers.values())

    def is_live(self, process_id: str) -> bool:
        """Known and not suspect; it may be draining."""
        peer = self._peers.get(process_id)
        return peer is not None and not peer.is_suspect

    def is_lost(self, process_id: str) -> bool:
        """Suspect. One never heard of is not: it may just have started."""
        peer = self._peers.get(process_id)
        return peer is not None and peer.is_suspect

    def heartbeat_of(self, process_id: str) -> Heartbeat | None:
        peer = self._peers.get(process_id)
        return None if peer is None else peer.heartbeat

    def _on_echo(self, now: float) -> None:
        if now - self._last_echo_at > MAX_ECHO_GAP_S:
            self.bus_was_away(now)
        self._last_echo_at = now

    @staticmethod
    def _updated(known: Peer | None, heartbeat: Heartbeat, now: float) -> Peer:
        if known is None or _has_moved(known.heartbeat, heartbeat):
            return Peer(heartbeat, last_heartbeat_at=now, progressed_at=now)
        return Peer(heartbeat, now, known.progressed_at, is_suspect=known.is_suspect)


def _is_stale(heartbeat: Heartbeat, known: Heartbeat) -> bool:
    same_epoch = heartbeat.epoch == known.epoch
    return same_epoch and heartbeat.sequence_number <= known.sequence_number


def _has_moved(known: Heartbeat, heartbeat: Heartbeat) -> bool:
    """Where there is no engine, to be heard is all the progress there is."""
    if heartbeat.load is None or known.load is None or known.epoch != heartbeat.epoch:
        return True
    return known.load.step != heartbeat.load.step


def _loss_of(peer: Peer, now: float) -> Loss | None:
    if now - peer.last_heartbeat_at > SILENCE_LIMIT_S:
        return Loss.SILENT
    load = peer.heartbeat.load
    if load is not None and now - peer.progressed_at > load.step_budget_s + SILENCE_LIMIT_S:
        return Loss.STUCK
    return None
