"""A step of a tenant's limits as its home site and another site exchange it. Pure functions."""

from __future__ import annotations

from shared.messages import ApplyLimits, LimitsApplied
from shared.subjects import SITE_SEPARATOR, at_site
from shared.tenancy.rate_limit import (
    LEASE_S,
    RATES,
    LimitCommand,
    LimitState,
    RequestedTokens,
    Settled,
    enforced_limits,
)
from shared.tenancy.tenant import TenantRecord


def step_of(gateway_id: str, tenant_id: str, command: LimitCommand) -> ApplyLimits:
    """Returns the message for the home of the tenant `{home}/{tenant}`."""
    asked = command.asked
    return ApplyLimits(
        gateway_id=gateway_id,
        tenant_id=tenant_id.partition(SITE_SEPARATOR)[2],
        settled=tuple((each.lease_id, each.num_unused_tokens) for each in command.settled),
        renewed=command.renewed,
        asked=None if asked is None else (asked.lease_id, asked.costs),
    )


def command_of(record: TenantRecord, site: str, step: ApplyLimits) -> LimitCommand:
    """Returns the step of a site under the limits of the home's record. The names of its leases are
    apart from those of other sites, and it renews only what has been admitted.
    """
    asked = None
    if step.asked is not None:
        lease_id, costs = step.asked
        by_name = {name: costs.get(name, 0) for name in RATES}
        asked = RequestedTokens(at_site(site, lease_id), by_name)
    return LimitCommand(
        limits=enforced_limits(record),
        lease_s=LEASE_S,
        settled=tuple(Settled(at_site(site, name), unused) for name, unused in step.settled),
        renewed=tuple(at_site(site, name) for name in step.renewed),
        asked=asked,
        renews_open_only=True,
    )


def state_of(reply: LimitsApplied) -> LimitState:
    used = {name: reply.used.get(name, 0.0) for name in RATES}
    return LimitState(reply.rejected_by, reply.wait_s, used, reply.num_open)
