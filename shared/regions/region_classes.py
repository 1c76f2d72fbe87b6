"""Region classes: sets of regions that the operator names once, for the bus and for every process.

The text of a class is `eu=fr,de`. Its name is a token of subjects, so the permissions of a
credential decide whether it may send or receive data of the class (`shared/subjects.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from shared.errors import ConfigError

MAX_CLASSES = 16  # each adds subscriptions to every process of its regions
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RegionClasses(msgspec.Struct, frozen=True):
    """The declared classes: name → regions."""

    regions: dict[str, frozenset[str]] = {}

    def with_region(self, region: str) -> tuple[str, ...]:
        """Returns the names of the classes that contain a region, sorted; none for ""."""
        return tuple(sorted(name for name, regions in self.regions.items() if region in regions))

    def allowed(self, region_class: str, regions: Collection[str] | None) -> frozenset[str] | None:
        """Returns the regions of a class that are among `regions`, or None if both leave every
        region open. `region_class` "" is no class, `regions` None allows all. A class that is not
        declared has no region.
        """
        if not region_class:
            return None if regions is None else frozenset(regions) - {""}
        known = self.regions.get(region_class, frozenset())
        return known if regions is None else known.intersection(regions)

    def of_exactly(self, regions: Collection[str]) -> str:
        """Returns the name of the first class, sorted, that has these regions and no others; ""
        if there is none.
        """
        wanted = frozenset(regions)
        return min((name for name, each in self.regions.items() if each == wanted), default="")

    def texts(self) -> tuple[str, ...]:
        """Returns what `region_classes` reads."""
        return tuple(f"{name}={','.join(sorted(each))}" for name, each in self.regions.items())


NO_CLASSES = RegionClasses()


def region_classes(texts: Iterable[str]) -> RegionClasses:
    """Returns the classes of texts such as `eu=fr,de`. Raises ConfigError."""
    classes: dict[str, frozenset[str]] = {}
    for text in texts:
        name, separator, listed = text.partition("=")
        regions = listed.split(",")
        if not separator or not all(map(_NAME.fullmatch, (name, *regions))):
            raise ConfigError(
                f"region class {text!r} is not NAME=REGION,REGION,… of letters, digits, - and _"
            )
        if name in classes:
            raise ConfigError(f"region class {name!r} is declared twice")
        if len(set(regions)) < len(regions):
            raise ConfigError(f"region class {text!r} names a region twice")
        classes[name] = frozenset(regions)
    if len(classes) > MAX_CLASSES:
        raise ConfigError(f"{len(classes)} region classes; {MAX_CLASSES} at most")
    return RegionClasses(classes)
