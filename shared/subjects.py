"""Every subject and queue group, and the roles that may use each.

    hearth.v1.{role}.{credential}.{instance}.{verb}      one process
    hearth.v1.{role}.any.{verb}                          any process of a role, by its queue group
    hearth.v1.api.{endpoint}.{client}                    requests of API clients to any gateway
    hearth.v1.api.cancel.{client}.{gateway}              to the gateway that runs the request
    hearth.v1.site.{site}.{role}.{credential}.{instance}.{verb}      leaves to a process of a site
    hearth.v1.site.any.{role}.{credential}.{instance}.{verb}         leaves to every linked site
    hearth.v1.linked.{site}.{role}.{credential}.{instance}.{verb}    came from a site
    hearth.v1.in.{class}.{…}       data of a tenant with a region class, otherwise as above

A process id is `{credential}.{instance}`, or `{credential}` for the only process of a credential;
its instance on the wire is then `-`. On the wire every subject ends with the sender's credential
and instance. The sender's permissions enforce the credential, and leave the instance free: the
processes of one credential (replicas) trust one another. A process of another site is
`{site}/{process id}`; the accounts of the links (`shared/transport/link_config.py`) turn what a
site sends into what came from it, so that no site speaks as another.

`permissions()` is the only source of the NATS permission file: a process reads only the commands to
its credential, its inbox and the public events. A message with data of a tenant that has a region
class names the class in its subject, where only credentials of the class's regions may send it or
receive it.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from typing import Literal

import msgspec

from shared.messages import Role

PREFIX = "hearth.v1"
ANY = "any"

# A credential's role: a `worker` has prefill and decode handlers over one engine, and it and
# `prefill` may encode images for others; an `observer`
# receives heartbeats and may only read timelines and the fleet from gateways; an `operator` also
# commands hosts and workers; a `client` sends API requests of one tenant and is no process of the
# cluster.
CredentialRole = Literal[
    "gateway",
    "scheduler",
    "encode",
    "prefill",
    "decode",
    "kv_index",
    "host",
    "worker",
    "observer",
    "operator",
    "client",
]

MAX_REMEMBERED = 8192  # subjects: those of heartbeats come four times a second from each process
NO_INSTANCE = "-"
SITE_SEPARATOR = "/"  # no credential and no site has it in its name
_SITE, _LINKED = f"{PREFIX}.site", f"{PREFIX}.linked"
NO_REGION = "-"
_PREFILL_AND_DECODE: tuple[Role, ...] = ("prefill", "decode")

_IN = f"{PREFIX}.in."
# Of messages with prompts, tokens, or hashes of blocks and images.
DATA_VERBS = frozenset(
    {
        *("submit", "match", "start", "resend", "run", "tokens", "pixels"),
        *("kv_events", "list_blocks", "pins", "encode", "digest"),
    }
)

HEARTBEATS = f"{PREFIX}.*.*.*.heartbeat.*"
KV_EVENTS = f"{PREFIX}.*.*.*.kv_events"


def process_id_of(credential: str, instance: str) -> str:
    return credential if instance in ("", NO_INSTANCE) else f"{credential}.{instance}"


def random_instance() -> str:
    """Returns 48 random bits: of 1,000 processes of one credential, two share it with
    probability 2e-9.
    """
    return secrets.token_hex(6)


def credential_of(process_id: str) -> str:
    return process_id.partition(".")[0]


def command(role: CredentialRole, process_id: str, verb: str) -> str:
    if SITE_SEPARATOR in process_id:
        site, name = process_id.split(SITE_SEPARATOR)[:2]
        return f"{_SITE}.{site}.{role}.{two_tokens(name)}.{verb}"
    return f"{PREFIX}.{role}.{two_tokens(process_id)}.{verb}"


def carries_data(subject: str) -> bool:
    """Whether the messages of a subject, without its sender, have data of tenants."""
    return subject.rpartition(".")[2] in DATA_VERBS


def in_class(subject: str, region_class: str) -> str:
    """Returns the subject of data of a region class; "" is none."""
    return f"{_IN}{region_class}{subject[len(PREFIX) :]}" if region_class else subject


@lru_cache(MAX_REMEMBERED)
def class_of(subject: str) -> str:
    """Returns the region class that a subject names; "" for none."""
    return subject.split(".", 4)[3] if subject.startswith(_IN) else ""


@lru_cache(MAX_REMEMBERED)
def without_class(subject: str) -> str:
    return f"{PREFIX}.{subject.split('.', 4)[4]}" if subject.startswith(_IN) else subject


def heartbeat(roles: tuple[Role, ...], process_id: str, region: str = "") -> str:
    """Returns the subject of a heartbeat, which states roles and region, so that permissions bind
    both to the credential.
    """
    role: CredentialRole = "worker" if roles == _PREFILL_AND_DECODE else roles[0]
    return f"{command(role, process_id, 'heartbeat')}.{region or NO_REGION}"


@lru_cache(MAX_REMEMBERED)
def announced_by(wire_subject: str) -> tuple[tuple[str, ...], str]:
    """Returns the roles and the region that the subject of a received heartbeat states."""
    parts = wire_subject.split(".")
    role, region = parts[2], parts[6]
    return _roles_of(role), "" if region == NO_REGION else region


def kv_events(role: Role, process_id: str) -> str:
    return command(role, process_id, "kv_events")


def alive(role: Role, process_id: str) -> str:
    """Carries ReportAlive. A gateway of another site replies for its workers of both roles."""
    return command("decode" if is_at_site(process_id) else role, process_id, "alive")


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


def pixels(gateway_id: str) -> str:
    """Carries FetchPixels."""
    return command("gateway", gateway_id, "pixels")


def receipt(gateway_id: str) -> str:
    """Carries ReadReceipt."""
    return command("gateway", gateway_id, "receipt")


def encode(worker_id: str) -> str:
    """Carries EncodeImage."""
    return command("encode", worker_id, "encode")


def encoded(role: Role, worker_id: str) -> str:
    """Carries EncodeFailed, to the worker that wants the vectors."""
    return command(role, worker_id, "encoded")


def trace(gateway_id: str) -> str:
    """Carries ReadTimeline."""
    return command("gateway", gateway_id, "trace")


READ_FLEET = f"{PREFIX}.gateway.{ANY}.fleet"
READ_FLEET_GROUP = "gateway"


def fleet(gateway_id: str) -> str:
    """Carries ReadFleet to one gateway, READ_FLEET to any."""
    return command("gateway", gateway_id, "fleet")


# Carries ReadKvElsewhere, to any gateway with links to other sites.
READ_KV_ELSEWHERE = f"{PREFIX}.gateway.{ANY}.kv_elsewhere"
READ_KV_ELSEWHERE_GROUP = "gateway"


# API clients. Their subjects end with the client alone: it has no instance.
API = f"{PREFIX}.api"
API_REQUESTS = f"{API}.*.*"
CANCEL = "cancel"
API_GROUP = "gateway"
SERVICES = "$SRV"  # NATS's subjects for PING, INFO and STATS of services
# The server lets gateways send to a request's reply subject for this long. It remembers the subject
# meanwhile, so a longer time costs it memory.
REPLY_S = 660.0


def api_request(endpoint: str, client_id: str) -> str:
    return f"{API}.{endpoint}.{client_id}"


def api_cancel(client_id: str, gateway_id: str) -> str:
    return f"{api_request(CANCEL, client_id)}.{two_tokens(gateway_id)}"


def endpoint_and_client(wire_subject: str) -> tuple[str, str]:
    """Splits a subject of API_REQUESTS, or of `api_cancel`."""
    endpoint, client_id = wire_subject.split(".", 5)[3:5]
    return endpoint, client_id


def client_inbox(client_id: str) -> str:
    """Returns the prefix of the client's reply subjects, which no other client can subscribe to."""
    return f"_INBOX.{client_id}."


# workers
def start_decode(worker_id: str) -> str:
    return command("decode", worker_id, "start")


def resend(worker_id: str) -> str:
    return command("decode", worker_id, "resend")


def control(role: Role, worker_id: str) -> str:
    """Carries AbortRequest, AckFinished, RenewLease, PrefillFailed and PrefillPhases; to encode
    workers AbortRequest and RenewLease.
    """
    return command(role, worker_id, "control")


def run_prefill(worker_id: str) -> str:
    """Carries RunPrefill; to another site RenewLease, too, whose reply shows that it is alive."""
    return command("prefill", worker_id, "run")


def list_blocks(role: Role, worker_id: str) -> str:
    return command(role, worker_id, "list_blocks")


def pins(role: Role, worker_id: str) -> str:
    """Carries PinPrefix and KeepPins."""
    return command(role, worker_id, "pins")


def tenant_kv(role: Role, worker_id: str) -> str:
    """Carries DropTenantKv and CountTenantKv."""
    return command(role, worker_id, "tenant_kv")


def lifecycle(role: Role, worker_id: str) -> str:
    """Carries ParkWorker, WakeWorker, ResizeKv, ChangeRoles and DrainWorker."""
    return command(role, worker_id, "lifecycle")


def profile(role: Role, worker_id: str) -> str:
    """Carries ProfileSteps and ReadProfile."""
    return command(role, worker_id, "profile")


# hosts
def host_models(host_id: str) -> str:
    """Carries WakeModel, ParkModel and DrainWorker."""
    return command("host", host_id, "models")


def list_host_models(host_id: str) -> str:
    """Carries ListHostModels."""
    return command("host", host_id, "list_models")


# ranks of a worker on other hosts, which use the worker's credential
def join_ranks(worker_id: str) -> str:
    """Carries JoinRanks."""
    return f"{PREFIX}.rank.{two_tokens(worker_id)}.join"


# links to other sites
def from_sites(role: Role, process_id: str, verb: str) -> str:
    """Returns the subject of what processes of other sites send to one process."""
    return f"{_LINKED}.*.{role}.{two_tokens(process_id)}.{verb}"


def state_to_sites(gateway_id: str) -> str:
    """Carries SiteState, to every linked site."""
    return f"{_SITE}.{ANY}.gateway.{two_tokens(gateway_id)}.state"


def read_site_models(gateway_id: str) -> str:
    """Carries ReadSiteModels, to a gateway of another site."""
    return command("gateway", gateway_id, "models")


def prefix_digest(site: str) -> str:
    """Carries PrefixDigest, to every scheduler of one site."""
    return f"{_SITE}.{site}.scheduler.{two_tokens(ANY)}.digest"


# Carries SiteState. Its region is that of the link, in the configuration of this site's servers.
STATES_OF_SITES = f"{_LINKED}.*.gateway.*.*.state.*"


@lru_cache(MAX_REMEMBERED)
def site_of(wire_subject: str) -> str | None:
    """Returns the site that a message came from; None for this one."""
    subject = without_class(wire_subject)
    return subject.split(".")[3] if subject.startswith(f"{_LINKED}.") else None


@lru_cache(MAX_REMEMBERED)
def site_addressed(subject: str) -> str | None:
    """Returns the site that a subject leads to, or ANY for all; None for this one."""
    subject = without_class(subject)
    return subject.split(".")[3] if subject.startswith(f"{_SITE}.") else None


@lru_cache(MAX_REMEMBERED)
def is_site_state(wire_subject: str) -> bool:
    """Whether it is a subject of STATES_OF_SITES."""
    parts = wire_subject.split(".")
    return parts[2] == "linked" and parts[7] == "state"


def region_of_site(wire_subject: str) -> str:
    """Returns the region in a subject of STATES_OF_SITES."""
    region = wire_subject.split(".")[8]
    return "" if region == NO_REGION else region


def at_site(site: str, process_id: str) -> str:
    return f"{site}{SITE_SEPARATOR}{process_id}"


def is_at_site(process_id: str) -> bool:
    """Whether the process belongs to another site."""
    return SITE_SEPARATOR in process_id


def site_in(process_id: str) -> str | None:
    """Returns the site in the id of another site's process; None for one of this site."""
    site, separator, _ = process_id.partition(SITE_SEPARATOR)
    return site if separator else None


_PROCESS = re.compile(r"[^\s.*>/]+(\.[^\s.*>/]+)?")  # one or two tokens of a subject


def is_gateway_of(process_id: str, site: str) -> bool:
    """Whether it names a process of the site, and nothing else: answers go to that name."""
    there, separator, name = process_id.partition(SITE_SEPARATOR)
    return there == site and bool(separator) and _PROCESS.fullmatch(name) is not None


def gateway_at_site(process_id: str) -> str:
    """Returns the gateway of `{site}/{gateway}/{model}`, a worker for one model of a site. Other
    names stay as they are.
    """
    return SITE_SEPARATOR.join(process_id.split(SITE_SEPARATOR, 2)[:2])


def tenants(gateway_id: str) -> str:
    """Carries ReadTenantCopies, LeaseLimits, ReportUsage, WithdrawTenant and ReadTenantKv to a
    gateway of another site.
    """
    return command("gateway", gateway_id, "tenants")


def sent_by(subject: str, process_id: str) -> str:
    return f"{subject}.{two_tokens(process_id)}"


def from_anyone(subject: str) -> str:
    return f"{subject}.*.*"


@lru_cache(MAX_REMEMBERED)
def sender_of(wire_subject: str) -> str:
    _, credential, instance = wire_subject.rsplit(".", 2)
    name, site = process_id_of(credential, instance), site_of(wire_subject)
    return name if site is None else at_site(site, name)


def owner_of(subject: str) -> str | None:
    """Returns the process that a command addresses; None for a group."""
    parts = subject.split(".")
    if len(parts) == 8 and subject.startswith(f"{_SITE}."):
        return at_site(parts[3], process_id_of(parts[5], parts[6]))
    return process_id_of(parts[3], parts[4]) if len(parts) == 6 else None


def inbox_prefix(process_id: str) -> str:
    return f"_INBOX.{two_tokens(process_id)}"


def two_tokens(process_id: str) -> str:
    return process_id if "." in process_id else f"{process_id}.{NO_INSTANCE}"


def _roles_of(role: str) -> tuple[str, ...]:
    return _PREFILL_AND_DECODE if role == "worker" else (role,)


class Permissions(msgspec.Struct, frozen=True):
    """Subjects that a credential may publish to and subscribe to. Besides, it may send
    `max_replies` (-1: any number) to each reply subject that it receives, for `reply_s` seconds.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    max_replies: int = 4
    reply_s: float = 60.0


_LIFECYCLE = tuple(f"{PREFIX}.{each}.*.*.lifecycle" for each in ("prefill", "decode", "encode"))
_PROFILE = (f"{PREFIX}.prefill.*.*.profile", f"{PREFIX}.decode.*.*.profile")
_TENANT_KV = tuple(f"{PREFIX}.{each}.*.*.tenant_kv" for each in ("prefill", "decode", "encode"))
_TRACE = f"{PREFIX}.gateway.*.*.trace"
_FLEET = f"{PREFIX}.gateway.*.*.fleet"
_RECEIPT = f"{PREFIX}.gateway.*.*.receipt"
_HOST_MODELS = f"{PREFIX}.host.*.*.models"
_LIST_MODELS = f"{PREFIX}.host.*.*.list_models"
_PIXELS = f"{PREFIX}.gateway.*.*.pixels"
_TO_ENCODERS = (f"{PREFIX}.encode.*.*.encode", f"{PREFIX}.encode.*.*.control")
_ENCODES = (f"{PREFIX}.prefill.*.*.encoded", f"{PREFIX}.decode.*.*.encoded", _PIXELS)
_TO_PREFILLS = (f"{PREFIX}.prefill.*.*.run", f"{PREFIX}.prefill.*.*.control")
_PUBLISH: dict[str, tuple[str, ...]] = {
    "gateway": (
        MATCH,
        SUBMIT,
        f"{PREFIX}.scheduler.*.*.submit",
        f"{PREFIX}.scheduler.*.*.cancel",
        f"{PREFIX}.decode.*.*.control",
        f"{PREFIX}.decode.*.*.resend",
        _LIST_MODELS,
        _RECEIPT,
    ),
    "scheduler": (
        MATCH,
        f"{PREFIX}.decode.*.*.start",
        f"{PREFIX}.decode.*.*.control",
        f"{PREFIX}.gateway.*.*.placement",
        *_LIFECYCLE,
        _HOST_MODELS,
        _LIST_MODELS,
    ),
    "decode": (*_TO_PREFILLS, *_TO_ENCODERS, f"{PREFIX}.gateway.*.*.tokens", _PIXELS),
    "prefill": (f"{PREFIX}.decode.*.*.control", *_TO_ENCODERS, *_ENCODES),
    "encode": _ENCODES,
    "kv_index": tuple(f"{PREFIX}.*.*.*.{verb}" for verb in ("list_blocks", "pins", "tenant_kv")),
    "host": _LIFECYCLE,
}

_SHARED_SUBSCRIBE: dict[str, tuple[str, ...]] = {
    "gateway": (READ_FLEET,),
    "scheduler": (SUBMIT,),
    "encode": (),
    "decode": (),
    "prefill": (),
    "kv_index": (MATCH, KV_EVENTS),
    "host": (),
}


# What crosses a link to one process of a site, or to every scheduler of it.
_LINKED_TO_GATEWAYS: tuple[tuple[Role, str], ...] = (
    ("decode", "start"),
    ("decode", "resend"),
    ("decode", "control"),
    ("decode", "alive"),
    ("gateway", "tokens"),
    ("gateway", "models"),
    ("gateway", "tenants"),
    ("prefill", "run"),
    ("prefill", "control"),
)
LINKED_COMMANDS: tuple[tuple[Role, str], ...] = (*_LINKED_TO_GATEWAYS, ("scheduler", "digest"))
_SENT_TO_SITES: dict[str, tuple[tuple[Role, str], ...]] = {
    "gateway": (
        ("decode", "resend"),
        ("decode", "control"),
        ("decode", "alive"),
        ("gateway", "tokens"),
        ("gateway", "models"),
        ("gateway", "tenants"),
        ("scheduler", "digest"),
    ),
    "scheduler": (
        ("decode", "start"),
        ("decode", "control"),
        ("decode", "alive"),
        ("gateway", "models"),
    ),
    "decode": (("prefill", "run"), ("prefill", "control")),
}
# What one process receives of other sites. A gateway stands for the workers of its site.
_RECEIVED_FROM_SITES: dict[str, tuple[tuple[Role, str], ...]] = {
    "gateway": _LINKED_TO_GATEWAYS,
    "decode": (("decode", "control"),),
}


def permissions(
    role: CredentialRole,
    credential: str,
    region: str = "",
    *,
    is_linked: bool = False,
    region_classes: tuple[str, ...] = (),
) -> Permissions:
    """Returns the minimal permissions that the credential's processes need. `is_linked`: its site
    has links to others. `region_classes` are those that contain the region.
    """
    if role == "observer" or role == "operator":
        return _reader_permissions(role, credential)
    if role == "client":
        return _client_permissions(credential)
    any_instance = f"{credential}.*"
    roles: tuple[Role, ...] = _PREFILL_AND_DECODE if role == "worker" else (role,)
    publish, own, shared = _subjects_at_home(role, roles, any_instance, region)
    if is_linked:
        sent, received = _subjects_of_links(roles, any_instance)
        publish, shared = [*publish, *sent], [*shared, *received]
    data = [each for each in publish if carries_data(each)]
    data_received = [each for each in (*own, *shared) if carries_data(each)]
    for region_class in region_classes:
        publish += [in_class(each, region_class) for each in data]
        shared += [in_class(each, region_class) for each in data_received]
    return Permissions(
        publish=tuple(sent_by(subject, any_instance) for subject in publish),
        subscribe=(f"{inbox_prefix(any_instance)}.>", *map(from_anyone, shared)),
    )


def _reader_permissions(role: Literal["observer", "operator"], credential: str) -> Permissions:
    any_instance = f"{credential}.*"
    own_inbox = f"{inbox_prefix(any_instance)}.>"
    commands: tuple[str, ...] = (_TRACE, READ_FLEET, _FLEET, _LIST_MODELS)
    if role == "operator":
        commands = (*commands, *_LIFECYCLE, *_PROFILE, *_TENANT_KV, _HOST_MODELS)
        commands = (*commands, READ_KV_ELSEWHERE)
    sent = (sent_by(subject, any_instance) for subject in commands)
    return Permissions(publish=(own_inbox, *sent), subscribe=(own_inbox, from_anyone(HEARTBEATS)))


def _client_permissions(credential: str) -> Permissions:
    return Permissions(
        publish=(api_request("*", credential), api_cancel(credential, "*.*"), f"{SERVICES}.>"),
        subscribe=(f"{client_inbox(credential)}>",),
    )


def _subjects_at_home(
    role: CredentialRole, roles: tuple[Role, ...], any_instance: str, region: str
) -> tuple[list[str], list[str], list[str]]:
    """Returns the subjects that the processes send to, those that each has for itself, and those
    that they receive besides.
    """
    publish = [f"{PREFIX}.*.*.*.alive"]
    if role == "worker":
        publish.append(heartbeat(roles, any_instance, region))
    shared: list[str] = [HEARTBEATS]
    for each in roles:
        publish += [heartbeat((each,), any_instance, region), kv_events(each, any_instance)]
        publish += _PUBLISH[each]
        shared += [command(each, any_instance, "*"), *_SHARED_SUBSCRIBE[each]]
    receiving = roles
    if "prefill" in roles:  # it may encode images for others
        receiving = (*roles, "encode")
        shared.append(command("encode", any_instance, "*"))
    verbs = sorted(DATA_VERBS - {"digest"})  # which goes to no single process
    own = [command(each, any_instance, verb) for each in receiving for verb in verbs]
    if role in ("worker", *_PREFILL_AND_DECODE):
        publish.append(join_ranks(any_instance))
        shared.append(join_ranks(any_instance))
    return publish, own, shared


def _subjects_of_links(roles: tuple[Role, ...], any_instance: str) -> tuple[list[str], list[str]]:
    """Returns the subjects of other sites that the processes send to, and those they receive."""
    publish: list[str] = []
    shared: list[str] = []
    for each in roles:
        publish += [f"{_SITE}.*.{to}.*.*.{verb}" for to, verb in _SENT_TO_SITES.get(each, ())]
        received = _RECEIVED_FROM_SITES.get(each, ())
        shared += [from_sites(to, any_instance, verb) for to, verb in received]
    if "gateway" in roles or "scheduler" in roles:
        shared.append(STATES_OF_SITES)
    if "gateway" in roles:  # it requests prefills as a decode worker does
        publish += [state_to_sites(any_instance), *_TO_PREFILLS, *_TENANT_KV]
        shared += [control("decode", any_instance), READ_KV_ELSEWHERE]
    elif "scheduler" in roles:
        shared.append(from_sites("scheduler", ANY, "digest"))
    return publish, shared


def api_permissions(gateway: str) -> Permissions:
    """Permissions of a gateway's connection to the API clients, in their account: it sends to their
    inboxes alone. Replies by permission alone would not do: a server that reads its configuration
    again forgets who may reply to whom, and streams under way would break off.
    """
    any_instance = f"{gateway}.*"
    return Permissions(
        publish=("_INBOX.*.>",),
        subscribe=(
            f"{inbox_prefix(any_instance)}.>",
            API_REQUESTS,
            api_cancel("*", any_instance),
            f"{SERVICES}.>",
        ),
        max_replies=-1,  # a streamed response is many replies
        reply_s=REPLY_S,
    )
