"""The request of another site as a request of this gateway. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from shared.block_hash import extend_packed, root_hash
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import ModelCard, Request, StartDecode
from shared.packing import TOKEN_ID_BYTES, pack_hashes
from shared.subjects import SITE_SEPARATOR, at_site

MAX_NAME = 256
MAX_CHOICES = 128  # as many as a decode worker takes


def check_request(request: Request, cards: Iterable[ModelCard]) -> None:
    """Checks what costs this gateway memory or time. `cards` are those that this site serves.

    Raises WorkerBusy for a model that is not among them, and InvalidRequest.
    """
    asked = request.model, request.revision, request.block_size
    card = next(
        (each for each in cards if (each.name, each.revision, each.block_size) == asked), None
    )
    if card is None:
        raise WorkerBusy(f"no worker of this site serves {request.model!r} now")
    if not 1 <= len(request.choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{len(request.choices)} choices, expected 1 to {MAX_CHOICES}")
    for packed in (request.prompt_token_ids, *(each.output_token_ids for each in request.choices)):
        if len(packed) % TOKEN_ID_BYTES:
            raise InvalidRequest("token ids must be complete")
        if len(packed) // TOKEN_ID_BYTES > card.max_context_tokens:
            raise WorkerBusy(f"no worker of this site has a context for {request.request_id!r}")


def site_request(command: StartDecode, gateway_id: str, root_key: bytes) -> Request:
    """Returns the request as this gateway submits it to the schedulers of its site.

    Its KV is apart from that of this site's tenants: the root is of this site's secret, the other
    site's tenant and the other site's root, in which the salt is. Seed, positions and tokens are
    those of the other site, and so are the tokens to come.
    """
    request = command.request
    site = request.gateway_id.partition(SITE_SEPARATOR)[0]
    tenant_id = at_site(site, request.tenant_id)[:MAX_NAME]
    root = root_hash(tenant_id, request.revision, cache_salt=request.cache_root.hex(), key=root_key)
    hashes = extend_packed(root, request.prompt_token_ids, request.block_size)
    suffix = f"-{command.placement_id.hex()}"
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
    )
