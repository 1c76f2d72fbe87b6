"""The request of another site as a request of this gateway. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from shared.allowance import Allowance
from shared.block_hash import extend_packed, root_hash
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import Heartbeat, ModelCard, Request, RunPrefill
from shared.packing import TOKEN_ID_BYTES, pack_hashes
from shared.regions.region_classes import RegionClasses
from shared.subjects import SITE_SEPARATOR, at_site, is_at_site, site_in
from shared.tenancy.refusals import Refusals
from shared.tenancy.residency import regions_of

MAX_NAME = 256
MAX_CHOICES = 128  # as many as a decode worker takes
MAX_TOKENS_PER_S = 1_000_000  # of one site: hashing them takes 6% of a core


class PromptAllowances:
    """How many tokens each site may send: they cost this process time, also those of a request that
    is aborted at once.
    """

    def __init__(self) -> None:
        self._by_site: dict[str, Allowance] = {}  # those of the configuration

    def check(self, site: str, num_tokens: int, now: float) -> None:
        """Raises WorkerBusy if it is too many."""
        allowed = self._by_site.setdefault(site, Allowance(MAX_TOKENS_PER_S, 1.0, now))
        if not allowed.takes(num_tokens, now):
            raise WorkerBusy(f"site {site} sends more than {MAX_TOKENS_PER_S} tokens a second")


def narrowed(request: Request, workers: Iterable[Heartbeat], regions: Iterable[str]) -> Request:
    """Checks what costs this gateway memory or time. `workers` are those that decode at this site,
    and `regions` those of all its processes, some of which have a part in the request.

    Returns the request with only those of its conditions that make a difference here: requests
    with other conditions have a queue of their own, and a turn. Raises WorkerBusy for a request
    that no worker here may decode, and InvalidRequest.
    """
    check_names(request)
    if request.images:
        raise WorkerBusy("pixels do not cross links: no site computes images of another")
    asked = request.model, request.revision, request.block_size
    found = [each for each in workers if each.model is not None and _served(each.model) == asked]
    if not found:
        raise WorkerBusy(f"no worker of this site serves {request.model!r} now")
    cards = [each.model for each in found if each.model is not None]
    _check_sizes(request, max(each.max_context_tokens for each in cards))
    allowed = request.allowed_regions
    if allowed and not any(each.region in allowed for each in found):
        raise WorkerBusy("no worker of this site is in the allowed regions")
    needs = tuple(sorted(set(request.needs)))
    if not any(set(needs) <= set(each.features) for each in cards):
        raise WorkerBusy(f"no worker of this site has {', '.join(needs)[:MAX_NAME]}")
    is_alike = any(each.numerics == request.numerics for each in cards)
    return structs.replace(
        request,
        allowed_regions=tuple(sorted(set(regions).intersection(allowed))),
        needs=needs,
        numerics=request.numerics if is_alike else None,
    )


def check_names(message: Request | RunPrefill) -> None:
    """Raises InvalidRequest for names that a terminal would obey."""
    if not f"{message.tenant_id}{message.request_id}".isprintable():
        raise InvalidRequest("the names of tenant and request must be printable")


def _served(card: ModelCard) -> tuple[str, str, int]:
    return card.name, card.revision, card.block_size


def _check_sizes(request: Request, max_context_tokens: int) -> None:
    if not 1 <= len(request.choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{len(request.choices)} choices, expected 1 to {MAX_CHOICES}")
    if len({each.choice_index for each in request.choices}) < len(request.choices):
        raise InvalidRequest("two choices have one index")
    for packed in (request.prompt_token_ids, *(each.output_token_ids for each in request.choices)):
        if len(packed) % TOKEN_ID_BYTES:
            raise InvalidRequest("token ids must be complete")
        if len(packed) // TOKEN_ID_BYTES > max_context_tokens:
            raise WorkerBusy(f"no worker of this site has a context for {request.request_id!r}")


def num_tokens_of(message: Request | RunPrefill) -> int:
    """Returns the tokens of the prompt, and of the outputs so far."""
    if isinstance(message, RunPrefill):
        return len(message.token_ids) // TOKEN_ID_BYTES
    outputs = sum(len(each.output_token_ids) for each in message.choices)
    return (len(message.prompt_token_ids) + outputs) // TOKEN_ID_BYTES


def is_restricted(message: Request | RunPrefill) -> bool:
    """Whether the tenant's data may be in some regions only."""
    return bool(message.allowed_regions or message.region_class)


def may_retain_class(
    request: Request, classes: RegionClasses, index_regions: Iterable[str]
) -> bool:
    """Whether KV of the request's region class may stay at this site after its end. `index_regions`
    are those of the indexes here: one of the class has to follow an order to drop the KV, and none
    may be where the tenant's hashes may not.
    """
    of_class = classes.allowed(request.region_class, None) or frozenset()
    indexes = of_class.intersection(index_regions)
    return bool(indexes) and indexes <= (regions_of(request, classes) or frozenset())


def owner_of(message: Request | RunPrefill) -> str:
    """Returns the process of another site that has sent a message."""
    return message.decode_worker_id if isinstance(message, RunPrefill) else message.gateway_id


def tenant_here(message: Request | RunPrefill) -> str:
    """Returns what the tenant of another site's message is called here."""
    return at_site(site_in(owner_of(message)) or "", message.tenant_id)[:MAX_NAME]


def checked_regions(
    message: Request | RunPrefill, refusals: Refusals, region: str | None
) -> frozenset[str] | None:
    """Returns the regions that may have the tenant's data; None: all. Raises OutsideRegions, and
    counts, unless this process and the other site are in them, and WorkerBusy before the first
    state of that site, whose `region` is None until then.
    """
    regions = regions_of(message, refusals.classes)
    if regions is None:
        return None
    refusals.check("site", tenant_here(message), regions)
    if region is None:
        raise WorkerBusy("this gateway has just started: no state of the other site has come yet")
    refusals.check("site", tenant_here(message), regions, region)
    return regions


def site_request(
    request: Request,
    placement_id: bytes,
    gateway_id: str,
    root_key: bytes,
    *,
    weight: float = 1.0,
    retains_class: bool = False,
) -> Request:
    """Returns the request as this gateway submits it to the schedulers of its site. `weight` is the
    share of a queue for all requests of the other site; their priority raises none above the
    requests of this site.

    Its KV is apart from that of this site's tenants: the root is of this site's secret, the other
    site's tenant and the other site's root, in which the salt is. Seed, positions and tokens are
    those of the other site, and so are the tokens to come.

    A tenant with regions is known at its home alone, and so is a change of its regions. With
    `retains_class` the KV of one with a region class stays until its home withdraws it; of others,
    and of a tenant of a third site, nothing stays here after the end.
    """
    site, tenant_id = request.gateway_id.partition(SITE_SEPARATOR)[0], tenant_here(request)
    is_retained = not is_restricted(request) or (bool(request.region_class) and retains_class)
    is_retained &= not is_at_site(request.tenant_id)
    root = root_hash(tenant_id, request.revision, cache_salt=request.cache_root.hex(), key=root_key)
    hashes = extend_packed(root, request.prompt_token_ids, request.block_size)
    suffix = f"-{placement_id.hex()}"
    request_id = at_site(site, request.request_id)[: MAX_NAME - len(suffix)] + suffix
    return structs.replace(
        request,
        request_id=request_id,
        tenant_id=tenant_id,
        gateway_id=gateway_id,
        cache_root=root,
        block_hashes=pack_hashes(hashes),
        num_public_blocks=0,
        public_root=None,
        origin_site=site,
        is_zero_retention=request.is_zero_retention or not is_retained,
        weight=weight,
        priority=min(request.priority, 0),
    )
