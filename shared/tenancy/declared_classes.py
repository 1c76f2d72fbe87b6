"""The declared region classes in Redis, where commands that name one find them.

hearth:region_classes   JSON: class → its regions; gateways write it, with their configuration
"""

from __future__ import annotations

import msgspec

from shared.errors import ConfigError
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.store import Store

REGION_CLASSES = "hearth:region_classes"


async def declare_classes(store: Store, classes: RegionClasses) -> None:
    """Writes the classes in place of others; a process without any writes nothing. Raises
    StoreUnavailable.
    """
    if classes.regions:
        await store.write([("SET", REGION_CLASSES, msgspec.json.encode(classes.regions))])


async def declared_classes(store: Store) -> RegionClasses:
    """Raises ConfigError for an unreadable record, and StoreUnavailable."""
    data = await store.get(REGION_CLASSES)
    if data is None:
        return NO_CLASSES
    try:
        return RegionClasses(msgspec.json.decode(data, type=dict[str, frozenset[str]]))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{REGION_CLASSES} is unreadable: {error}") from None


async def check_declared(store: Store, region_class: str) -> None:
    """Raises ConfigError for a class that no gateway has declared, and StoreUnavailable."""
    known = (await declared_classes(store)).texts()
    if region_class and region_class not in (each.partition("=")[0] for each in known):
        found = f"declared are {', '.join(known)}" if known else "no gateway has declared any"
        raise ConfigError(f"no region class {region_class!r}: {found} (HEARTH_REGION_CLASSES)")
