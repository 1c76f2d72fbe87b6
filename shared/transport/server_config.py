"""The configuration of a nats-server: an account for the processes, one for API clients, and one
for each link to another site.

Messages do not cross accounts. A gateway has a connection to each: what a client sends neither
reaches a process nor waits in front of the messages of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shared.nats_urls import api_user, authority
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import CredentialRole, Permissions, api_permissions, permissions
from shared.transport.link_config import SiteLinks
from shared.transport.nkeys import API_KEY, UserKey

PROCESSES, CLIENTS = "HEARTH", "API"  # accounts
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
# Limit of the account of clients and gateways: a body as over HTTP, and headers. The server closes
# the connection that sends more, and does not say the limit: INFO has MAX_PAYLOAD_BYTES.
CLIENT_PAYLOAD_BYTES = (4 << 20) + (64 << 10)


class NatsUser(msgspec.Struct, frozen=True):
    """One credential of a NATS server; its user name is the credential's name."""

    role: CredentialRole
    credential: str
    password: str
    region: str = ""  # the only region that its processes may announce


class NkeyUser(msgspec.Struct, frozen=True):
    """One credential that signs with its key; the server knows the public keys alone."""

    role: CredentialRole
    credential: str
    key: UserKey
    region: str = ""


class Login(msgspec.Struct, frozen=True):
    """The permissions of a credential in one account."""

    account: str
    user: str
    allowed: Permissions


def logins(
    role: CredentialRole,
    credential: str,
    region: str = "",
    *,
    is_linked: bool = False,
    classes: RegionClasses = NO_CLASSES,
) -> Iterator[Login]:
    account = CLIENTS if role == "client" else PROCESSES
    own_classes = classes.with_region(region)
    allowed = permissions(role, credential, region, is_linked=is_linked, region_classes=own_classes)
    yield Login(account, credential, allowed)
    if role == "gateway":
        yield Login(CLIENTS, api_user(credential), api_permissions(credential))


def nats_server_config(
    users: Sequence[NatsUser | NkeyUser],
    *,
    host: str,
    port: int,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    links: SiteLinks | None = None,
    classes: RegionClasses = NO_CLASSES,
) -> str:
    """Returns a nats-server configuration, with the links of its site if there are any.

    The user name is the first token of the process id, so no process can impersonate one of another
    credential. A gateway's user among the clients has its password.
    """
    entries: dict[str, list[str]] = {PROCESSES: [], CLIENTS: []}
    is_linked = links is not None
    for user in users:
        identity = user.role, user.credential, user.region
        for login in logins(*identity, is_linked=is_linked, classes=classes):
            entries[login.account].append(user_entry(_identity(user, login), login.allowed))
    options = server_options(host, port, max_payload_bytes)
    if links is None:
        return options + accounts_block(entries)
    links = msgspec.structs.replace(links, classes=classes)
    return options + accounts_block(entries, links) + links.leafnodes_block()


def _identity(user: NatsUser | NkeyUser, login: Login) -> str:
    if isinstance(user, NatsUser):
        return f'user: "{login.user}", password: "{user.password}"'
    key = user.key if login.user == user.credential else user.key.derived(API_KEY)
    return f"nkey: {key.public}"


def server_options(host: str, port: int, max_payload_bytes: int) -> str:
    """Returns the options of the server. It pings every second and disconnects after two misses, so
    a frozen member leaves its queue group soon.
    """
    return (
        f'listen: "{authority(host, port)}"\n'
        f"max_payload: {max_payload_bytes}\n"
        "max_pending: 268435456\n"
        'ping_interval: "1s"\n'
        "ping_max: 2\n"
        'write_deadline: "2s"\n'
    )


def accounts_block(entries: dict[str, list[str]], links: SiteLinks | None = None) -> str:
    limits = {CLIENTS: f"limits {{max_payload: {CLIENT_PAYLOAD_BYTES}}}, "}
    crossings = {} if links is None else {PROCESSES: f"\n{links.process_account_fields()}  "}
    accounts = "".join(
        f"  {name} {{{limits.get(name, '')}users: [\n{chr(10).join(users)}\n  ]"
        f"{crossings.get(name, '')}}}\n"
        for name, users in entries.items()
    )
    for name, body in () if links is None else links.link_accounts(PROCESSES):
        accounts += f"  {name} {{\n{body}  }}\n"
    return f"accounts {{\n{accounts}}}\n"


def user_entry(identity: str, allowed: Permissions) -> str:
    """Formats a user. `identity` are the fields that name the user and prove it."""

    def quote(subjects: tuple[str, ...]) -> str:
        return ", ".join(f'"{subject}"' for subject in subjects)

    publish = f"allow: [{quote(allowed.publish)}]" if allowed.publish else 'deny: [">"]'
    return (
        f"    {{{identity}, permissions: {{\n"
        f"      publish: {{{publish}}},\n"
        f"      subscribe: {{allow: [{quote(allowed.subscribe)}]}},\n"
        f"      allow_responses: {{max: {allowed.max_replies}, "
        f'expires: "{allowed.reply_s:g}s"}}}}}}'
    )
