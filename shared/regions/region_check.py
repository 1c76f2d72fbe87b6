"""The region classes of one process: which data its bus may send and receive.

The bus names the class of a message's tenant in the subject, so that nats-server refuses what a
process should not have sent. This check comes before it, with the same classes: whatever refuses is
counted, and a message never leaves under a subject that hides its class.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.errors import OutsideRegions, SendForbidden
from shared.messages import Message
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import at_site, carries_data, class_of, in_class, site_of

MAX_NAME = 256


class RegionCheck:
    """`region` is that of the process; "" is in no class.

    `num_refused` counts what this check refuses, `num_denied` what nats-server does. They call
    `on_refused` with the tenant ("" if the message names none), that of a linked site under its
    name here, and `on_denied` with the class.
    """

    def __init__(self, region: str = "", classes: RegionClasses = NO_CLASSES) -> None:
        self.region = region
        self.classes = classes
        self.own_classes = classes.with_region(region)
        self.num_refused = self.num_denied = 0
        self.on_refused: Callable[[str], None] = _ignore
        self.on_denied: Callable[[str], None] = _ignore

    def subjects(self, subject: str) -> tuple[str, ...]:
        """Returns what a process subscribes to for one subject: it, and it in each own class."""
        if not carries_data(subject):
            return (subject,)
        return (subject, *(in_class(subject, each) for each in self.own_classes))

    def subject_for(self, subject: str, message: Message) -> str:
        """Returns the subject on which a message is sent. Raises SendForbidden, and counts."""
        region_class = message.region_class
        if region_class and region_class not in self.own_classes:
            raise SendForbidden(self._refused(_tenant_of(message), self._where(region_class)))
        return in_class(subject, region_class)

    def check_received(self, message: Message, wire_subject: str) -> None:
        """Raises OutsideRegions, and counts, unless the message belongs to the class of its
        subject, and this process to its regions.
        """
        named, region_class = class_of(wire_subject), message.region_class
        if named != region_class:
            what = f"a {type(message).__name__} of the region class {region_class!r}"
            reason = f"{what} came on a subject of {named!r}"
        elif region_class and region_class not in self.own_classes:
            reason = self._where(region_class)
        else:
            return
        tenant_id, site = _tenant_of(message), site_of(wire_subject)
        if tenant_id and site is not None:
            tenant_id = at_site(site, tenant_id)[:MAX_NAME]
        raise OutsideRegions(self._refused(tenant_id, reason))

    def _where(self, region_class: str) -> str:
        where = f"the region {self.region!r}" if self.region else "no region"
        return f"this process is in {where}, outside of {region_class!r}"

    def _refused(self, tenant_id: str, reason: str) -> str:
        """Counts a refusal. Returns its reason."""
        self.num_refused += 1
        self.on_refused(tenant_id)
        return reason

    def denied(self, subject: str) -> None:
        """Counts that nats-server has refused a subject of a region class."""
        if class_of(subject):
            self.num_denied += 1
            self.on_denied(class_of(subject))


def _tenant_of(message: Message) -> str:
    tenant_id: str = getattr(getattr(message, "request", message), "tenant_id", "")
    return tenant_id


def _ignore(_: str) -> None:
    pass
