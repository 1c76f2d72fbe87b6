"""A group whose last ranks are on another host: two process groups of this machine on loopback."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import msgspec
import pytest

from shared.engine.parallel.mesh import LocalMesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.frames import FrameSocket, SocketReader, SocketWriter
from shared.engine.parallel.processes.group import RankGroup
from shared.engine.parallel.processes.handshake import shake_hands
from shared.engine.parallel.processes.host_ranks import HostRanks
from shared.engine.parallel.processes.join import HostConnections, HostListener, open_connections
from shared.engine.parallel.processes.rank_messages import (
    RankAlive,
    RankIdentity,
    Ready,
    ToLeader,
    encode,
)
from shared.engine.parallel.processes.records import Record, StepGap
from shared.engine.parallel.processes.remote_rank import RemoteHandle
from shared.engine.parallel.processes.ring import RingWriter
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.engine.parallel.transport.collectives import serve_store
from tests.shared.engine.parallel.processes.mlp import Mlp
from tests.shared.engine.parallel.processes.test_group import (
    BUDGET_S,
    ECHO,
    MLP,
    WAIT_S,
    descriptors_return_to_before,
    ends_within,
    plan,
    spec,
)

Other = subprocess.Popen


@contextmanager
def two_hosts(
    shape: MeshShape, entry: str = ECHO, limit_s: float = 30.0, **config: object
) -> Iterator[tuple]:
    """A group with its last ranks on another host, half of them, and that host's process."""
    num_ranks = shape.num_ranks // 2
    listener = HostListener("127.0.0.1", shape, num_ranks)
    assigned = listener.assign("other", num_ranks)
    numbers = map(str, (assigned.ranks.start, num_ranks, shape.tp, shape.pp))
    module = "tests.shared.engine.parallel.processes.other_host"
    address = ("127.0.0.1", str(listener.port), assigned.key.hex(), "other")
    command = [sys.executable, "-m", module, *address, *numbers]
    store, port = serve_store("127.0.0.1") if entry == MLP else (None, 0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            remote = replace(
                spec(shape.num_ranks, shape.pp, entry, **config),
                limit_s=limit_s,
                transport="hosts",
                remote=tuple(listener.accept(WAIT_S)),
                rendezvous=f"store://127.0.0.1:{port}/key",
                address="127.0.0.1",
                silent_s=1.0,
            )
            listener.close()
            with RankGroup.start(remote) as group:
                yield group, other
        except GroupLost as error:
            error.add_note(other.communicate(timeout=WAIT_S)[0])
            raise
        finally:
            listener.close()
            other.send_signal(signal.SIGCONT)
            del store
        assert other.wait(WAIT_S) == 0


def ranks_of(other: Other) -> list[int]:
    with open(f"/proc/{other.pid}/task/{other.pid}/children") as children:  # noqa: PTH123
        return [int(pid) for pid in children.read().split()]


def test_answers_come_in_order_from_another_host() -> None:
    with descriptors_return_to_before(), two_hosts(MeshShape(2, 2)) as (group, other):
        steps = [group.submit(plan(text=f"t{i}"), BUDGET_S) for i in range(50)]
        group.submit(plan(text="a" * 9_000_000), BUDGET_S)  # more than rings hold
        answers = [group.take(WAIT_S) for _ in steps]
        assert answers == [Record(i, f"2:{i}:t{i}".encode()) for i in range(50)]
        assert group.take(WAIT_S) == Record(50, b"2:50:" + b"a" * 9_000_000)
        pids = ranks_of(other)
        assert len(pids) == len(group.pids) == 2
    assert ends_within(pids, 1.0)


@pytest.mark.long
def test_model_across_hosts_has_the_bits_of_one_process() -> None:
    """Tensor parallelism over four ranks, two on each host: sums cross the hosts."""
    expected = [Mlp(LocalMesh()).run(rows, step) for step, rows in enumerate((1, 33))]
    with two_hosts(MeshShape(4), MLP) as (group, _):
        for rows in (1, 33):
            group.submit(msgspec.json.encode(("hosts", rows)), BUDGET_S)
        answers = [group.take(WAIT_S) for _ in expected]
    assert [answer and answer.data for answer in answers] == expected


def test_killed_rank_of_another_host_ends_the_group() -> None:
    with two_hosts(MeshShape(1, 2)) as (group, other):
        started = time.monotonic()
        os.kill(ranks_of(other)[0], signal.SIGKILL)
        with pytest.raises(GroupLost, match="rank 1 failed: it ended: SIGKILL"):
            group.take(WAIT_S)
        assert ends_within(group.pids, 1.0 - (time.monotonic() - started))
        assert "rank 1: it ended: SIGKILL" in other.communicate(timeout=WAIT_S)[0]


def test_lost_connection_ends_the_group_on_both_hosts() -> None:
    with two_hosts(MeshShape(1, 2)) as (group, other):
        pids = ranks_of(other)
        group._remote[0].steps.shutdown(socket.SHUT_RDWR)
        with pytest.raises(GroupLost, match=r"connection to other is lost|answers .* are lost"):
            group.take(WAIT_S)
        assert ends_within([*pids, *group.pids], 1.0)
        assert "the leader has ended the group" in other.communicate(timeout=WAIT_S)[0]


def test_step_that_does_not_fit_into_the_ring_of_another_host_ends_the_group() -> None:
    """With the leader's limit, and the cause is named although no other step follows."""
    with two_hosts(MeshShape(1, 2), limit_s=0.5) as (group, _):
        group.submit(plan(hanging_rank=1), BUDGET_S)
        group.submit(plan(text="a" * 5_000_000), BUDGET_S)
        line = r"rank 1 failed: steps do not reach it: reader 0 of .* no slot for 0\.5 s"
        with pytest.raises(GroupLost, match=line):
            group.take(WAIT_S)


def test_frozen_rank_of_another_host_ends_the_group() -> None:
    with two_hosts(MeshShape(1, 2)) as (group, other):
        os.kill(ranks_of(other)[0], signal.SIGSTOP)
        with pytest.raises(GroupLost, match="rank 1 failed: rank 1 is stopped"):
            group.take(WAIT_S)


def test_frozen_host_ends_the_group_without_a_step() -> None:
    with two_hosts(MeshShape(1, 2)) as (group, other):
        os.kill(other.pid, signal.SIGSTOP)
        with pytest.raises(GroupLost, match="rank 1 is stopped"):
            group.take(WAIT_S)


def test_rank_that_differs_is_named_on_both_hosts() -> None:
    line = "rank 1 has weights digest 'other', another rank has 'digest'"
    with pytest.raises(GroupLost, match=line) as caught, two_hosts(MeshShape(1, 2), other_rank=1):
        pass
    assert caught.value.__notes__ == [f"{line}\n"]


Connect = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections with small buffers, and returns both ends."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as ends:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def make() -> tuple[socket.socket, socket.socket]:
            ours = ends.enter_context(socket.create_connection(server.getsockname()))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            return ours, ends.enter_context(server.accept()[0])

        yield make


def test_step_that_is_missing_ends_the_reader(connect: Connect) -> None:
    sent, received = (FrameSocket(each, 1.0) for each in connect())
    writer, reader = SocketWriter(sent), SocketReader(received)
    writer.write(Record(0, b"zero"))
    assert reader.take() == Record(0, b"zero")
    writer.write(Record(2, b"two"))
    with pytest.raises(StepGap, match="step 2 came, step 1 was expected"):
        reader.take()


@pytest.mark.parametrize("num_bytes", [0, 900, 10_000, 60_000, 250_000])
def test_record_that_has_room_is_sent_without_waiting(connect: Connect, num_bytes: int) -> None:
    """The other end takes nothing, so a send that waits raises."""
    writer, num_sent = SocketWriter(FrameSocket(connect()[0], 0.2)), 0
    while writer.has_room(record := Record(num_sent, bytes(num_bytes))):
        writer.write(record)
        num_sent += 1
    assert (num_sent > 0) is (num_bytes <= 10_000)


def test_rank_may_become_ready_right_after_its_host_said_that_it_is_alive(
    connect: Connect,
) -> None:
    """The leader has just found nothing else when the message comes."""
    theirs, ours = connect()
    peer, ready = FrameSocket(theirs, 1.0), Ready(RankIdentity("a", "b", "c", "d"))

    class Rank(RemoteHandle):
        def receive(self) -> ToLeader | None:
            found = super().receive()
            if found is None:
                peer.send(encode(ready))
            return found

    handle = Rank(1, "other", ours, limit_s=1.0, silent_s=WAIT_S)
    peer.send(encode(RankAlive()))
    assert select.select([ours], [], [], WAIT_S)[0]
    shake_hands([handle], WAIT_S, lambda phase: None)


def test_host_does_not_wait_until_the_leader_takes_an_answer(connect: Connect) -> None:
    """It has to report its ranks meanwhile: the leader ends a group whose host says nothing."""
    ours, theirs = zip(connect(), connect(), strict=True)
    sockets = dict(zip([("steps", 1), ("control", 1)], ours, strict=True))
    host = HostRanks(HostConnections("other", range(1, 2), sockets), MeshShape(1, 2), lambda x: x)
    answers, answer = RingWriter(host._files.answers, 1.0), Record(0, bytes(250_000))
    answers.write(answer)
    for _ in range(2):
        host._alive_at = 0.0
        host._relay()
    steps, control = (FrameSocket(each, 1.0) for each in theirs)
    assert [control.receive(WAIT_S) for _ in range(2)] == [encode(RankAlive())] * 2
    reader = SocketReader(steps)
    while (taken := reader.take()) is None:
        assert select.select([steps], [], [], WAIT_S)[0]
    assert taken == answer
    steps.shutdown()
    with pytest.raises(GroupLost, match="the leader has ended the group"):
        host.run()
    answers.close()


def opened(
    listener: HostListener, host: HostConnections, key: bytes | None = None
) -> HostConnections:
    """Connects a host as it does after the answer to its request."""
    place = host.name, host.ranks, listener.shape
    return open_connections(("127.0.0.1", listener.port), key or host.key, *place)


def test_ranks_of_a_host_that_does_not_come_are_the_next_ones() -> None:
    """It was stopped after the answer, or the answer did not reach it. It may come yet."""
    listener = HostListener("127.0.0.1", MeshShape(1, 4), 2, join_s=0.0)
    joined = []
    with ThreadPoolExecutor(1) as pool, ExitStack() as ends:
        accepted = pool.submit(listener.accept, WAIT_S)
        ends.callback(listener.close)
        gone = listener.assign("gone", 2)
        assert gone.ranks == range(2, 4)
        for name, ranks in (("one", range(2, 3)), ("two", range(3, 4))):
            assigned = listener.assign(name, 1)
            assert assigned.ranks == ranks
            with pytest.raises(GroupLost, match="this host has lost ranks 2, 3: it opened no"):
                opened(listener, gone)
            joined.append(opened(listener, assigned))
            ends.callback(joined[-1].close)
        hosts = accepted.result(WAIT_S)
        ends.callback(lambda: [each.close() for each in hosts])
        for ours, theirs in zip(hosts, joined, strict=True):
            assert (ours.name, ours.ranks) == (theirs.name, theirs.ranks)
            for role, connection in theirs.sockets.items():
                assert ours.sockets[role].getpeername() == connection.getsockname()


def test_host_without_the_key_does_not_join() -> None:
    listener = HostListener("127.0.0.1", MeshShape(1, 2), 1)
    assigned = listener.assign("other", 1)
    with pytest.raises(ValueError, match="third offers 1 ranks: 0 are missing"):
        listener.assign("third", 1)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, WAIT_S)
        with pytest.raises(GroupLost, match=r"cannot join ranks at .*: it has closed"):
            opened(listener, assigned, b"x" * 32)
        assert not assigned.sockets
        listener.close()
        with pytest.raises(GroupLost, match="other has not opened steps of rank 1"):
            accepted.result(WAIT_S)


def test_rendezvous_listens_on_its_address_alone() -> None:
    store, port = serve_store("127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    del store
