"""A group of rank processes starts alike, answers in order, and ends as one."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shared.engine.parallel.mesh import LocalMesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes import watchdog
from shared.engine.parallel.processes.group import GroupSpec, RankGroup
from shared.engine.parallel.processes.rank_messages import Failed, RankIdentity, difference, encode
from shared.engine.parallel.processes.rank_process import load_entry
from shared.engine.parallel.processes.records import Record
from shared.engine.parallel.processes.watchdog import GroupLost, RankHandle, failure_of
from shared.lifecycle.child_process import ROOT
from tests.shared.engine.parallel.processes.echo import Config, Plan
from tests.shared.engine.parallel.processes.mlp import Mlp
from tests.support.waiting import LIMIT_S, wait_until

ECHO = "tests.shared.engine.parallel.processes.echo:EchoWork"
MLP = "tests.shared.engine.parallel.processes.mlp:MlpWork"
BUDGET_S = LIMIT_S
WAIT_S = 1.5 * LIMIT_S
SOON_S = LIMIT_S / 2  # on a busy machine, too: long before a budget or a wait ends


def spec(num_ranks: int = 2, pp: int = 1, entry: str = ECHO, **config: object) -> GroupSpec:
    encoded = msgspec.json.encode(Config(**config))  # type: ignore[arg-type]
    return GroupSpec(MeshShape(num_ranks // pp, pp), entry, encoded)


def plan(**fields: object) -> bytes:
    return msgspec.json.encode(Plan(**fields))  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    """A zombie is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends_within(pids: list[int], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not any(map(is_alive, pids))


def descriptors() -> set[tuple[str, str]]:
    """The numbers of this process's descriptors, and what each is open on."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            found.add((path.name, str(path.readlink())))
    return found


@contextmanager
def descriptors_return_to_before() -> Iterator[None]:
    """None is left open. Other groups' threads open files of /proc for a moment."""
    gc.disable()  # it would close those that a cycle of objects holds
    before = descriptors()
    try:
        yield
        wait_until(lambda: descriptors() <= before, seen=lambda: descriptors() - before)
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """Two ranks, which tests leave as they find them."""
    with RankGroup.start(spec()) as started:
        yield started


def test_answers_come_in_order_from_the_answering_rank() -> None:
    with descriptors_return_to_before(), RankGroup.start(spec(3, pp=3)) as group:
        steps = [group.submit(plan(text=f"t{i}"), BUDGET_S) for i in range(50)]
        answers = [group.take(WAIT_S) for _ in steps]
        assert answers == [Record(i, f"2:{i}:t{i}".encode()) for i in range(50)]
        assert group.take() is None
        pids = group.pids
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


def test_event_loop_can_watch_for_answers(group: RankGroup) -> None:
    assert group.take() is None
    assert not select.select([group], [], [], 0)[0]
    text = "a" * 200_000  # several slots
    step = group.submit(plan(text=text), BUDGET_S)
    assert select.select([group], [], [], WAIT_S)[0]
    assert group.take(WAIT_S) == Record(step, f"0:{step}:{text}".encode())


def test_plan_and_answer_larger_than_their_rings_pass_while_ranks_are_busy(
    group: RankGroup,
) -> None:
    text = "a" * 9_000_000
    os.kill(group.pids[0], signal.SIGSTOP)
    steps = [group.submit(plan(text=text), BUDGET_S) for _ in range(2)]  # does not wait for ranks
    os.kill(group.pids[0], signal.SIGCONT)
    for step in steps:
        assert group.take(WAIT_S) == Record(step, f"0:{step}:{text}".encode())


def test_model_has_the_same_bits_in_one_process_and_in_a_group() -> None:
    expected = [Mlp(LocalMesh()).run(rows, step) for step, rows in enumerate((1, 33, 1, 33))]
    with RankGroup.start(spec(entry=MLP)) as group:
        for transport, rows in [("shared_memory", 1), ("gloo", 33), ("gloo", 1), ("gloo", 33)]:
            group.submit(msgspec.json.encode((transport, rows)), BUDGET_S)
        answers = [group.take(WAIT_S) for _ in range(4)]
    assert [answer and answer.data for answer in answers] == expected


@pytest.mark.parametrize("is_idle", [True, False])
def test_killed_rank_ends_the_group_at_once(is_idle: bool) -> None:
    with descriptors_return_to_before(), RankGroup.start(spec()) as group:
        if not is_idle:
            group.submit(plan(hanging_rank=0), BUDGET_S)
        started = time.monotonic()
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(GroupLost, match="rank 1 ended: SIGKILL"):
            group.take(WAIT_S)
        assert ends_within(group.pids, SOON_S - (time.monotonic() - started))
        with pytest.raises(GroupLost, match="rank 1 ended: SIGKILL"):
            group.submit(plan(), BUDGET_S)


def test_event_loop_is_woken_by_the_end_of_the_group() -> None:
    with RankGroup.start(spec()) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        assert select.select([group], [], [], SOON_S)[0]
        with pytest.raises(GroupLost):
            group.take()


@pytest.mark.parametrize("is_hanging", [True, False])
def test_frozen_rank_ends_the_group_after_the_budget(is_hanging: bool) -> None:
    with RankGroup.start(spec()) as group:
        if not is_hanging:
            os.kill(group.pids[0], signal.SIGSTOP)
        started = time.monotonic()
        group.submit(plan(hanging_rank=0 if is_hanging else -1), budget_s=0.2)
        reason = r"step 0 has taken longer than its budget of 0\.2 s"
        with pytest.raises(GroupLost, match=reason + ("$" if is_hanging else ": rank 0 is stop")):
            group.take(WAIT_S)
        assert time.monotonic() - started < SOON_S
        assert ends_within(group.pids, SOON_S)


def test_rank_that_is_frozen_without_a_step_ends_the_group() -> None:
    with RankGroup.start(spec()) as group:
        started = time.monotonic()
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(GroupLost, match=r"^rank 1 is stopped$"):
            group.take(WAIT_S)
        assert time.monotonic() - started < SOON_S


def test_rank_that_is_frozen_while_it_loads_is_named() -> None:
    with descriptors_return_to_before(), pytest.raises(GroupLost, match=r"^rank 1 is stopped$"):
        RankGroup.start(spec(freezing_rank=1))


def test_budget_of_a_step_begins_after_the_step_before_it(group: RankGroup) -> None:
    os.kill(group.pids[0], signal.SIGSTOP)
    steps = [group.submit(plan(), BUDGET_S), group.submit(plan(), 0.2)]
    assert group.take(0.6) is None
    os.kill(group.pids[0], signal.SIGCONT)
    for step in steps:
        answer = group.take(WAIT_S)
        assert answer is not None
        assert answer.step == step


def test_budgets_of_answered_steps_do_not_add_up() -> None:
    """With two steps in flight there is always one that began before the next."""
    with RankGroup.start(spec()) as group:
        group.submit(plan(), BUDGET_S)
        for _ in range(20):
            group.submit(plan(), BUDGET_S)
            assert group.take(WAIT_S) is not None
        group.submit(plan(hanging_rank=0), 0.2)
        assert group.take(WAIT_S) is not None
        with pytest.raises(GroupLost, match="step 21 has taken longer than its budget"):
            group.take(WAIT_S)


def test_step_is_not_late_while_its_answer_is_not_taken(group: RankGroup) -> None:
    group.submit(plan(), 0.2)
    assert select.select([group], [], [], WAIT_S)[0]
    assert not ends_within(group.pids, 0.8)
    assert group.take(WAIT_S) is not None


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_raises_ends_the_group(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    with RankGroup.start(spec()) as group:
        group.submit(plan(failing_rank=rank), BUDGET_S)
        with pytest.raises(GroupLost, match=f"^rank {rank} failed: MemoryError: no memory is left"):
            while True:
                group.take(WAIT_S)
        assert ends_within(group.pids, 1.0)
    assert "Traceback" in capfd.readouterr().err


def test_killed_rank_is_named_before_one_that_failed_without_it() -> None:
    handles, theirs = [], []
    for rank in (0, 1):
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        handles.append(RankHandle(rank, process, os.pidfd_open(process.pid), ours))
        theirs.append(other)
    assert failure_of(handles) is None
    theirs[0].send(encode(Failed("rank 1 does not answer")))
    handles[1].kill()
    assert select.select([handles[1].pidfd], [], [], WAIT_S)[0]
    assert failure_of(handles) == "rank 1 ended: SIGKILL"
    theirs[0].send(encode(Failed("rank 1 does not answer")))
    assert failure_of(handles[:1]) == "rank 0 failed: rank 1 does not answer"
    theirs[0].send(b"\xc1")
    assert "rank 0 failed: its message is damaged" in str(failure_of(handles[:1]))
    for handle, other in zip(handles, theirs, strict=True):
        handle.close()
        other.close()


def test_rank_that_a_driver_holds_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends it once the driver's call returns; its leader goes on."""
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        handle = RankHandle(0, process, os.pidfd_open(process.pid), ours)
        monkeypatch.setattr(watchdog, "KILLED_S", 0.01)
        monkeypatch.setattr(RankHandle, "kill", lambda _: None)
        try:
            handle.close()
            assert process.poll() is None
            assert ours.fileno() == -1
        finally:
            process.kill()
    other.close()


def test_step_that_does_not_fit_into_the_ring_of_a_busy_rank_ends_the_group() -> None:
    """The cause is named at once, although no other step follows and the budget is not over."""
    with RankGroup.start(replace(spec(), limit_s=0.5)) as group:
        group.submit(plan(hanging_rank=0), BUDGET_S)
        group.submit(plan(text="a" * 5_000_000), BUDGET_S)
        with pytest.raises(GroupLost, match=r"steps do not reach all ranks: reader 0 .* 0\.5 s"):
            group.take(WAIT_S)


def test_missing_step_ends_the_group(capfd: pytest.CaptureFixture[str]) -> None:
    with RankGroup.start(spec()) as group:
        group._steps.send(Record(1, plan()))
        with pytest.raises(GroupLost, match="StepGap: step 1 came, step 0 was expected"):
            group.take(WAIT_S)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"other_rank": 1, "other_field": "weights_digest"},
            "rank 1 has weights digest 'other', the other ranks have 'digest'",
        ),
        ({"failing_rank": 2}, "rank 2 failed: MemoryError: no memory is left"),
    ],
)
def test_unlike_or_failing_rank_does_not_start(
    config: dict[str, object], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with descriptors_return_to_before(), pytest.raises(GroupLost, match=line):
        RankGroup.start(spec(3, pp=3, **config))


def test_rank_that_is_never_ready_is_named() -> None:
    made = spec(hanging_rank=0)  # the other one may start late on a busy machine, too
    hasty = replace(made, ready_s=1.0)
    with descriptors_return_to_before(), pytest.raises(GroupLost, match="rank 0 is not ready"):
        RankGroup.start(hasty)


def test_unknown_work_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GroupLost, match="rank 0 failed: ValueError: no work 'json:nothing'"):
        RankGroup.start(spec(1, entry="json:nothing"))


@pytest.mark.parametrize("entry", ["tests.nowhere:Work", "json:nothing", "json"])
def test_entry_that_is_no_work_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match=f"no work '{entry}'"):
        load_entry(entry)


def test_ranks_work_on_while_their_leader_drains(group: RankGroup) -> None:
    """A terminal or a service manager sends these signals to every process."""
    for pid in group.pids:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
    step = group.submit(plan(text="t"), BUDGET_S)
    assert group.take(WAIT_S) == Record(step, f"0:{step}:t".encode())


def test_ranks_exit_when_the_control_socket_closes() -> None:
    """Also those that compute."""
    with RankGroup.start(spec()) as group:
        group._watchdog.close()
        group.submit(plan(hanging_rank=1), BUDGET_S)
        for each in group._handles:
            each.control.close()
        assert ends_within(group.pids, 2.0)
        assert [each.process.wait() for each in group._handles] == [0, 0]


LEADER = """
import os, signal, sys
from shared.engine.parallel.processes.group import GroupSpec, RankGroup
from shared.engine.parallel.mesh_shape import MeshShape
group = RankGroup.start(GroupSpec(MeshShape(2), sys.argv[1]))
os.kill(group.pids[0], signal.SIGSTOP)  # it cannot see that the control socket closes
print(*group.pids, flush=True)
signal.pause()
"""


def test_ranks_die_with_a_killed_leader() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, ECHO],
        -1,
        None,
        None,
        subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert leader.stdout is not None
    pids = [int(pid) for pid in leader.stdout.readline().split()]
    assert len(pids) == 2
    leader.kill()
    leader.wait()
    leader.stdout.close()
    assert ends_within(pids, 2.0)


def test_leader_and_ranks_start_without_torch() -> None:
    code = (
        "import sys\nfrom shared.engine.parallel.processes import group, rank_process\n"
        "print(sorted({'torch', 'numba', 'nats', 'uvloop'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert child.stdout.strip() == "[]"


def test_difference_names_the_rank_that_most_others_contradict() -> None:
    same = RankIdentity("a", "b", "c", "d")
    other = RankIdentity("a", "b", "c", "e")
    assert difference([same, same, same]) is None
    assert difference([other, same, same]) == ("rank 0 has versions 'e', the other ranks have 'd'")
    assert difference([same, other]) == "rank 1 has versions 'e', another rank has 'd'"
