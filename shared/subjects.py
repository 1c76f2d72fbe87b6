"""Every subject and queue group, and the roles that may use each.

    hearth.v1.{role}.{process_id}.{verb}      one process
    hearth.v1.{role}.any.{verb}               any process of a role, by its queue group

On the wire every subject ends with the sender's process id, enforced by the sender's permissions.
`permissions()` is the only source of the NATS permission file: each process has a separate
credential and reads only the commands to it, its inbox and the public events.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages import Role

PREFIX = "hearth.v1"
ANY = "any"

# A credential's role: a `worker` has prefill and decode handlers over one engine; an `observer`
# receives heartbeats and cannot publish to any other process.
CredentialRole = Literal[
    "gateway", "scheduler", "prefill", "decode", "kv_index", "worker", "observer"
]

HEARTBEATS = f"{PREFIX}.*.*.heartbeat"
KV_EVENTS = f"{PREFIX}.*.*.kv_events"


def command(role: Role, process_id: str, verb: str) -> str:
    return f"{PREFIX}.{role}.{process_id}.{verb}"


def heartbeat(role: Role, process_id: str) -> str:
    return command(role, process_id, "heartbeat")


def kv_events(role: Role, process_id: str) -> str:
    return command(role, process_id, "kv_events")


def alive(role: Role, process_id: str) -> str:
    """Carries ReportAlive."""
    return command(role, process_id, "alive")


# scheduler
SUBMIT = f"{PREFIX}.scheduler.{ANY}.submit"
SCHEDULER_GROUP = "scheduler"


def submit_to(scheduler_id: str) -> str:
    """Addresses one scheduler, after another one hung: until the server drops that one, the group
    subject may select it again.
    """
    return command("scheduler", scheduler_id, "submit")


def cancel(scheduler_id: str) -> str:
    return command("scheduler", scheduler_id, "cancel")


# kv_index
MATCH = f"{PREFIX}.kv_index.{ANY}.match"
KV_INDEX_GROUP = "kv_index"


# gateway
def tokens(gateway_id: str) -> str:
    return command("gateway", gateway_id, "tokens")


def placement(gateway_id: str) -> str:
    """Carries Placed, PlacementFailed and QueueKeepalive."""
    return command("gateway", gateway_id, "placement")


# workers
def start_decode(worker_id: str) -> str:
    return command("decode", worker_id, "start")


def resend(worker_id: str) -> str:
    return command("decode", worker_id, "resend")


def control(role: Role, worker_id: str) -> str:
    """Carries AbortRequest, AckFinished, RenewLease and PrefillFailed."""
    return command(role, worker_id, "control")


def run_prefill(worker_id: str) -> str:
    return command("prefill", worker_id, "run")


def list_blocks(role: Role, worker_id: str) -> str:
    return command(role, worker_id, "list_blocks")


def pins(role: Role, worker_id: str) -> str:
    """Carries PinPrefix and KeepPins."""
    return command(role, worker_id, "pins")


def sent_by(subject: str, process_id: str) -> str:
    return f"{subject}.{process_id}"


def from_anyone(subject: str) -> str:
    return f"{subject}.*"


def sender_of(wire_subject: str) -> str:
    return wire_subject.rpartition(".")[2]


def owner_of(subject: str) -> str | None:
    """The process that a command addresses; None for a group."""
    parts = subject.split(".")
    return parts[3] if len(parts) == 5 and parts[3] != ANY else None


def inbox_prefix(process_id: str) -> str:
    return f"_INBOX.{process_id}"


class Permissions(msgspec.Struct, frozen=True):
    """Subjects that a credential may publish to and subscribe to. Replies are always allowed."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


_PUBLISH: dict[str, tuple[str, ...]] = {
    "gateway": (
        MATCH,
        f"{PREFIX}.scheduler.*.submit",
        f"{PREFIX}.scheduler.*.cancel",
        f"{PREFIX}.decode.*.control",
        f"{PREFIX}.decode.*.resend",
    ),
    "scheduler": (
        MATCH,
        f"{PREFIX}.decode.*.start",
        f"{PREFIX}.decode.*.control",
        f"{PREFIX}.gateway.*.placement",
    ),
    "decode": (
        f"{PREFIX}.prefill.*.run",
        f"{PREFIX}.prefill.*.control",
        f"{PREFIX}.gateway.*.tokens",
    ),
    "prefill": (f"{PREFIX}.decode.*.control",),
    "kv_index": (f"{PREFIX}.*.*.list_blocks", f"{PREFIX}.*.*.pins"),
}

_SHARED_SUBSCRIBE: dict[str, tuple[str, ...]] = {
    "gateway": (),
    "scheduler": (SUBMIT,),
    "decode": (),
    "prefill": (),
    "kv_index": (MATCH, KV_EVENTS),
}


def permissions(role: CredentialRole, process_id: str) -> Permissions:
    """The minimal permissions that the process needs."""
    if role == "observer":
        own = f"{inbox_prefix(process_id)}.>"
        return Permissions(publish=(own,), subscribe=(own, from_anyone(HEARTBEATS)))
    roles: tuple[Role, ...] = ("prefill", "decode") if role == "worker" else (role,)
    publish = [f"{PREFIX}.*.*.alive"]
    shared: list[str] = [HEARTBEATS]
    for each in roles:
        publish += [heartbeat(each, process_id), kv_events(each, process_id), *_PUBLISH[each]]
        shared += [f"{PREFIX}.{each}.{process_id}.*", *_SHARED_SUBSCRIBE[each]]
    return Permissions(
        publish=tuple(sent_by(subject, process_id) for subject in publish),
        subscribe=(f"{inbox_prefix(process_id)}.>", *map(from_anyone, shared)),
    )


def nats_server_config(
    users: list[tuple[CredentialRole, str, str]],
    *,
    host: str,
    port: int,
    max_payload_bytes: int = 8 * 1024 * 1024,
) -> str:
    """A nats-server configuration for `users` of (role, process_id, password).

    The user name is the process id, so one process cannot impersonate another. The server pings
    every second and disconnects after two misses, so a frozen member leaves its queue group soon.
    """
    entries = "\n".join(_user_entry(role, process_id, word) for role, process_id, word in users)
    return (
        f'listen: "{host}:{port}"\n'
        f"max_payload: {max_payload_bytes}\n"
        "max_pending: 268435456\n"
        'ping_interval: "1s"\n'
        "ping_max: 2\n"
        'write_deadline: "2s"\n'
        f"authorization {{\n  users: [\n{entries}\n  ]\n}}\n"
    )


def _user_entry(role: CredentialRole, process_id: str, password: str) -> str:
    allowed = permissions(role, process_id)

    def quote(subjects: tuple[str, ...]) -> str:
        return ", ".join(f'"{subject}"' for subject in subjects)

    return (
        f'    {{user: "{process_id}", password: "{password}", permissions: {{\n'
        f"      publish: {{allow: [{quote(allowed.publish)}]}},\n"
        f"      subscribe: {{allow: [{quote(allowed.subscribe)}]}},\n"
        '      allow_responses: {max: 4, expires: "1m"}}}'
    )
