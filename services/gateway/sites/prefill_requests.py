"""The prefill of another site as one of this site: what is checked, and which worker computes it.
Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import structs

from services.gateway.sites.site_requests import (
    MAX_NAME,
    check_names,
    is_restricted,
    num_tokens_of,
    tenant_here,
)
from shared.block_hash import extend_packed, root_hash
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import Heartbeat, ModelCard, RunPrefill
from shared.packing import TOKEN_ID_BYTES, pack_hashes
from shared.sites.kv_targets import Network, check_networks, check_targets_of_site
from shared.subjects import at_site, is_at_site, site_in

MAX_LEASE_S = 10.0


def check_prefill(command: RunPrefill, networks: Sequence[Network]) -> None:
    """Checks what another site asks for. Raises InvalidRequest."""
    check_names(command)
    check_targets_of_site(command)
    check_networks(command.targets, networks)
    if len(command.token_ids) % TOKEN_ID_BYTES:
        raise InvalidRequest("token ids must be complete", param="token_ids")


def chosen_prefill(
    command: RunPrefill,
    workers: Iterable[Heartbeat],
    relayed_tokens: Mapping[str, int],
    regions: Collection[str] | None = None,
) -> Heartbeat:
    """Returns the worker of this site with the fewest tokens to compute, of those in `regions`
    (None: any) whose KV the decode worker may hold. `relayed_tokens` are those that this gateway
    has passed on: a heartbeat does not have the latest. Raises WorkerBusy.
    """

    def num_tokens(worker: Heartbeat) -> int:
        in_flight = 0 if worker.load is None else worker.load.prefill_tokens_in_flight
        return in_flight + relayed_tokens.get(worker.process_id, 0)

    allowed = (each for each in workers if regions is None or each.region in regions)
    fitting = (each for each in allowed if _fits(each, command))
    chosen = min(fitting, key=num_tokens, default=None)
    if chosen is None:
        raise WorkerBusy(f"no prefill worker of this site fits {command.model!r} now")
    return chosen


def _fits(worker: Heartbeat, command: RunPrefill) -> bool:
    card = worker.model
    if card is None or worker.state != "ready" or is_at_site(worker.process_id):
        return False
    is_same = (card.name, card.revision) == (command.model, command.revision)
    return is_same and _may_push(card, command)


def _may_push(card: ModelCard, command: RunPrefill) -> bool:
    return (
        card.kv_format == command.kv_format
        and card.numerics.may_share_kv(command.numerics)
        and set(command.needs) <= set(card.features)
        and not command.images  # pixels do not cross links
        and num_tokens_of(command) <= card.max_context_tokens
    )


def site_prefill(
    command: RunPrefill,
    gateway_id: str,
    root_key: bytes,
    *,
    block_size: int,
    max_deadline_s: float,
    target_region: str = "",
) -> RunPrefill:
    """Returns the command as this gateway sends it to a prefill worker of its site, for a decode
    worker in `target_region`.

    Its KV is cached apart from that of this site's tenants, with that of the requests of its tenant
    that this site serves. Nothing is cached of a tenant that is restricted to regions, or of a
    third site: see `site_request`.
    """
    site, tenant_id = site_in(command.decode_worker_id) or "", tenant_here(command)
    salt = command.cache_root.hex()
    root = root_hash(tenant_id, command.revision, cache_salt=salt, key=root_key)
    return structs.replace(
        command,
        decode_worker_id=gateway_id,
        tenant_id=tenant_id,
        request_id=at_site(site, command.request_id)[:MAX_NAME],
        cache_root=root,
        block_hashes=pack_hashes(extend_packed(root, command.token_ids, block_size)),
        num_public_blocks=0,
        public_root=None,
        is_zero_retention=command.is_zero_retention
        or is_restricted(command)
        or is_at_site(command.tenant_id),
        lease_s=min(command.lease_s, MAX_LEASE_S),
        deadline_s=min(command.deadline_s, max_deadline_s),
        target_region=target_region,
    )
