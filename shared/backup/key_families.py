"""What Redis holds, by families of keys, and what a backup has of each.

kept        is in a backup, and `hearth restore` writes it
rebuilt     follows from what is kept, or from what processes report: it is there again by itself
left out    is lost with Redis, and a backup does not help; `lost` says what that means
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Treatment = Literal["kept", "rebuilt", "left out"]
_VARIABLE = re.compile(r"\\\{[a-z]+\\\}")


class KeyFamily(NamedTuple):
    """`pattern` has variables in braces, each of at least no characters."""

    pattern: str
    contents: str
    treatment: Treatment
    lost: str = ""


# The first pattern that matches a key is its family.
KEY_FAMILIES = (
    KeyFamily("hearth:generation", "the name of this beginning of Redis", "kept"),
    KeyFamily("hearth:tenants", "tenants: limits, weights, regions, retention", "kept"),
    KeyFamily("hearth:api_key:{digest}", "digests of API keys, NATS clients", "kept"),
    KeyFamily("hearth:retractions", "removals, revocations, changes of retention", "kept"),
    KeyFamily("hearth:region_classes", "declared region classes", "kept"),
    KeyFamily("hearth:sites", "linked sites", "kept"),
    KeyFamily("hearth:site_keys", "keys of linked sites that are trusted", "kept"),
    KeyFamily("hearth:tenant_sites", "sites that tenants have named", "kept"),
    KeyFamily("hearth:usage_unsent", "usage to report to home sites", "kept"),
    KeyFamily(
        *("hearth:usage_batch:deleted", "removed tenants whose usage is deleted", "left out"),
        "what a gateway that was frozen since then has of it is counted",
    ),
    KeyFamily(
        *("hearth:tenant_versions", "versions of records for other sites", "rebuilt"),
        "they go on from the time",
    ),
    KeyFamily(
        *("hearth:tenant_copies", "tenants of other sites", "rebuilt"),
        "their home sites send them again; until then they get 401",
    ),
    KeyFamily("hearth:model:catalogue", "the model registry", "kept"),
    KeyFamily("hearth:model:catalogue:version", "its version", "rebuilt"),
    KeyFamily("hearth:model:aliases", "aliases for all tenants", "kept"),
    KeyFamily("hearth:model:aliases:{tenant}", "a tenant's aliases", "kept"),
    KeyFamily("hearth:audit", "commands of operators", "kept"),
    KeyFamily("hearth:audit:deletions", "deletions by processes", "kept"),
    KeyFamily("hearth:audit:refusals", "refusals by processes", "kept"),
    KeyFamily(
        *("hearth:audit:refusal_counts", "refusals that are in the audit", "left out"),
        "those of running processes may be listed once more",
    ),
    KeyFamily(
        *("hearth:kv_drops", "orders to drop KV", "kept"),
        "those that have not ended, or that a site has not confirmed",
    ),
    KeyFamily(
        *("hearth:kv_drops:sites", "orders that sites have confirmed", "rebuilt"),
        "sites are sent all of them again, which is harmless",
    ),
    KeyFamily("hearth:kv_drops:progress", "how far they are", "rebuilt"),
    KeyFamily("hearth:kv_drops:last", "the number of the last order", "rebuilt"),
    KeyFamily(
        *("hearth:kv_drops:removing:{tenant}", "tenants removed 10 s ago", "left out"),
        "one may be added again sooner",
    ),
    KeyFamily(
        *("hearth:kv_drops:forgotten", "the last order that was forgotten", "left out"),
        "what a site has not confirmed is kept",
    ),
    KeyFamily(
        *("hearth:cluster:history", "events and samples of the cluster page", "left out"),
        "running gateways write theirs again",
    ),
    KeyFamily("hearth:responses:{total}", "sums of stored responses", "rebuilt"),
    KeyFamily("hearth:pinned_prefixes:{total}", "sums and changes of prefixes", "rebuilt"),
    KeyFamily(
        *("hearth:usage_batch:{writer}", "the last batch of usage of a gateway", "left out"),
        "one whose reply was lost together with Redis is counted once more",
    ),
    KeyFamily(
        *("hearth:restored:{backup}", "what of a backup's usage is added", "left out"),
        "see the rules of usage",
    ),
    KeyFamily("hearth:{tenant}:keys", "a tenant's keys, by id", "kept"),
    KeyFamily(
        *("hearth:{tenant}:meter", "used limits of the last minute", "left out"),
        "one minute's amount is allowed again",
    ),
    KeyFamily(
        *("hearth:{tenant}:open", "open requests", "rebuilt"),
        "gateways renew them every few seconds",
    ),
    KeyFamily("hearth:{tenant}:usage:{day}", "usage, here and at other sites", "kept"),
    KeyFamily(
        *("hearth:{tenant}:response:{id}", "stored responses", "kept"),
        "not those of other sites' tenants",
    ),
    KeyFamily("hearth:{tenant}:responses:{list}", "their uses, ends and sizes", "rebuilt"),
    KeyFamily(
        *("hearth:{tenant}:pinned_prefix:{name}", "named and public prefixes", "kept"),
        "not those of other sites' tenants",
    ),
    KeyFamily("hearth:{tenant}:pinned_prefixes", "their list", "rebuilt"),
    KeyFamily("hearth:{tenant}:pinned_prefix_reasons", "why one is not warm", "rebuilt"),
    KeyFamily(
        *("hearth:{tenant}:prefix:{tip}", "uses of cached prefixes", "left out"),
        "the index counts anew",
    ),
    KeyFamily("hearth:{tenant}:prefixes", "their list", "left out"),
)


def family_of(key: str) -> KeyFamily | None:
    """Returns the family of a key of Redis; None for an unknown one."""
    return next((each for each in KEY_FAMILIES if _expression(each).fullmatch(key)), None)


def _expression(family: KeyFamily) -> re.Pattern[str]:
    return re.compile(_VARIABLE.sub(".*", re.escape(family.pattern)))
