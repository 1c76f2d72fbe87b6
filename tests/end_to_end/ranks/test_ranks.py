"""Workers of several ranks: those of prefill push to those of decode."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_chat import text_of
from tests.support.cluster.hearth_up import Cluster, run_cluster

RESTART_S = 60
QUESTION = "What is the KV cache?"
ANSWER = (
    "The KV cache stores the keys and values of every token read so far, so that each new token "
    "attends to them without computing them again."
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--prefill-tp", "2", "--decode-tp", "2")
    with run_cluster(tmp_path_factory.mktemp("ranks"), *options) as running:
        yield running


def ranks_of(cluster: Cluster, process_id: str) -> list[int]:
    leader = cluster.pid_of(process_id)
    found = []
    for task in Path(f"/proc/{leader}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def assert_handed_off(cluster: Cluster) -> None:
    """The answer is that of workers of one process, and no prompt token was computed twice."""
    answer = cluster.complete(QUESTION, max_tokens=60)
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["hearth"]["prefill_worker"] == "prefill-1"
    assert answer["hearth"]["num_pushed_tokens"] == answer["usage"]["prompt_tokens"] - 1


def test_ranks_of_prefill_push_to_ranks_of_decode(cluster: Cluster) -> None:
    assert_handed_off(cluster)
    assert len(ranks_of(cluster, "prefill-1")) == len(ranks_of(cluster, "decode-1")) == 2


@pytest.mark.long
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "pp"), [(2, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_workers_of_unlike_shapes_hand_off(
    tmp_path: Path, prefill_tp: int, decode_tp: int, pp: int
) -> None:
    sizes = {"--prefill-tp": prefill_tp, "--decode-tp": decode_tp, "--pp": pp}
    options = [str(part) for option in sizes.items() for part in option]
    with run_cluster(tmp_path, *options) as cluster:
        assert_handed_off(cluster)


FROZEN = pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.long)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, id="killed"), FROZEN])
def test_lost_rank_is_one_lost_worker(cluster: Cluster, number: signal.Signals) -> None:
    """Requests are answered meanwhile, and the group is started again as one."""
    victims = ranks_of(cluster, "prefill-1")
    os.kill(victims[1], number)
    chunks = list(cluster.stream(QUESTION, max_tokens=60, cache_salt=number.name))
    assert text_of(chunks) == ANSWER
    deadline = time.monotonic() + RESTART_S
    while len(new := set(new_ranks_of(cluster)) - set(victims)) < 2:
        assert time.monotonic() < deadline, new
        time.sleep(0.1)
    cluster.wait_until_ready("prefill-1")


def new_ranks_of(cluster: Cluster) -> list[int]:
    try:
        return ranks_of(cluster, "prefill-1")
    except (LookupError, OSError):  # its leader has ended
        return []
