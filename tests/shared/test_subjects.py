from __future__ import annotations

import pytest

from shared import subjects
from shared.messages import Role
from shared.subjects import CredentialRole, permissions
from shared.transport.server_config import NatsUser, nats_server_config
from tests.support.world.bus import matches

USERS = [
    NatsUser("gateway", "gateway-1", "word"),
    NatsUser("worker", "worker-1", "other"),
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
            [subjects.tokens("g"), subjects.placement("g"), "_INBOX.g.-.y"],
        ),
        (
            "scheduler",
            "s",
            [subjects.MATCH, subjects.start_decode("d"), subjects.placement("g")],
            [subjects.SUBMIT, subjects.submit_to("s"), subjects.heartbeat(("decode",), "d")],
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
            [
                subjects.run_prefill("p"),
                subjects.tokens("g"),
                subjects.heartbeat(("prefill",), "w"),
            ],
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
    assert not is_allowed(role, process_id, "subscribe", "_INBOX.other.-.x")
    foreign = subjects.heartbeat((role if role != "worker" else "decode",), "other")  # type: ignore[arg-type]
    assert not is_allowed(role, process_id, "publish", foreign)


def test_role_publishes_only_in_its_own_name() -> None:
    for role in ("gateway", "scheduler", "prefill", "decode", "kv_index", "worker"):
        for pattern in permissions(role, "own").publish:
            assert pattern.endswith(".own.*"), pattern


def test_observer_may_only_receive_heartbeats() -> None:
    assert is_allowed("observer", "o", "subscribe", subjects.heartbeat(("decode",), "d"))
    for subject in (subjects.SUBMIT, subjects.tokens("g"), subjects.kv_events("decode", "d")):
        assert not is_allowed("observer", "o", "subscribe", subject)
        assert not is_allowed("observer", "o", "publish", subject)
    assert not is_allowed("observer", "o", "publish", subjects.heartbeat(("decode",), "o"))


def test_only_observers_and_operators_read_timelines() -> None:
    for role in ("gateway", "scheduler", "prefill", "decode", "kv_index", "worker", "host"):
        assert not is_allowed(role, "o", "publish", subjects.trace("gateway-1"))
    assert is_allowed("observer", "o", "publish", subjects.trace("gateway-1"))
    assert is_allowed("operator", "o", "publish", subjects.trace("gateway-1"))
    assert is_allowed("gateway", "gateway-1", "subscribe", subjects.trace("gateway-1"))


def test_server_config_limits_users_to_their_subjects() -> None:
    config = nats_server_config(USERS, host="127.0.0.1", port=4222)
    assert 'listen: "127.0.0.1:4222"' in config
    assert "max_payload: 8388608" in config
    assert config.count("user: ") == 3
    processes, clients = config.split("  API {")
    gateway, worker = processes.split("user: ")[1:]
    assert '"_INBOX.gateway-1.*.>"' in gateway
    assert '"_INBOX.gateway-1.*.>"' not in worker
    assert "hearth.v1.api" not in processes and "limits" not in processes
    assert clients.startswith("limits {max_payload: 4259840}")
    assert 'user: "gateway-1.api", password: "word"' in clients


@pytest.mark.parametrize("process_id", ["decode-1", "decode-1.a1b2c3"])
def test_process_id_survives_the_wire(process_id: str) -> None:
    subject = subjects.start_decode(process_id)
    assert subjects.owner_of(subject) == process_id
    assert subjects.sender_of(subjects.sent_by(subject, process_id)) == process_id
    assert subjects.owner_of(subjects.SUBMIT) is None


@pytest.mark.parametrize(
    ("subject", "is_read"),
    [
        (subjects.start_decode("decode.one"), True),
        (subjects.start_decode("decode"), True),
        (subjects.start_decode("decode-2.one"), False),
        (subjects.start_decode("one.decode"), False),
    ],
)
def test_replicas_of_a_credential_read_its_commands_alone(subject: str, is_read: bool) -> None:
    assert is_allowed("decode", "decode", "subscribe", subject) == is_read


@pytest.mark.parametrize(
    ("roles", "region", "is_sent"),
    [
        (("decode",), "eu", True),
        (("decode",), "us", False),
        (("decode",), "", False),
        (("prefill",), "eu", False),
        (("prefill", "decode"), "eu", False),
    ],
)
def test_credential_announces_its_own_roles_and_region(
    roles: tuple[Role, ...], region: str, is_sent: bool
) -> None:
    subject = subjects.sent_by(subjects.heartbeat(roles, "d.one", region), "d.one")
    patterns = permissions("decode", "d", "eu").publish
    assert any(matches(pattern, subject) for pattern in patterns) == is_sent


def test_worker_credential_announces_one_role_or_both() -> None:
    patterns = permissions("worker", "w").publish
    for roles in (("prefill",), ("decode",), ("prefill", "decode")):
        subject = subjects.sent_by(subjects.heartbeat(roles, "w"), "w")  # type: ignore[arg-type]
        assert any(matches(pattern, subject) for pattern in patterns), roles
        assert set(subjects.announced_by(subject)[0]) == set(roles)


def test_only_schedulers_and_operators_command_hosts() -> None:
    models = subjects.host_models("host-1")
    allowed: tuple[CredentialRole, ...] = ("scheduler", "operator")
    for role in allowed:
        assert is_allowed(role, "x", "publish", models)
    others: tuple[CredentialRole, ...] = ("gateway", "decode", "worker", "host", "client")
    for role in others:
        assert not is_allowed(role, "x", "publish", models)
    assert is_allowed("host", "host-1", "subscribe", models)
    assert not is_allowed("host", "host-2", "subscribe", models)


def test_hosts_schedulers_and_operators_park_workers_and_change_their_roles() -> None:
    lifecycle = subjects.lifecycle("decode", "worker-1")
    allowed: tuple[CredentialRole, ...] = ("host", "scheduler", "operator")
    for role in allowed:
        assert is_allowed(role, "x", "publish", lifecycle)
    others: tuple[CredentialRole, ...] = ("gateway", "decode", "worker", "kv_index", "client")
    for role in others:
        assert not is_allowed(role, "x", "publish", lifecycle)
    assert is_allowed("worker", "worker-1", "subscribe", lifecycle)
    assert not is_allowed("worker", "worker-2", "subscribe", lifecycle)


def test_workers_ask_for_vectors_and_those_that_prefill_may_encode() -> None:
    wanted = subjects.encode("encode-1")
    asking: tuple[CredentialRole, ...] = ("prefill", "decode", "worker")
    for role in asking:
        assert is_allowed(role, "x", "publish", wanted)
        assert is_allowed(role, "x", "publish", subjects.control("encode", "encode-1"))
    others: tuple[CredentialRole, ...] = ("gateway", "scheduler", "host", "observer", "client")
    for role in others:
        assert not is_allowed(role, "x", "publish", wanted)
    encoding: tuple[CredentialRole, ...] = ("encode", "prefill", "worker")
    for role in encoding:
        assert is_allowed(role, "encode-1", "subscribe", wanted)
        assert not is_allowed(role, "encode-2", "subscribe", wanted)
        assert is_allowed(role, "x", "publish", subjects.encoded("decode", "decode-1"))
        assert is_allowed(role, "x", "publish", subjects.pixels("gateway-1"))
    assert not is_allowed("decode", "encode-1", "subscribe", wanted)
    assert not is_allowed("encode", "x", "publish", subjects.run_prefill("prefill-1"))


def test_only_operators_record_steps() -> None:
    profile = subjects.profile("decode", "worker-1")
    assert is_allowed("operator", "x", "publish", profile)
    others: tuple[CredentialRole, ...] = (
        *("observer", "gateway", "scheduler", "prefill", "decode", "worker", "host", "client"),
    )
    for role in others:
        assert not is_allowed(role, "x", "publish", profile)
    assert is_allowed("worker", "worker-1", "subscribe", profile)


def test_operator_announces_no_heartbeat() -> None:
    assert is_allowed("operator", "o", "subscribe", subjects.heartbeat(("host",), "host-1"))
    assert not is_allowed("operator", "o", "publish", subjects.heartbeat(("host",), "o"))
