"""The first responses that `hearth up` prints once the cluster is ready."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.cluster.hearth_up import Cluster, run_cluster

PUSH = r"prefill-1 computed the prompt and pushed KV of (\d+) tokens to decode-1: "
SPEED = r"([\d.]+) MB in ([\d.]+) ms, ([\d,]+) MB/s"


MAX_STARTS = 3


def startup_of(cluster: Cluster, folder: Path) -> str:
    """Returns the output of a cluster with compiled kernels and in which no request was
    resubmitted. The first one on a machine may compile while it answers, and then decode computes
    the prompt; on busy cores the gateway may take a worker for lost, and the prompt of the next
    attempt is in the cache of the prefill worker.
    """
    if is_undisturbed(cluster):
        return cluster.startup
    for number in range(MAX_STARTS):
        with run_cluster(folder / str(number)) as another:
            if is_undisturbed(another):
                return another.startup
    raise AssertionError("the first prompt was disturbed each time")


def is_undisturbed(cluster: Cluster) -> bool:
    is_pushed = re.search(PUSH, cluster.startup) is not None
    return is_pushed and "request_resubmitted" not in cluster.log_of("gateway-1")


def test_first_prompt_is_pushed_and_second_hits_prefix_cache(
    cluster: Cluster, tmp_path: Path
) -> None:
    startup = startup_of(cluster, tmp_path)
    first, second = re.findall(r"cached (\d+) of (\d+) prompt tokens", startup)
    push = re.search(PUSH + SPEED, startup)
    assert push is not None, startup
    num_pushed, megabytes = int(push[1]), float(push[2])
    assert int(first[0]) == 0 and num_pushed == int(first[1]) - 1, startup
    assert megabytes > 0 and float(push[3]) > 0 and int(push[4].replace(",", "")) > 0
    assert int(second[0]) > 600
    assert f"the prefix cache held {second[0]} of {second[1]} prompt tokens" in startup
