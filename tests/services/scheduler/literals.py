"""Submitted requests as literals for the scheduler's tests."""

from __future__ import annotations

from shared.block_hash import extend_chain, root_hash
from shared.messages import Choice, Request, SamplingParams, SubmitRequest
from shared.numerics import Numerics
from shared.packing import pack_hashes, pack_token_ids

BLOCK_SIZE = 16


def submit_of(
    request_id: str,
    *,
    tenant_id: str = "tenant",
    gateway_id: str = "gateway-0",
    model: str = "m",
    num_prompt_tokens: int = 20,
    max_tokens: int = 10,
    deadline_s: float = 60.0,
    priority: int = 0,
    excluded_workers: tuple[str, ...] = (),
    affinity_key: str = "",
    allowed_regions: tuple[str, ...] = (),
    numerics: Numerics | None = None,
    needs: tuple[str, ...] = (),
    is_queueable: bool = True,
) -> SubmitRequest:
    token_ids = range(num_prompt_tokens)
    root = root_hash(tenant_id, "r1")
    request = Request(
        request_id=request_id,
        tenant_id=tenant_id,
        gateway_id=gateway_id,
        model=model,
        revision="r1",
        cache_root=root,
        prompt_token_ids=pack_token_ids(token_ids),
        block_hashes=pack_hashes(extend_chain(root, token_ids, BLOCK_SIZE)),
        sampling=SamplingParams(seed=1, max_tokens=max_tokens),
        choices=(Choice(choice_index=0),),
        deadline_s=deadline_s,
        priority=priority,
        numerics=numerics,
        allowed_regions=allowed_regions,
        needs=needs,
    )
    return SubmitRequest(
        request=request,
        excluded_workers=excluded_workers,
        affinity_key=affinity_key,
        is_queueable=is_queueable,
    )
