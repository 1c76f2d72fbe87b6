"""The request of another site as a request of this gateway. A pure function."""

from __future__ import annotations

from msgspec import structs

from shared.block_hash import extend_packed, root_hash
from shared.messages import Request, StartDecode
from shared.packing import pack_hashes
from shared.subjects import SITE_SEPARATOR, at_site

MAX_NAME = 256


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
    request_id = (
        f"{at_site(site, request.request_id)[: MAX_NAME - 9]}-{command.placement_id[:4].hex()}"
    )
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
