"""What a process must not hold when no request is open."""

from __future__ import annotations

from tests.support.cluster.held_objects import of_requests

# A link from each prefill worker to each decode worker stays open after its first use, with its
# staging memory and a task.
MAX_LINKS = 2
LINK_TASK = "task FrameDelivery._run"
# For listening, polling and one connection to each peer, opened when first needed.
MORE_DESCRIPTORS = 6
# Tasks that an idle process starts and ends all the time (a census delays the processes that it
# queries), and the inbox of its first own request.
MORE_TASKS = {
    "task HealthMonitor._request": 10,
    "task Event.wait": 1,
    "task MonotonicClock.sleep": 1,
    "task Subscription._wait_for_msgs": 1,
    # of a connection to NATS, if it reconnected during the census of the idle process; gateways
    # have another one for clients
    "task Client._flusher": 2,
    "task Client._ping_interval": 2,
    "task Client._read_loop": 2,
}


def left_behind(
    idle: dict[str, int], now: dict[str, int], *, num_more_links: int = 0
) -> dict[str, int]:
    """The counts of `now` beyond `idle`, the census of the same process before any fault.
    `num_more_links`: to other processes of a decode worker, or of pixels and vectors.
    """
    found = of_requests(now)
    for name, count in now.items():
        allowed = idle.get(name, 0) + MORE_TASKS.get(name, 0)
        if name == LINK_TASK:
            allowed = MAX_LINKS + num_more_links
        if name.startswith("task ") and count > allowed:
            found[name] = count
    # the leader of a group has its rings and its mesh instead of links
    if now["memfds"] > max(MAX_LINKS + num_more_links, idle["memfds"]):
        found["memfds"] = now["memfds"]
    if now["descriptors"] > idle["descriptors"] + MORE_DESCRIPTORS:
        found["descriptors"] = now["descriptors"]
    return found
