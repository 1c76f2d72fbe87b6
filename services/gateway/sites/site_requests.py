"""The request of another site as a request of this gateway. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from shared.block_hash import extend_packed, root_hash
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import Heartbeat, ModelCard, Request
from shared.packing import TOKEN_ID_BYTES, pack_hashes
from shared.subjects import SITE_SEPARATOR, at_site

MAX_NAME = 256
MAX_CHOICES = 128  # as many as a decode worker takes


def narrowed(request: Request, workers: Iterable[Heartbeat], regions: Iterable[str]) -> Request:
    """Checks what costs this gateway memory or time. `workers` are those that decode at this site,
    and `regions` those of all its processes, some of which have a part in the request.

    Returns the request with only those of its conditions that make a difference here: requests
    with other conditions have a queue of their own, and a turn. Raises WorkerBusy for a request
    that no worker here may decode, and InvalidRequest.
    """
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


def site_request(
    request: Request, placement_id: bytes, gateway_id: str, root_key: bytes, *, weight: float = 1.0
) -> Request:
    """Returns the request as this gateway submits it to the schedulers of its site. `weight` is the
    share of a queue for all requests of the other site; their priority raises none above the
    requests of this site.

    Its KV is apart from that of this site's tenants: the root is of this site's secret, the other
    site's tenant and the other site's root, in which the salt is. Seed, positions and tokens are
    those of the other site, and so are the tokens to come.

    A tenant with regions is known at its home alone, and so is a change of its regions: nothing of
    its request stays here after the end.
    """
    site = request.gateway_id.partition(SITE_SEPARATOR)[0]
    is_bound = bool(request.allowed_regions or request.region_class)
    tenant_id = at_site(site, request.tenant_id)[:MAX_NAME]
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
        is_zero_retention=request.is_zero_retention or is_bound,
        weight=weight,
        priority=min(request.priority, 0),
    )
