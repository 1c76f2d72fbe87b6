from __future__ import annotations

import pytest

from shared import subjects
from shared.subjects import CredentialRole, nats_server_config, permissions
from tests.simulation.world.bus import matches

USERS: list[tuple[CredentialRole, str, str]] = [
    ("gateway", "gateway-1", "word"),
    ("worker", "worker-1", "other"),
]


def is_allowed(role: CredentialRole, process_id: str, verb: str, subject: str) -> bool:
    """Whether the process may publish in its own name, or subscribe to any sender."""
    if not subject.startswith("_INBOX"):
        sender = process_id if verb == "publish" else "somebody"
        subject = subjects.sent_by(subject, sender)
    patterns = getattr(permissions(role, process_id), verb)
    return any(matches(pattern, subject) for pattern in patterns)


@pytest.mark.parametrize(
    ("role", "process_id", "needs_to_publish", "needs_to_subscribe"),
    [
        (
            "gateway",
            "g",
            [
                *(subjects.SUBMIT, subjects.submit_to("s"), subjects.cancel("s")),
                *(subjects.resend("d"), subjects.MATCH),
            ],
            [subjects.tokens("g"), subjects.placement("g"), "_INBOX.g.x.y"],
        ),
        (
            "scheduler",
            "s",
            [subjects.MATCH, subjects.start_decode("d"), subjects.placement("g")],
            [subjects.SUBMIT, subjects.submit_to("s"), subjects.heartbeat("decode", "d")],
        ),
        (
            "decode",
            "d",
            [subjects.run_prefill("p"), subjects.tokens("g"), subjects.control("prefill", "p")],
            [subjects.start_decode("d"), subjects.control("decode", "d")],
        ),
        (
            "prefill",
            "p",
            [subjects.control("decode", "d"), subjects.kv_events("prefill", "p")],
            [
                subjects.run_prefill("p"),
                subjects.list_blocks("prefill", "p"),
                subjects.pins("prefill", "p"),
            ],
        ),
        (
            "kv_index",
            "i",
            [subjects.list_blocks("decode", "d"), subjects.pins("prefill", "p")],
            [subjects.MATCH, subjects.kv_events("decode", "d")],
        ),
        (
            "worker",
            "w",
            [subjects.run_prefill("p"), subjects.tokens("g"), subjects.heartbeat("prefill", "w")],
            [subjects.start_decode("w"), subjects.run_prefill("w")],
        ),
    ],
)
def test_each_role_has_required_permissions(
    role: CredentialRole,
    process_id: str,
    needs_to_publish: list[str],
    needs_to_subscribe: list[str],
) -> None:
    assert all(is_allowed(role, process_id, "publish", each) for each in needs_to_publish)
    assert all(is_allowed(role, process_id, "subscribe", each) for each in needs_to_subscribe)
    assert is_allowed(role, process_id, "publish", subjects.alive("decode", "other"))
    assert not is_allowed(role, process_id, "subscribe", "_INBOX.other.x")
    assert not is_allowed(role, process_id, "publish", f"hearth.v1.{role}.other.heartbeat")


def test_role_publishes_only_in_its_own_name() -> None:
    for role in ("gateway", "scheduler", "prefill", "decode", "kv_index", "worker"):
        for pattern in permissions(role, "own").publish:
            assert pattern.endswith(".own"), pattern


def test_observer_may_only_receive_heartbeats() -> None:
    assert is_allowed("observer", "o", "subscribe", subjects.heartbeat("decode", "d"))
    for subject in (subjects.SUBMIT, subjects.tokens("g"), subjects.kv_events("decode", "d")):
        assert not is_allowed("observer", "o", "subscribe", subject)
        assert not is_allowed("observer", "o", "publish", subject)
    assert not is_allowed("observer", "o", "publish", subjects.heartbeat("decode", "o"))


def test_server_config_limits_users_to_their_subjects() -> None:
    config = nats_server_config(USERS, host="127.0.0.1", port=4222)
    assert 'listen: "127.0.0.1:4222"' in config
    assert "max_payload: 8388608" in config
    assert config.count("user: ") == 2
    gateway, worker = config.split("user: ")[1:]
    assert '"_INBOX.gateway-1.>"' in gateway
    assert '"_INBOX.gateway-1.>"' not in worker
