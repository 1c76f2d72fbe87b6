"""Redis users, one for each role, with the commands and keys that the role needs.

A key pattern grants all of a role's commands: Redis does not tell a script's reads from its writes.
No role may read other databases' keys, see other clients, or change the server.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

_CONNECTION = ("auth", "hello", "ping", "select")
_SCRIPTS = ("evalsha", "eval", "script|load")
_READ = (
    "get",
    "mget",
    "strlen",
    "hget",
    "hgetall",
    "hmget",
    "hexists",
    "hkeys",
    "hlen",
    "exists",
    "ttl",
    "time",
)
_READ_SETS = ("zcard", "zrange", "zrangebyscore", "zrevrange", "zscore", "zscan")
_WRITE = ("set", "setnx", "incrby", "del", "expire", "hset", "hsetnx", "hdel", "hincrby")
_WRITE_SETS = ("zadd", "zrem", "zremrangebyscore", "zremrangebyrank")
_PREFIXES = (
    "hearth:*:prefix:*",
    "hearth:*:prefixes",
    "hearth:*:pinned_prefixes",
    "hearth:*:pinned_prefix:*",
    "hearth:*:pinned_prefix_reasons",
    "hearth:pinned_prefixes:*",
)
_REGISTRY = "hearth:model:*"


_KV_DROPS = ("hearth:kv_drops", "hearth:kv_drops:*")
_AUDIT_EVENTS = "hearth:audit:*"  # what operators have done is in hearth:audit


class RedisRole(NamedTuple):
    commands: tuple[str, ...]
    keys: tuple[str, ...]


_DATA = (*_CONNECTION, *_SCRIPTS, *_READ, *_READ_SETS, *_WRITE, *_WRITE_SETS)
REDIS_ROLES: dict[str, RedisRole] = {
    "gateway": RedisRole(
        (*_DATA, "info|memory", "xadd", "xrevrange"),
        (
            "hearth:generation",
            "hearth:tenants",
            "hearth:tenant_copies",
            "hearth:tenant_versions",
            "hearth:tenant_sites",
            "hearth:usage_unsent",
            "hearth:sites",
            "hearth:region_classes",
            "hearth:site_keys",
            "hearth:api_key:*",
            "hearth:*:keys",
            "hearth:*:meter",
            "hearth:*:open",
            "hearth:*:usage:*",
            "hearth:usage_batch:*",
            "hearth:*:response:*",
            "hearth:*:responses:*",
            "hearth:responses:*",
            "hearth:cluster:history",
            _REGISTRY,
            *_PREFIXES,
            *_KV_DROPS,
            _AUDIT_EVENTS,
        ),
    ),
    "kv_index": RedisRole(
        (*_DATA, "xadd"),
        ("hearth:tenants", "hearth:tenant_copies", *_PREFIXES, *_KV_DROPS, _AUDIT_EVENTS),
    ),
    "host": RedisRole((*_CONNECTION, *_SCRIPTS, *_READ, *_WRITE), ("hearth:generation", _REGISTRY)),
    "operator": RedisRole((*_DATA, "xadd", "xrevrange"), ("hearth:*",)),
}


def acl_rules(role: str, password: str) -> list[str]:
    """Returns what follows the user's name in ACL SETUSER, and in a configuration. It has only the
    SHA-256 of the password.
    """
    allowed = REDIS_ROLES[role]
    return [
        "reset",
        "on",
        f"#{sha256(password.encode()).hexdigest()}",
        *(f"~{each}" for each in allowed.keys),
        *(f"+{each}" for each in allowed.commands),
    ]


def acl_line(role: str, password: str) -> str:
    """Returns a line of a Redis configuration or an ACL file; the user is named like the role."""
    return f"user {role} {' '.join(acl_rules(role, password))}"
