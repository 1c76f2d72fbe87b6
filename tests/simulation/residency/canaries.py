"""What each simulated tenant must not leave elsewhere: its text, tokens, hashes and KV.

All can be computed in advance: the answer to a tenant's stem, the hashes under which each site
keeps its blocks, and the states of the timing engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from shared.block_hash import extend_chain, root_hash, root_key
from shared.messages import SamplingParams
from shared.sites.prefix_fingerprints import PrefixFingerprints
from shared.subjects import at_site
from tests.simulation.checks.expected import expected_choice, states_of
from tests.simulation.plan import RequestPlan
from tests.simulation.residency.drawing import ANSWER_TOKENS
from tests.simulation.residency.plan import REGIONS, TenantPlan, all_tenants
from tests.simulation.world.client import REVISION
from tests.support.canaries.canary import Canary
from tests.support.canaries.search import CanarySearch
from tests.support.world.gateway import cluster_secret_of
from tests.support.world.workers import BLOCK_SIZE


def canary_of(tenant: TenantPlan) -> Canary:
    states = states_of(tenant.stem)
    halves = b"".join(each[:8] for each in states), b"".join(each[8:] for each in states)
    return Canary(
        tenant_id=tenant.tenant_id,
        texts=(tenant.text,),
        token_ids=(tenant.stem + answer_of(tenant),),
        block_hashes=tuple(_hashes(tenant)),
        kv=(b"".join(states), *halves),
    )


def answer_of(tenant: TenantPlan) -> tuple[int, ...]:
    """Returns the answer to the stem alone."""
    plan = RequestPlan(
        request_id="",
        at_s=0.0,
        tenant_id=tenant.tenant_id,
        prompt=tenant.stem,
        num_choices=1,
        sampling=SamplingParams(seed=1, max_tokens=ANSWER_TOKENS, temperature=0.0),
        deadline_s=1.0,
        pooling=None,
        stop_modulus=0,
        leaves_after_s=None,
    )
    return tuple(expected_choice(plan, 0, states_of(tenant.stem)[-1]).token_ids)


def _hashes(tenant: TenantPlan) -> Iterator[bytes]:
    """Yields the hashes of the stem's blocks at each site; see `site_request`."""
    root = root_hash(tenant.tenant_id, REVISION)
    yield from extend_chain(root, tenant.stem, BLOCK_SIZE)
    for site in REGIONS:
        there = root_hash(
            at_site(tenant.home, tenant.tenant_id),
            REVISION,
            cache_salt=root.hex(),
            key=root_key(cluster_secret_of(site)),
        )
        yield from extend_chain(there, tenant.stem, BLOCK_SIZE)


def fingerprints_of(tenants: Iterable[TenantPlan]) -> dict[int, str]:
    """Returns the tenant of each fingerprint that a digest of a site may name."""
    found = {}
    for tenant in tenants:
        root = root_hash(tenant.tenant_id, REVISION)
        hashes = b"".join(extend_chain(root, tenant.stem, BLOCK_SIZE))
        names = PrefixFingerprints(root, hashes, BLOCK_SIZE)
        found |= {names.at(index): tenant.tenant_id for index in range(len(names))}
    return found


@cache
def search_of_all() -> CanarySearch:
    return CanarySearch(map(canary_of, all_tenants().values()))
