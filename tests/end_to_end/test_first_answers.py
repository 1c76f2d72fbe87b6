"""The first responses that `hearth up` prints once the cluster is ready."""

from __future__ import annotations

import re

from tests.end_to_end.cluster import Cluster

PUSH = r"prefill-1 computed the prompt and pushed KV of (\d+) tokens to decode-1: "
SPEED = r"([\d.]+) MB in ([\d.]+) ms, ([\d,]+) MB/s"


def test_first_prompt_is_pushed_and_second_hits_prefix_cache(cluster: Cluster) -> None:
    first, second = re.findall(r"cached (\d+) of (\d+) prompt tokens", cluster.startup)
    push = re.search(PUSH + SPEED, cluster.startup)
    assert push is not None, cluster.startup
    num_pushed, megabytes = int(push[1]), float(push[2])
    assert int(first[0]) == 0 and num_pushed == int(first[1]) - 1
    assert megabytes > 0 and float(push[3]) > 0 and int(push[4].replace(",", "")) > 0
    assert int(second[0]) > 600
    assert f"the prefix cache held {second[0]} of {second[1]} prompt tokens" in cluster.startup
