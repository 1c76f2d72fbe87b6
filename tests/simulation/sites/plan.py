"""The parts of a schedule of linked sites that a seed determines in advance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tests.simulation.plan import Plan

# stall: messages of both directions, or of one, are held back; the connection may be lost then
LinkFaultKind = Literal["cut", "flap", "slow", "stall", "one_way"]
Lie = Literal["refuses", "is_silent", "accepts"]
LIAR = "liar"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """A fault of the link between two sites; `one_way` is of messages from `first`."""

    at_s: float
    kind: LinkFaultKind
    first: str
    second: str
    duration_s: float
    delay_s: float = 0.0  # of a slow link
    is_lost: bool = False  # what a stalled link held back


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesPlan:
    seed: int
    sites: Mapping[str, Plan]  # with faults of their own processes
    regions: Mapping[str, str]
    delay_s: float  # one way
    faults: tuple[LinkFault, ...]
    lie: Lie | None = None  # what a further site does that reports free blocks without end

    @property
    def has_faults(self) -> bool:
        return bool(self.faults or self.lie or any(each.faults for each in self.sites.values()))
