"""Six sites in six regions, and a thousand tenants that may be in some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from shared.regions.region_classes import RegionClasses
from tests.simulation.sites.plan import SitesPlan

REGIONS: Mapping[str, str] = {"a": "fr", "b": "de", "c": "us", "d": "br", "e": "jp", "f": "in"}
CLASSES = RegionClasses(
    {
        "eu": frozenset({"fr", "de"}),
        "americas": frozenset({"us", "br"}),
        "asia": frozenset({"jp", "in"}),
        "treaty": frozenset({"fr", "de", "jp"}),
        **{f"only-{each}": frozenset({each}) for each in REGIONS.values()},
    }
)
NUM_TENANTS = 1000
PLANTED = "planted"  # a tenant without requests, of which all that is found was planted
FIRST_CANARY_ID, LAST_CANARY_ID = 10_000, 32_000  # of the tokens of canaries
STEM_TOKENS, LONG_STEM_TOKENS = 40, 144  # a long one has a fingerprint in digests of sites
NUM_LONG = 5  # one tenant of so many has a long stem, and the planted one


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the data of a tenant may be."""

    region_class: str = ""
    allowed_regions: tuple[str, ...] | None = None

    @property
    def regions(self) -> frozenset[str] | None:
        return CLASSES.allowed(self.region_class, self.allowed_regions)

    @property
    def class_on_bus(self) -> str:
        """The class of subjects: its own, or the one of exactly these regions."""
        return self.region_class or CLASSES.of_exactly(self.allowed_regions or ())

    @property
    def changes(self) -> dict[str, object]:
        """Of a record."""
        return {"region_class": self.region_class, "allowed_regions": self.allowed_regions}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPlan:
    tenant_id: str
    home: str  # its site
    limits: Limits
    is_zero_retention: bool = False
    stem: tuple[int, ...]  # all its prompts begin with it
    text: str  # of its prefix and its stored responses


@dataclass(frozen=True, slots=True)
class Change:
    """The operator changes where the data of a tenant may be."""

    at_s: float
    tenant_id: str
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPlan:
    sites: SitesPlan
    tenants: Mapping[str, TenantPlan]
    changes: tuple[Change, ...]
    prefixes: tuple[str, ...] = field(default=())  # tenants with a named prefix


@cache
def all_tenants() -> Mapping[str, TenantPlan]:
    """Returns the tenants of every run, the planted one last."""
    planted = replace(_tenant(NUM_TENANTS), tenant_id=PLANTED, home="a", limits=Limits("eu"))
    found = (*map(_tenant, range(NUM_TENANTS)), planted)
    return {each.tenant_id: each for each in found}


def limits_of(random: Random, region: str) -> Limits:
    """Returns limits under which a site in `region` serves; rarely others."""
    classes = CLASSES.with_region(region)
    others = [each for each in REGIONS.values() if each != region]
    allowed = (region, *random.sample(others, random.randrange(3)))
    of_class = tuple(sorted(CLASSES.regions[random.choice(classes)]))
    match random.randrange(20):
        case 0 | 1 | 2:
            return Limits()
        case 3 | 4 | 5 | 6 | 7 | 8:
            return Limits(random.choice(classes))
        case 9 | 10:
            return Limits(random.choice(classes), allowed)
        case 11:
            return Limits(random.choice(sorted(CLASSES.regions)))
        case 12:
            return Limits("", tuple(random.sample(others, 2)))
        case 13:
            return Limits("", allowed)  # rarely of a class: a linked site refuses others
        case _:
            return Limits("", of_class)


def _tenant(index: int) -> TenantPlan:
    random = Random(f"tenant {index}")
    home = sorted(REGIONS)[index % len(REGIONS)]
    num_more = (STEM_TOKENS if index % NUM_LONG else LONG_STEM_TOKENS) - 1
    more = [random.randrange(FIRST_CANARY_ID, LAST_CANARY_ID) for _ in range(num_more)]
    return TenantPlan(
        tenant_id=f"tenant-{index}",
        home=home,
        limits=limits_of(random, REGIONS[home]),
        is_zero_retention=random.random() < 0.1,
        stem=(FIRST_CANARY_ID + index, *more),  # the KV of a first token depends on it alone
        text=random.randbytes(30).hex(),  # each window of it is the tenant's alone
    )
